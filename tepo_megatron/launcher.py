"""Start the ranks of a run on this machine, and turn whatever ends them into one message.

Inside torchrun (RANK is set) `tepo train` is a rank itself.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tepo_megatron.config import Config
from tepo_megatron.errors import TepoError
from tepo_megatron.processes import die_with_parent, end_later
from tepo_megatron.quiet import quiet_upstream

if TYPE_CHECKING:
    from tepo_megatron.driver import EngineFactory
    from tepo_megatron.platform import Platform

# The agent's name for the file in which a rank leaves its last words.
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# Our launcher's process id, for the ranks that it starts.
_LAUNCHER = "TEPO_LAUNCHER_PID"
# What torchrun's agent sets for its ranks, and how long one that can end does not need.
_AGENT, _AGENT_SECONDS = "TORCHELASTIC_RUN_ID", 30.0


_KILLED = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)


class RanksFailed(TepoError, RuntimeError):
    """A rank ended with an error; the message is that of the rank that failed first."""


def inside_torchrun() -> bool:
    """Whether this process is already a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(cfg: Config, config_path: Path, worker: str = "tepo_megatron.worker") -> None:
    """Run `python -m WORKER config_path` once per rank and wait.

    Raises RanksFailed with the first failure; KeyboardInterrupt when a signal ended the launcher. In both cases all ranks are
    gone when it raises, and their servers and graders end with them (they ask the kernel for it).
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "10")  # then SIGKILL
    os.environ[_LAUNCHER] = str(os.getpid())
    if cfg.platform == "cpu":
        # one thread a rank; threads that wait must not spin while the server works on the same cores
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    agent = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=cfg.parallel.world_size,
        run_id=f"tepo-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        local_addr="localhost",
    )
    try:
        elastic_launch(agent, sys.executable)("-m", worker, str(config_path))
    except ChildFailedError as e:
        raise RanksFailed(_first_failure(e.failures)) from None
    except SignalException as e:
        raise KeyboardInterrupt(f"signal {e.sigval.name}") from None


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
        _leave_last_words(str(e), expected=True)
        return 1
    except Exception:
        _leave_last_words(traceback.format_exc().rstrip(), expected=False)
        return 1
    return 0


def _end_at_once(message: str, cut_off: bool) -> NoReturn:
    """cut_off: from the store of the world. So is the agent of torchrun on this machine: it asks that store, and a connection
    without an answer holds it until TCP gives up, whatever its own time-outs say (torch 2.13)."""
    _leave_last_words(message, expected=True)
    if cut_off and _AGENT in os.environ and _LAUNCHER not in os.environ:
        end_later(os.getppid(), _AGENT_SECONDS)
    os._exit(1)


def _leave_last_words(message: str, expected: bool) -> None:
    """To the agent that started this rank, or to stderr without one."""
    path = os.environ.get(_ERROR_FILE)
    if path is None:
        print(f"tepo: rank {os.environ.get('RANK', '0')}: {message}", file=sys.stderr, flush=True)
        return
    extra = {"timestamp": str(int(time.time())), "time": time.time(), "expected": expected}
    Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


def _first_failure(failures: Mapping[int, Any]) -> str:
    """The message of the failure that caused the others, of torch's `ProcessFailure` by rank.

    An error of ours comes first; then a rank that was killed from outside; then the earliest traceback (ranks whose peers
    vanished fail too, in their collectives). What only follows comes last: aborts and the agent's own SIGTERM.
    """

    def order(rank: int) -> tuple[int, float]:
        failure = failures[rank]
        if isinstance(failure.message, dict):
            said = failure.message["extraInfo"]
            return (0 if said["expected"] else 2), float(said["time"])
        return (1 if -failure.exitcode in _KILLED else 3), 0.0

    rank = min(failures, key=order)
    failure = failures[rank]
    if isinstance(failure.message, dict):
        return f"rank {rank}: {failure.message['message']}"
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        why = "; the machine may be out of memory" if -failure.exitcode == signal.SIGKILL else ""
        return f"rank {rank} (pid {failure.pid}) was ended by {name}{why}"
    return f"rank {rank} (pid {failure.pid}) exited with status {failure.exitcode} without a message"
