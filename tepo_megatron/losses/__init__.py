"""The table `OBJECTIVES` defines every supported method as one row: TEPO, its ablations, and the baselines.

This package imports neither Megatron nor torch.distributed. "Eq.", "Section", "Table" and "Algorithm" without an arXiv id are
those of the TEPO paper; "Panel" is a panel of its Table 3. Comments say which values the paper leaves open.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.base.user_file import load
from tepo_megatron.config import ObjectiveConfig
from tepo_megatron.config.io import faults
from tepo_megatron.config.objective import PARTS, ClipCov, KlCov, ReferenceKl, Steer, read_part, variants
from tepo_megatron.losses.contradictions import check_overrides
from tepo_megatron.losses.objective import Objective

__all__ = ["OBJECTIVES", "Objective", "build_objective", "objective_of"]

# TEPO: the geometric-mean ratio of the sequence (Section 3.3.1), averaged over all tokens (Eq. 4), a KL to the old policy on
# tokens with positive advantage and falling entropy. The paper gives no clip range: 0.2 is our choice. beta: as for Qwen2.5-7B.
_TEPO = Objective(ratio="sequence", clip_low=0.2, clip_high=0.2, aggregate="token_mean", kl_mask="falling_entropy", beta=0.001)
# TEPO without its KL, with which Table 3 compares the variants.
_NO_KL = _TEPO.replace(kl_mask="none", beta=0.0)
# The paper's GRPO/DAPO baseline: token ratio, clip-higher, token mean (Section 4.1).
_GRPO = Objective(ratio="token", clip_low=0.2, clip_high=0.28, aggregate="token_mean")
# DPPO: Eq. 12 sums over tokens; advantages are not divided by the standard deviation; Appendix C.1 gives the limits.
_DPPO = Objective(
    ratio="token", surrogate="trust_region_tv", max_divergence=0.15, aggregate="sequence_mean_token_sum_norm", advantage="mean"
)

OBJECTIVES: dict[str, Objective] = {
    "tepo": _TEPO,
    "tepo_no_kl": _NO_KL,
    "tepo_eq4": _TEPO.replace(surrogate="clip_eq4"),  # Eq. 4 as printed
    "tepo_alg1": _NO_KL.replace(surrogate="unclipped"),  # Algorithm 1: unclipped, no KL
    # Panel A puts the KL on every token. Panel E puts it on tokens with A < 0 and rising entropy, or on these and TEPO's.
    "kl_undifferentiated": _TEPO.replace(kl_mask="all"),
    "tepo_kl_rising": _TEPO.replace(kl_mask="rising_entropy"),
    "tepo_kl_both": _TEPO.replace(kl_mask="both"),
    # Panel B: an entropy bonus and an entropy penalty. The paper gives no coefficient: 0.001 is our choice.
    "max_entropy": _NO_KL.replace(entropy_coefficient=0.001),
    "min_entropy": _NO_KL.replace(entropy_coefficient=-0.001),
    # Panel D: the sequence ratio under the two other aggregations.
    "sequence_mean_token_mean": _NO_KL.replace(aggregate="sequence_mean_token_mean"),
    "sequence_mean_token_sum": _NO_KL.replace(aggregate="sequence_mean_token_sum"),
    # Baselines of Table 1 and Panel C
    "grpo": _GRPO,
    # DAPO as published (arXiv 2503.14476): also dynamic sampling and the penalty on nearly overlong responses
    "dapo": _GRPO.replace(dynamic_sampling=True, overlong_shaping=True),
    "dr_grpo": _GRPO.replace(clip_high=0.2, aggregate="sequence_mean_token_sum_norm", advantage="mean"),  # arXiv 2503.20783
    # arXiv 2507.18071
    "gspo": Objective(ratio="sequence", clip_low=3e-4, clip_high=4e-4, aggregate="sequence_mean_token_mean"),
    # arXiv 2506.13585: no lower bound. It names no upper bound: weights up to 5, as in TRL after arXiv 2510.13786.
    "cispo": _GRPO.replace(surrogate="stop_gradient", clip_low=1.0, clip_high=4.0),
    # arXiv 2507.20673: token ratios are clipped to (e^-0.4, e^0.4) before their geometric mean
    "gmpo": Objective(
        ratio="sequence",
        surrogate="clip_tokens",
        clip_low=1 - math.exp(-0.4),
        clip_high=math.exp(0.4) - 1,
        aggregate="sequence_mean_token_mean",
    ),
    "sapo": Objective(ratio="token", surrogate="soft_gate", aggregate="sequence_mean_token_mean"),  # arXiv 2511.20347
    # arXiv 2602.04879, around the policy that sampled if training.old_logprobs is "rollout", as there
    "dppo": _DPPO,
    "dppo_kl": _DPPO.replace(surrogate="trust_region_kl", max_divergence=0.05),
    # arXiv 2601.05242: GRPO's loss; each term of the reward is normalised in its group before they are added
    "gdpo": _GRPO.replace(clip_high=0.2, aggregate="sequence_mean_token_mean", advantage="gdpo"),
    "gpg": Objective(ratio="none", surrogate="reinforce", advantage="gpg"),  # arXiv 2504.02546
    "reinforce": Objective(ratio="none", surrogate="reinforce"),
    "rloo": Objective(ratio="none", surrogate="reinforce", advantage="leave_one_out"),  # arXiv 2402.14740
    # On-policy distillation: the reference policy is the teacher. In the mean over the student's own samples the gradient of
    # k2, log(p/q) d log p, is that of KL(student || teacher) in each state (arXiv 2306.13649, 2306.08543).
    "distill": Objective(ratio="none", surrogate="reinforce", advantage="none", ref_kl=ReferenceKl(beta=1.0, estimator="k2")),
    "prefix_is": _GRPO.replace(ratio="prefix"),  # Panel C, "Sentence Prefix IS"
    # arXiv 2505.22617 with the r and k of Section 4.1. Its public scripts widen Clip-Cov's ratio range to [0, 2].
    "clip_cov": _GRPO.replace(weighting=ClipCov(share=2e-4), clip_low=1.0, clip_high=1.0),
    "kl_cov": _GRPO.replace(surrogate="unclipped", weighting=KlCov(share=2e-3, beta=1.0)),
    "steer": _GRPO.replace(weighting=Steer()),  # arXiv 2510.10150; the paper calls it STEEL
    # Section 4.1: alpha 4e-4, kappa 2. Public implementations of arXiv 2506.14758 use alpha 0.4.
    "entropy_advantage": _GRPO.replace(advantage_alpha=4e-4, advantage_kappa=2.0),
}


def objective_of(parts: Mapping[str, Any]) -> Objective:
    """Return an objective from the result of `dataclasses.asdict`. Raises ConfigError, TypeError or ValueError for others."""
    return Objective(**{k: read_part(k, v) if isinstance(v, Mapping) else v for k, v in dict(parts).items()})


def build_objective(cfg: ObjectiveConfig) -> Objective:
    """Return the objective that `cfg.name` names, with the parts that `cfg` sets replaced.

    Of a part with fields, such as `correction`, a field that `cfg` leaves out is as in the row, unless `cfg` sets another type.
    Raises ConfigError if the name of the row or of a part is unknown, parts contradict each other, or a replacement would have
    no effect. The message names the key.
    """
    row, parts = _row(cfg), cfg.replacements
    for part in parts.keys() & {part for part, hint in PARTS.items() if variants(hint)}:
        parts[part] = _merged(cfg.name, part, getattr(row, part), parts[part])
    objective = row.replace(**parts)
    check_overrides(objective, cfg.name, parts)
    return objective


def _row(cfg: ObjectiveConfig) -> Objective:
    if cfg.path is not None:
        return _of_user(cfg.path)
    if cfg.name not in OBJECTIVES:
        raise ConfigError(
            f"objective.name={cfg.name!r} is unknown; use path/to/file.py:NAME, or one of {', '.join(OBJECTIVES)}"
        )
    return OBJECTIVES[cfg.name]


@functools.cache
def _of_user(path: str) -> Objective:
    """Return the `Objective` that a user's file defines. It may add its own functions to the tables of parts."""
    row = load(path, "objective.name", "an Objective").value
    if not isinstance(row, Objective):
        raise ConfigError(f"objective.name={path}: it is no Objective but {type(row).__name__}; see docs/add_objective.md")
    return row


def _merged(name: str, part: str, of_row: Any, fields: dict[str, Any]) -> Any:
    """Return a part with some fields replaced. `of_row`: the part in the row; None: the row lacks it."""
    held = {} if of_row is None else dataclasses.asdict(of_row)
    if fields.get("type", held.get("type")) != held.get("type"):
        held = {}
    try:
        return read_part(part, {**held, **fields})
    except ValueError as e:
        raise ConfigError("\n".join(f"objective {name}: {line}" for line in faults(e, f"objective.{part}"))) from None
