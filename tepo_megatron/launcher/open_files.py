"""Check that this machine lets the processes of a run open as many files as they need."""

from tepo_megatron.config import RewardConfig, RolloutConfig
from tepo_megatron.errors import ConfigError
from tepo_megatron.inference.servers.client import CONTROL_CONNECTIONS
from tepo_megatron.utils.open_files import WANTED, raise_open_file_limit

# Measured on a CPU (gloo, torch 2.13, vLLM 0.32): with vLLM and 2 ranks (tp 2) rank 0
# has at most 138 open files and rank 1 116; with a scripted engine and 4 ranks (tp 2, dp 2) 145 and 136. That is 10 per rank
# plus 118. vLLM's API server has 40 with few requests, its engine 74, a grader 5. NCCL was not measured.
_BASE = 160
_PER_RANK = 12  # gloo connections, one in each process group
_PER_WORKER = 3  # pipes of a grading worker


def needed_open_files(ranks: int, rollout: RolloutConfig, reward: RewardConfig) -> int:
    """Return how many files, pipes and connections one process of the run must be able to open, with one request per server.

    With a limit that is too low for `rollout.server.concurrency` requests per server, the run sends fewer (`ServerPool`), and
    where it is too low for all agents of a step, fewer run at once (`CustomRollouts`).
    """
    requests = rollout.servers * (1 + CONTROL_CONNECTIONS)
    return _BASE + requests + _PER_RANK * ranks + _PER_WORKER * reward.workers * len(reward.terms)


def check_open_files(needed: int) -> None:
    """Raise this process's limit of open files as far as is useful; child processes inherit it.

    Raises:
        ConfigError: The hard limit is lower than `needed`.
    """
    if (limit := raise_open_file_limit(max(needed, WANTED))) < needed:
        raise ConfigError(
            f"a process may open {limit} files here, and this run needs {needed}; raise the limit (`ulimit -n {needed}`), or "
            "lower rollout.servers or reward.workers"
        )
