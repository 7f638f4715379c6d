"""Checks of an objective: refuse parts that contradict each other and replacements without effect, and name the fix."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from tepo_megatron.errors import ConfigError
from tepo_megatron.losses.correction import CORRECTIONS

if TYPE_CHECKING:
    from tepo_megatron.losses.objective import Objective


def check(o: Objective) -> None:
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
    if o.advantage_kappa <= 0:
        raise ConfigError(f"objective.advantage_kappa={o.advantage_kappa} must be positive")
    if o.ref_kl_in not in ("loss", "reward"):
        raise ConfigError(f"objective.ref_kl_in={o.ref_kl_in!r} is unknown; use one of loss, reward")
    _check_weighting(o)
    _check_correction(o)


def _check_weighting(o: Objective) -> None:
    """Raise ConfigError if the weighting does not fit the surrogate, or one of its fields is out of range."""
    if o.weighting == "kl_cov" and o.surrogate != "unclipped":
        raise ConfigError(
            f"objective.weighting=kl_cov goes with objective.surrogate=unclipped (its penalty takes the place of clipping), "
            f"not {o.surrogate}"
        )
    if not 0 < o.cov_share <= 1:
        raise ConfigError(f"objective.cov_share={o.cov_share} is a share of the tokens; it must lie in (0, 1]")
    if not o.cov_low < o.cov_high:
        raise ConfigError(f"objective.cov_low={o.cov_low} must be below objective.cov_high={o.cov_high}")
    if not 0 < o.steer_lambda_min < 1:
        raise ConfigError(f"objective.steer_lambda_min={o.steer_lambda_min} must lie in (0, 1)")


def _check_correction(o: Objective) -> None:
    """Raise ConfigError if the bounds of the correction exclude or reduce a ratio of 1, which means no mismatch."""
    correction = CORRECTIONS[o.correction]
    if correction is None:
        return
    low, high = o.correction_bounds
    if correction.low is not None and not low <= 1 <= high:
        raise ConfigError(
            f"objective.correction={o.correction} keeps ratios in [{low}, {high}], which excludes 1: it would drop tokens "
            f"without mismatch; set correction_low <= 1 <= correction_high"
        )
    if high < 1:
        raise ConfigError(f"objective.correction_high={high} must be at least 1: below, it scales down tokens without mismatch")


# field -> (whether the objective uses it, what would make it used, for the message)
_USED: dict[str, tuple[Callable[[Objective], bool], str]] = {
    "clip_low": (lambda o: o.surrogate in ("clip", "stop_gradient"), "surrogate=clip or stop_gradient"),
    "clip_high": (lambda o: o.surrogate in ("clip", "clip_eq4", "stop_gradient"), "surrogate=clip, clip_eq4 or stop_gradient"),
    "ratio": (lambda o: o.surrogate != "reinforce" or o.ratio == "none", "another surrogate than reinforce"),
    "kl": (lambda o: o.beta > 0, "beta > 0"),
    "kl_mask": (lambda o: o.beta > 0 or o.kl_mask == "none", "beta > 0"),
    "kl_entropy_tolerance": (lambda o: o.kl_mask not in ("none", "all"), "kl_mask=falling_entropy, rising_entropy or both"),
    "ref_kl": (lambda o: o.ref_beta > 0, "ref_beta > 0"),
    "ref_kl_in": (lambda o: o.ref_beta > 0, "ref_beta > 0"),
    "advantage_kappa": (lambda o: o.advantage_alpha > 0, "advantage_alpha > 0"),
    "cov_share": (lambda o: o.weighting in ("clip_cov", "kl_cov"), "weighting=clip_cov or kl_cov"),
    "cov_low": (lambda o: o.weighting == "clip_cov", "weighting=clip_cov"),
    "cov_high": (lambda o: o.weighting == "clip_cov", "weighting=clip_cov"),
    "cov_beta": (lambda o: o.weighting == "kl_cov", "weighting=kl_cov"),
    "steer_lambda_min": (lambda o: o.weighting == "steer", "weighting=steer"),
    "correction_low": (lambda o: o.correction in ("mis", "icepop"), "correction=mis or icepop"),
    "correction_high": (lambda o: o.correction != "none", "a correction"),
}


def check_overrides(objective: Objective, name: str, keys: Iterable[str]) -> None:
    """Raise ConfigError if a replaced field has no effect on the objective.

    Args:
        objective: The objective after the replacements.
        name: Its row in `OBJECTIVES`, for the message.
        keys: The names of the replaced fields.
    """
    for key in keys:
        used, needs = _USED.get(key, (lambda o: True, ""))
        if not used(objective):
            raise ConfigError(
                f"objective.{key}={getattr(objective, key)} has no effect on objective {name}: it takes {needs}; remove it "
                f"(null)"
            )
