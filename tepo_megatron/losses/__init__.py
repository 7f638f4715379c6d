"""Every method as one row of `OBJECTIVES`. Nothing here knows Megatron or torch.distributed."""

from __future__ import annotations

import dataclasses

from tepo_megatron.config import ObjectiveConfig
from tepo_megatron.errors import ConfigError
from tepo_megatron.losses.contradictions import check_overrides
from tepo_megatron.losses.objective import Objective

__all__ = ["OBJECTIVES", "Objective", "build_objective"]

# TEPO: the sequence's geometric-mean ratio (Section 3.3.1), every token counted alike (Eq. 4), KL to the old policy on tokens
# with positive advantage and falling entropy. The paper gives no clip range: 0.2 is our choice. beta: Qwen2.5-7B's.
_TEPO = Objective(ratio="sequence", clip_low=0.2, clip_high=0.2, aggregate="token_mean", kl_mask="falling_entropy", beta=0.001)
# What Table 3 compares with: TEPO without its KL.
_NO_KL = _TEPO.replace(kl_mask="none", beta=0.0)
# The paper's GRPO/DAPO: token ratio, clip-higher, token mean (Section 4.1).
_GRPO = Objective(ratio="token", clip_low=0.2, clip_high=0.28, aggregate="token_mean")

OBJECTIVES: dict[str, Objective] = {
    "tepo": _TEPO,
    "tepo_no_kl": _NO_KL,
    "tepo_eq4": _TEPO.replace(surrogate="clip_eq4"),  # Eq. 4 to the letter
    "tepo_alg1": _NO_KL.replace(surrogate="unclipped"),  # Algorithm 1: unclipped, no KL
    # Panel A: KL on every token. Panel E: on the tokens of the other misalignment, and of both.
    "kl_undifferentiated": _TEPO.replace(kl_mask="all"),
    "tepo_kl_rising": _TEPO.replace(kl_mask="rising_entropy"),
    "tepo_kl_both": _TEPO.replace(kl_mask="both"),
    # Panel B. The paper gives no coefficient: 0.001 is our choice.
    "max_entropy": _NO_KL.replace(entropy_coefficient=0.001),
    "min_entropy": _NO_KL.replace(entropy_coefficient=-0.001),
    # Panel D: the sequence likelihood under the two other aggregations.
    "sequence_mean_token_mean": _NO_KL.replace(aggregate="sequence_mean_token_mean"),
    "sequence_mean_token_sum": _NO_KL.replace(aggregate="sequence_mean_token_sum"),
    # Baselines of Table 1 and Panel C.
    "grpo": _GRPO,
    # the rest of arXiv 2503.14476: full batches, and a price on nearly overlong responses
    "dapo": _GRPO.replace(dynamic_sampling=True, overlong_shaping=True),
    "dr_grpo": _GRPO.replace(clip_high=0.2, aggregate="sequence_mean_token_sum", advantage="mean"),  # arXiv 2503.20783
    # arXiv 2507.18071
    "gspo": Objective(ratio="sequence", clip_low=3e-4, clip_high=4e-4, aggregate="sequence_mean_token_mean"),
    # arXiv 2506.13585: no lower bound; it names no upper one, 0.28 is our choice
    "cispo": _GRPO.replace(surrogate="stop_gradient", clip_low=1.0, clip_high=0.28),
    "gpg": Objective(ratio="none", surrogate="reinforce", advantage="gpg"),  # arXiv 2504.02546
    "reinforce": Objective(ratio="none", surrogate="reinforce"),
    "rloo": Objective(ratio="none", surrogate="reinforce", advantage="leave_one_out"),  # arXiv 2402.14740
    "prefix_is": _GRPO.replace(ratio="prefix"),  # Panel C, "Sentence Prefix IS"
    # arXiv 2505.22617 with the r and k of Section 4.1; its public scripts open Clip-Cov's range to [0, 2]
    "clip_cov": _GRPO.replace(weighting="clip_cov", cov_share=2e-4, clip_low=1.0, clip_high=1.0),
    "kl_cov": _GRPO.replace(surrogate="unclipped", weighting="kl_cov", cov_share=2e-3, cov_beta=1.0),
    "steer": _GRPO.replace(weighting="steer"),  # arXiv 2510.10150; the paper calls it STEEL
    # Section 4.1: alpha 4e-4, kappa 2 (public implementations of arXiv 2506.14758 use alpha 0.4)
    "entropy_advantage": _GRPO.replace(advantage_alpha=4e-4, advantage_kappa=2.0),
}


def build_objective(cfg: ObjectiveConfig) -> Objective:
    """The named row with the config's replacements.

    Raises ConfigError naming the key, for what is unknown, what contradicts itself and what would change nothing.
    """
    if cfg.name not in OBJECTIVES:
        raise ConfigError(f"objective.name={cfg.name!r} is unknown; use one of {', '.join(OBJECTIVES)}")
    parts = {k: v for k, v in dataclasses.asdict(cfg).items() if v is not None}
    del parts["name"]
    objective = OBJECTIVES[cfg.name].replace(**parts)
    check_overrides(objective, cfg.name, parts)
    return objective
