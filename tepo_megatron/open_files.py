"""Whether this machine lets the processes of a run open as many files as they need."""

from __future__ import annotations

import resource

from tepo_megatron.config import Config
from tepo_megatron.errors import ConfigError

# Measured with `python -m tests.harness.open_files` on a CPU (gloo, torch 2.13, vLLM 0.32). With vLLM and 2 ranks (tp 2) rank 0
# has 138 files open at most and rank 1 116; with a scripted engine and 4 ranks (tp 2, dp 2) 145 and 136: 10 for each rank, and
# 118 beside them. vLLM's API server has 40 with few requests, its engine 74, a grader 5. With NCCL it was not measured.
_BASE = 160
_PER_RANK = 12  # connections of gloo, one in each group of ranks
_PER_WORKER = 3  # pipes of a grading worker


def needed_open_files(cfg: Config) -> int:
    """Return the most files, pipes and connections that one process of the run may have open at once."""
    requests = cfg.rollout.servers * cfg.rollout.server.concurrency
    terms = 1 if cfg.reward.terms is None else len(cfg.reward.terms)
    return _BASE + requests + _PER_RANK * cfg.parallel.world_size + _PER_WORKER * cfg.reward.workers * terms


def check_open_files(cfg: Config) -> None:
    """Raise the limit of this process where it is too low; the processes that it starts inherit it.

    Raises ConfigError if the hard limit is too low.
    """
    needed = needed_open_files(cfg)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"a process may open {hard} files here, and this run needs {needed}; raise the limit (`ulimit -n {needed}`), or "
            "lower rollout.server.concurrency or reward.workers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
