"""Start the ranks of a run on this machine, and turn any failure of theirs into one message.

A run on several machines has a launcher on each; that of the first machine keeps the store in which all ranks meet. Where a
rank fails, those of the other machines fail too. So each launcher restarts its own, and they meet again under the number of the
attempt.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tepo_megatron.base.errors import ConfigError, RunStopped, TepoError, escaped
from tepo_megatron.base.memory_kills import MemoryKills, cpu_threads, usable_cores
from tepo_megatron.base.processes import ATTEMPT, LAUNCHER, RANK_THREADS, START_ID
from tepo_megatron.base.save_requests import STOP, ask
from tepo_megatron.base.scratch import WORLD_FOLDER, make_private_folder
from tepo_megatron.base.storage import writing
from tepo_megatron.command.ranks import (
    SERVICE,
    RankProcesses,
    RestartPolicy,
    ServiceProcess,
    first_failure,
    interrupted_by_signals,
)
from tepo_megatron.config import AnyServerConfig, Config
from tepo_megatron.config.io import to_yaml
from tepo_megatron.monitor.run_dir import rename_hang


@dataclass(frozen=True)
class Nodes:
    """The machines of a run, as one of them sees them. The options of `tepo train` have torchrun's names."""

    count: int = 1
    index: int = 0  # of this machine, from 0
    endpoint: str = ""  # HOST:PORT of the store, which the first machine's launcher keeps; unused on one machine
    # Unique name of this start of the run: ranks that are left of an earlier one do not meet those of this one
    start: str = "none"

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ConfigError(f"--node-rank {self.index}: expected a number from 0 to --nnodes {self.count} minus 1")
        if self.count > 1 and not (self._address[0] and self._address[1].isdecimal()):
            raise ConfigError(f"--rdzv-endpoint {self.endpoint!r}: --nnodes {self.count} needs HOST:PORT of the first machine")

    @property
    def is_first(self) -> bool:
        """Return whether rank 0, the service and the run's lock are on this machine."""
        return self.index == 0

    @property
    def _address(self) -> tuple[str, str]:
        host, _, port = self.endpoint.rpartition(":")
        return host.strip("[]"), port

    def ranks(self, world_size: int) -> range:
        """Return the ranks of this machine. Raises ConfigError if the machines cannot have equally many."""
        if world_size % self.count:
            raise ConfigError(
                f"parallel: tp*pp*cp*dp = {world_size} ranks are no multiple of --nnodes {self.count}; change parallel.dp or "
                "the number of machines"
            )
        here = world_size // self.count
        return range(self.index * here, (self.index + 1) * here)

    @property
    def environment(self) -> dict[str, str]:
        """The variables from which the ranks of several machines know their store."""
        host, port = self._address
        own_store = {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # rank 0 shall not start it
        return {"MASTER_ADDR": host, "MASTER_PORT": port, START_ID: self.start} | own_store

    @contextlib.contextmanager
    def store(self) -> Iterator[None]:
        """Keep the store of the ranks inside the block, if this is the first of several machines. It outlives restarts."""
        if self.count == 1 or not self.is_first:
            yield
            return
        import torch.distributed as dist  # which no other launcher needs

        host, port = self._address
        try:
            kept = dist.TCPStore(host, int(port), is_master=True, wait_for_workers=False)
        except RuntimeError as e:
            raise ConfigError(f"--rdzv-endpoint {self.endpoint}: cannot listen there ({e}); choose another port") from None
        yield
        del kept


ONE_MACHINE = Nodes()


def refuse_torchrun() -> None:
    """Raise ConfigError if torchrun started this process, which starts the ranks itself."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(
            "tepo starts the ranks of its machine itself; call it without torchrun, on each machine once: tepo train CONFIG "
            "--nnodes N --node-rank I --rdzv-endpoint HOST:PORT (docs/rollouts.md)"
        )


class RanksFailed(TepoError, RuntimeError):
    """A rank ended with an error. The message is that of the rank that failed first."""


def launch(
    cfg: Config,
    worker: str = "tepo_megatron.trainer.worker",
    inherit: Sequence[int] = (),
    nodes: Nodes = ONE_MACHINE,
    service: Sequence[str] = SERVICE,
) -> None:
    """Run `python -m WORKER CONFIG` once per rank and wait for all ranks. Restart them as `checkpoint.max_restarts` says.

    The rollout service runs next to rank 0 as `python SERVICE`, and lives on during restarts; without words there is none.

    The ranks of one machine rendezvous in a folder that only this user can enter; it also holds their copy of the config. The
    only listening sockets are those of gloo and NCCL between the ranks, on the loopback interface if no server is on another
    machine.

    On SIGUSR1 and on the first SIGTERM the run saves a checkpoint and ends; with `rollout.only` there is nothing to save.

    Raises:
        RunStopped: The run was asked to end, and its work is saved.
        RanksFailed: A rank failed; the message is that of the first failure.
        KeyboardInterrupt: A signal ended the launcher. After either error all ranks have ended. Their servers and graders end
            with them (PR_SET_PDEATHSIG).
    """
    ranks = nodes.ranks(cfg.parallel.world_size)
    threads = _threads(len(ranks), cfg.platform, cfg.model.path)
    with_ranks = {LAUNCHER: str(os.getpid()), "LOCAL_WORLD_SIZE": str(len(ranks))} | threads
    policy = RestartPolicy(cfg.checkpoint.max_restarts if cfg.restarts_ranks else 0, cfg.run_dir / "checkpoints")
    attempt = 0
    with (
        interrupted_by_signals(None if cfg.rollout.only else partial(_ask_to_stop, cfg.run_dir)),
        make_private_folder("ranks") as private,
        nodes.store(),
        ServiceProcess(service, with_ranks) as service_process,
    ):
        while True:
            kills, folder = MemoryKills(), private.path / f"attempt-{attempt}"
            words = ["-m", worker, str(_write_config(to_yaml(cfg), folder))]
            rendezvous = nodes.environment if nodes.count > 1 else _local_rendezvous(folder, cfg.rollout.server)
            environment = with_ranks | {ATTEMPT: str(attempt)} | rendezvous
            with RankProcesses(words, ranks, cfg.parallel.world_size, folder, environment, inherit) as processes:
                processes.start(service_process if service and nodes.is_first else None)
                failures = processes.wait()
            allowed = policy.allow(failures, kills) if failures else None
            if allowed is None:
                break
            _log(cfg.run_dir, f"{service_process.explained(first_failure(failures, kills), kills)}\n{allowed}")
            cfg = replace(cfg, resume=True, overwrite=False)
            rename_hang(cfg.run_dir)
            attempt += 1
    stopped = failures.get(0)
    if stopped is not None and stopped.status == os.EX_TEMPFAIL and stopped.message is not None:
        raise RunStopped(str(stopped.message["message"]))
    if failures:
        raise RanksFailed(service_process.explained(first_failure(failures, kills), kills))


def _write_config(text: str, folder: Path) -> Path:
    """Write the config into the private folder of an attempt, where its ranks also rendezvous; return its path."""
    config = folder / "config.yaml"
    with writing(config):
        folder.mkdir(mode=0o700)
        config.write_text(text)
        (folder / "heartbeats").mkdir()
    return config


def _log(run_dir: Path, text: str) -> None:
    print(escaped(text), flush=True)
    with contextlib.suppress(OSError), (run_dir / "log.txt").open("a") as log:
        log.write(f"{escaped(text)}\n")


def _ask_to_stop(run_dir: Path, name: str) -> None:
    ask(run_dir, STOP)
    after = "; another one ends it at once" if name == "SIGTERM" else ""
    # to stderr without print, which the signal may have interrupted
    os.write(2, f"tepo: {name}: the run saves a checkpoint and ends{after}\n".encode())


def _local_rendezvous(folder: Path, server: AnyServerConfig) -> dict[str, str]:
    """Return the rendezvous of ranks that are all on this machine, and the interface of gloo and NCCL."""
    # servers on other machines may have to reach a rank
    return {WORLD_FOLDER: str(folder), "GLOO_SOCKET_IFNAME": "lo"} | ({} if server.others else {"NCCL_SOCKET_IFNAME": "=lo"})


def _threads(ranks: int, platform: str, model: str) -> dict[str, str]:
    """Return the number of threads of each of a machine's ranks; what the environment says takes precedence."""
    threads = {"OMP_NUM_THREADS": str(threads_of_rank(ranks))}
    if platform == "cpu":
        # waiting threads must not spin, because the server works on the same cores
        threads = {"OMP_NUM_THREADS": str(cpu_threads(Path(model), ranks)), "OMP_WAIT_POLICY": "PASSIVE"}
    ours = {name: value for name, value in threads.items() if name not in os.environ}
    return ours | ({RANK_THREADS: "1"} if "OMP_NUM_THREADS" in ours else {})


def threads_of_rank(ranks: int) -> int:
    """Return the number of threads of one of `ranks` ranks: an equal share of the cores that this process may use.

    Without it every PyTorch rank would use all cores.
    """
    return max(1, usable_cores() // ranks)
