"""Every method as one row of `OBJECTIVES`. Nothing here knows Megatron or torch.distributed."""

from __future__ import annotations

import dataclasses

from tepo_megatron.config import ObjectiveConfig
from tepo_megatron.errors import ConfigError
from tepo_megatron.losses.objective import Objective

__all__ = ["OBJECTIVES", "Objective", "build_objective"]

# TEPO: the sequence's geometric-mean ratio (Section 3.3.1), every token counted alike (Eq. 4), KL to the old policy on tokens
# with positive advantage and falling entropy. The paper gives no clip range: 0.2 is our choice. beta: Qwen2.5-7B's.
_TEPO = Objective(
    ratio="sequence",
    clip_low=0.2,
    clip_high=0.2,
    aggregate="token_mean",
    kl_mask="falling_entropy",
    beta=0.001,
)

OBJECTIVES: dict[str, Objective] = {
    "tepo": _TEPO,
    "tepo_no_kl": _TEPO.replace(kl_mask="none", beta=0.0),
    "tepo_eq4": _TEPO.replace(surrogate="clip_eq4"),  # Eq. 4 to the letter
    "tepo_alg1": _TEPO.replace(surrogate="unclipped", kl_mask="none", beta=0.0),  # Algorithm 1: unclipped, no KL
    "grpo": Objective(ratio="token", clip_low=0.2, clip_high=0.28, aggregate="token_mean"),  # the paper's GRPO/DAPO
}


def build_objective(cfg: ObjectiveConfig) -> Objective:
    """The named row with the config's replacements. Raises ConfigError naming the key."""
    if cfg.name not in OBJECTIVES:
        raise ConfigError(f"objective.name={cfg.name!r} is unknown; use one of {', '.join(OBJECTIVES)}")
    parts = dataclasses.asdict(cfg)
    del parts["name"]
    return OBJECTIVES[cfg.name].replace(**parts)
