"""Checks of an objective: refuse parts that contradict each other and replacements without effect, and name the fix."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.config.objective import KlCov
from tepo_megatron.losses.surrogate import SURROGATES

if TYPE_CHECKING:
    from tepo_megatron.losses.objective import Objective

_OWN = frozenset(SURROGATES)  # a user's file adds others, which may use any number
TRUST_REGIONS = ("trust_region_tv", "trust_region_kl")


def check(o: "Objective") -> None:
    """Raise ConfigError if the parts of an objective contradict each other."""
    if o.beta and o.kl_mask == "none":
        raise ConfigError(f"objective.beta={o.beta} has no effect under objective.kl_mask=none; set beta to 0 or choose a mask")
    if not 0 <= o.clip_low <= 1:
        raise ConfigError(f"objective.clip_low={o.clip_low} must lie in [0, 1]: at 1 the ratio is never clipped below")
    if o.dual_clip is not None and (o.dual_clip <= 1 or o.surrogate != "clip"):
        raise ConfigError(
            f"objective.dual_clip={o.dual_clip} must be above 1 and goes with objective.surrogate=clip, not {o.surrogate}"
        )
    if o.ratio == "none" and o.surrogate != "reinforce":
        raise ConfigError(
            f"objective.ratio=none leaves objective.surrogate={o.surrogate} without gradient; use surrogate=reinforce"
        )
    if o.surrogate in TRUST_REGIONS and o.ratio != "token":
        raise ConfigError(
            f"objective.surrogate={o.surrogate} masks single tokens, and objective.ratio={o.ratio} belongs to several; use "
            f"ratio=token"
        )
    if o.advantage == "none" and (o.ref_kl is None or o.ref_kl.where != "loss") and not o.entropy_coefficient:
        raise ConfigError("objective.advantage=none leaves nothing to learn; set objective.ref_kl, with where=loss")
    if o.needs_teacher and o.ref_kl is not None and o.ref_kl.where != "loss":
        raise ConfigError(
            "objective.ref_kl.estimator=full has a gradient over the whole vocabulary, which a reward cannot carry; use "
            "objective.ref_kl.where=loss, or another estimator"
        )
    if o.advantage_kappa <= 0:
        raise ConfigError(f"objective.advantage_kappa={o.advantage_kappa} must be positive")
    if isinstance(o.weighting, KlCov) and o.surrogate != "unclipped":
        raise ConfigError(
            f"objective.weighting.type=kl_cov goes with objective.surrogate=unclipped (its penalty takes the place of "
            f"clipping), not {o.surrogate}"
        )


# field -> (whether the objective uses it, what would make it used, for the message)
_USED: "dict[str, tuple[Callable[[Objective], bool], str]]" = {
    "clip_low": (
        lambda o: o.surrogate in ("clip", "clip_tokens", "stop_gradient"),
        "surrogate=clip, clip_tokens or stop_gradient",
    ),
    "clip_high": (
        lambda o: o.surrogate in ("clip", "clip_eq4", "clip_tokens", "stop_gradient"),
        "surrogate=clip, clip_eq4, clip_tokens or stop_gradient",
    ),
    "tau_positive": (lambda o: o.surrogate == "soft_gate", "surrogate=soft_gate"),
    "tau_negative": (lambda o: o.surrogate == "soft_gate", "surrogate=soft_gate"),
    "max_divergence": (lambda o: o.surrogate in TRUST_REGIONS, "surrogate=trust_region_tv or trust_region_kl"),
    "ratio": (lambda o: o.surrogate != "reinforce" or o.ratio == "none", "another surrogate than reinforce"),
    "kl": (lambda o: o.beta > 0, "beta > 0"),
    "kl_mask": (lambda o: o.beta > 0 or o.kl_mask == "none", "beta > 0"),
    "kl_entropy_tolerance": (lambda o: o.kl_mask not in ("none", "all"), "kl_mask=falling_entropy, rising_entropy or both"),
    "advantage_kappa": (lambda o: o.advantage_alpha > 0, "advantage_alpha > 0"),
}


def check_overrides(objective: "Objective", name: str, keys: Iterable[str]) -> None:
    """Raise ConfigError if a replaced field has no effect on the objective."""
    for key in keys:
        used, needs = _USED.get(key, (lambda o: True, ""))
        if objective.surrogate in _OWN and not used(objective):
            raise ConfigError(
                f"objective.{key}={getattr(objective, key)} has no effect on objective {name}: it takes {needs}; remove it "
                f"(null)"
            )
