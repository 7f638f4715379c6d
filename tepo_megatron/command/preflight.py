"""Check a run before any process is started. Heavy imports are inside, where an interrupt is reported in one line."""

from collections.abc import Mapping
from pathlib import Path

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.base.processes import WANTED, raise_open_file_limit
from tepo_megatron.config import Config, RewardConfig, RolloutConfig
from tepo_megatron.engines.servers.client import CONTROL_CONNECTIONS

# Measured on a CPU (gloo, torch 2.13, vLLM 0.32): with vLLM and 2 ranks (tp 2) rank 0
# has at most 138 open files and rank 1 116; with a scripted engine and 4 ranks (tp 2, dp 2) 145 and 136. That is 10 per rank
# plus 118. vLLM's API server has 40 with few requests, its engine 74, a grader 5. NCCL was not measured.
_BASE = 160
_PER_RANK = 12  # gloo connections, one in each process group
_PER_WORKER = 3  # pipes of a grading worker


def preflight(cfg: Config, lengths: Mapping[str, int] | None = None) -> None:
    """Make every check that is possible before a process is started. Raises a TepoError.

    Args:
        lengths: The most tokens of a sequence by the keys that add up to it; None: those of RL.
    """
    from tepo_megatron.actor.layout import check_layout, check_shared_prompts
    from tepo_megatron.actor.passed_fields import check_passed_fields
    from tepo_megatron.actor.precision import check_shapes
    from tepo_megatron.data.prompts import check_rows
    from tepo_megatron.engines.model_checks import (
        check_experts,
        check_heads,
        check_linear_attention,
        check_truncation,
        replayed_routing,
    )
    from tepo_megatron.engines.servers.served_model import check_cache
    from tepo_megatron.evaluation.problems import check_sources
    from tepo_megatron.models.families import find_family, read_config
    from tepo_megatron.models.families.tokens import check_tokenizer
    from tepo_megatron.models.fit import check_positions
    from tepo_megatron.models.hf_io import HfReader
    from tepo_megatron.rewards.build import check_reward
    from tepo_megatron.rollout.custom import load_function
    from tepo_megatron.service.method import resolve

    check_open_files(needed_open_files(cfg.parallel.world_size, cfg.rollout, cfg.reward))
    resolve(cfg)
    check_sources(cfg.evaluation)
    if cfg.rollout.function is not None:
        load_function(cfg.rollout.function)
    check_reward(cfg.reward)
    hf_config = read_config(cfg.model.path)
    family = find_family(hf_config)
    architecture = family.architecture(hf_config)
    check_positions(family, hf_config, cfg.lengths if lengths is None else lengths)
    if lengths is None:
        check_cache(cfg.rollout, Path(cfg.model.path), cfg.model.dtype, cfg.lengths)
    check_layout(architecture, cfg.parallel)
    check_shared_prompts(architecture, cfg.training)
    check_shapes(architecture, cfg.model, cfg.parallel, cfg.megatron.bf16_layers)
    check_passed_fields(cfg.megatron)
    check_heads(cfg.rollout, architecture.num_heads)
    check_experts(cfg.rollout, cfg.model.path)
    check_linear_attention(cfg.rollout, cfg.model.path, cfg.platform)
    replayed_routing(cfg.rollout, cfg.model.path, cfg.platform)
    check_truncation(cfg.rollout, architecture.vocab_size)
    check_tokenizer(cfg.model.path, architecture.vocab_size)
    HfReader(cfg.model.path)
    if (reference := cfg.objective.reference_path) is not None:
        hf_config = read_config(reference)
        if find_family(hf_config).architecture(hf_config) != architecture:
            raise ConfigError(f"objective.ref_kl.path={reference} has another architecture than model.path={cfg.model.path}")
        HfReader(reference)
    for source in (*cfg.data.sets, *cfg.data.held_out) if lengths is None and cfg.rollout.replay is None else ():
        check_rows(source, cfg.data)


def needed_open_files(ranks: int, rollout: RolloutConfig, reward: RewardConfig) -> int:
    """Return how many files, pipes and connections one process of the run must be able to open, with one request per server.

    With a limit that is too low for `rollout.server.concurrency` requests per server, the run sends fewer (`ServerPool`), and
    where it is too low for all agents of a step, fewer run at once (`CustomRollouts`).
    """
    requests = rollout.servers * (1 + CONTROL_CONNECTIONS)
    return _BASE + requests + _PER_RANK * ranks + _PER_WORKER * reward.workers * len(reward.terms)


def check_open_files(needed: int) -> None:
    """Raise this process's limit of open files as far as is useful; child processes inherit it. Raises ConfigError if the hard
    limit is lower than `needed`.
    """
    if (limit := raise_open_file_limit(max(needed, WANTED))) < needed:
        raise ConfigError(
            f"a process may open {limit} files here, and this run needs {needed}; raise the limit (`ulimit -n {needed}`), or "
            "lower rollout.servers or reward.workers"
        )
