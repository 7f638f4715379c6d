"""Start the ranks of a run on this machine, and turn whatever ends them into one message.

Inside torchrun (RANK is set) `tepo train` is a rank itself.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tepo_megatron.config import Config
from tepo_megatron.config_io import to_yaml
from tepo_megatron.errors import TepoError
from tepo_megatron.memory_kills import MemoryKills
from tepo_megatron.private import WORLD_FOLDER, make_private_folder
from tepo_megatron.processes import die_with_parent, end_later
from tepo_megatron.quiet import quiet_upstream
from tepo_megatron.ranks import RankProcesses, first_failure, interrupted_by_signals, leave_message
from tepo_megatron.storage import disk_fault, writing

if TYPE_CHECKING:
    from tepo_megatron.driver import EngineFactory
    from tepo_megatron.platform import Platform

# Our launcher's process id, for the ranks that it starts.
_LAUNCHER = "TEPO_LAUNCHER_PID"
# What torchrun's agent sets for its ranks, and how long one that can end does not need.
_AGENT, _AGENT_SECONDS = "TORCHELASTIC_RUN_ID", 30.0


class RanksFailed(TepoError, RuntimeError):
    """A rank ended with an error; the message is that of the rank that failed first."""


def inside_torchrun() -> bool:
    """Whether this process is already a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(cfg: Config, worker: str = "tepo_megatron.worker", inherit: Sequence[int] = ()) -> None:
    """Run `python -m WORKER CONFIG` once per rank and wait.

    The ranks meet in a folder that only this user can enter, which also holds their copy of the config. Nothing listens for
    them but gloo and NCCL between the ranks themselves, on the loopback interface where no server is on another machine.

    Args:
        cfg: what the ranks of this launch are given, whatever the run's folder says.
        worker: the module that a rank runs.
        inherit: file descriptors that the ranks keep open, such as that of the run's lock.

    Raises:
        RanksFailed: with the first failure.
        KeyboardInterrupt: a signal ended the launcher. In both cases all ranks are gone when it raises, and their servers and
            graders end with them (they ask the kernel for it).
    """
    kills = MemoryKills()
    with interrupted_by_signals(), make_private_folder("ranks") as private:
        folder = private.path
        config = folder / "config.yaml"
        with writing(config):
            config.write_text(to_yaml(cfg))
            (folder / "heartbeats").mkdir()
        words, shared = ["-m", worker, str(config)], _environment(cfg, folder)
        with RankProcesses(words, cfg.parallel.world_size, folder, shared, inherit) as ranks:
            ranks.start()
            failures = ranks.wait()
    if failures:
        raise RanksFailed(first_failure(failures, kills))


def _environment(cfg: Config, folder: Path) -> dict[str, str]:
    """Of all ranks: where they meet, how many threads they have, and the interface on which they connect."""
    shared = {_LAUNCHER: str(os.getpid()), WORLD_FOLDER: str(folder), "GLOO_SOCKET_IFNAME": "lo"}
    server = cfg.rollout.server
    if server.urls is None and server.rendezvous is None:
        shared["NCCL_SOCKET_IFNAME"] = "=lo"  # else servers on other machines may have to reach a rank by it
    threads = {"OMP_NUM_THREADS": str(threads_of_rank(cfg.parallel.world_size))}
    if cfg.platform == "cpu":
        # one thread a rank; threads that wait must not spin while the server works on the same cores
        threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return shared | {name: value for name, value in threads.items() if name not in os.environ}


def threads_of_rank(ranks: int) -> int:
    """Threads of one of `ranks` ranks on this machine: an equal share of the cores that this process may use.

    Without it every rank of PyTorch takes all cores; torchrun gives each a single one, too few for what stays on the host.
    """
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def run_rank(
    cfg: Config, make_engine: EngineFactory | None = None, work: Callable[[Config, Platform], None] | None = None
) -> int:
    """Train as this process's rank; returns the exit status. make_engine: instead of the config's engine; work: instead of
    training.

    SIGINT and SIGTERM end a rank at once: it may sit in a collective that no Python handler can interrupt, and everything it
    leaves behind is written whole or not at all. It ends with its launcher, or torchrun's agent, however that ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if _LAUNCHER in os.environ:
        die_with_parent(int(os.environ[_LAUNCHER]))
    elif _AGENT in os.environ:
        die_with_parent(os.getppid())
    quiet_upstream()
    # one hardware queue: kernels start in the order in which Megatron-Core's overlap of tp communication needs them
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    from tepo_megatron.platform import activate

    try:
        platform = activate(cfg.platform)
        if work is not None:
            work(cfg, platform)
            return 0
        from tepo_megatron.train import train  # imports Megatron-Core, which the platform must come before

        train(cfg, platform, make_engine, end=_end_at_once)
    except TepoError as e:
        leave_message(str(e), expected=True)
        return 1
    except Exception as e:
        fault = disk_fault(e, cfg.run_dir, written=False)
        leave_message(fault or traceback.format_exc().rstrip(), expected=fault is not None)
        return 1
    return 0


def _end_at_once(message: str, cut_off: bool) -> NoReturn:
    """cut_off: from the store of the world. So is the agent of torchrun on this machine: it asks that store, and a connection
    without an answer holds it until TCP gives up, whatever its own time-outs say (torch 2.13)."""
    leave_message(message, expected=True)
    if cut_off and _AGENT in os.environ and _LAUNCHER not in os.environ:
        end_later(os.getppid(), _AGENT_SECONDS)
    os._exit(1)
