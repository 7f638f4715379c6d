"""The parts of an objective, and the section of the config that replaces parts of a row of `losses.OBJECTIVES`.

Each part is defined once, here. `losses.Objective` adds the computation. `ObjectiveConfig` is derived from `ObjectiveParts`.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter

from tepo_megatron.config.fields import NonNegativeFloat, PositiveFloat, Weight, config

Share = Annotated[float, Field(gt=0, le=1)]


@config
class NoWeighting:
    """Every token has weight 1."""

    type: Literal["none"] = "none"


@config
class ClipCov:
    """Clip-Cov (arXiv 2505.22617): drop randomly drawn tokens with a high covariance of advantage and log-prob."""

    type: Literal["clip_cov"] = "clip_cov"
    share: Share = 2e-4  # Share of the minibatch's tokens to drop; at least one token is dropped.
    low: NonNegativeFloat = 1.0  # Only tokens with a covariance above this can be dropped.
    high: PositiveFloat = 5.0  # Only tokens with a covariance below this can be dropped.

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"low={self.low} must be below high={self.high}")


@config
class KlCov:
    """KL-Cov (arXiv 2505.22617): penalize |l - l_old| on the tokens with the highest covariance of advantage and log-prob."""

    type: Literal["kl_cov"] = "kl_cov"
    share: Share = 2e-4  # Share of the minibatch's tokens to penalize; at least one token is penalized.
    beta: PositiveFloat = 1.0  # Coefficient of the penalty |l - l_old|.


@config
class Steer:
    """STEER (arXiv 2510.10150): give less weight to tokens whose update would change the entropy more."""

    type: Literal["steer"] = "steer"
    lambda_min: Annotated[float, Field(gt=0, lt=1)] = 0.8  # Smallest weight of a token.


@config
class NoCorrection:
    """The mismatch between the inference engine and the actor is measured, not corrected."""

    type: Literal["none"] = "none"


@config
class Tis:
    """Truncated importance sampling: weigh each token by min(pi_old / pi_rollout, high)."""

    type: Literal["tis"] = "tis"
    high: PositiveFloat = 2.0  # Largest weight of a token. 2 is common.

    def __post_init__(self) -> None:
        if self.high < 1:
            raise ValueError(f"high={self.high} must be at least 1: below, it weighs down what matches")


@config
class SequenceMis:
    """Masked importance sampling: weigh each sequence by pi_old(y) / pi_rollout(y); drop it where the ratio is large."""

    type: Literal["sequence_mis"] = "sequence_mis"
    high: PositiveFloat = 2.0  # Largest ratio of a whole sequence (the product over its tokens) that is kept.

    def __post_init__(self) -> None:
        if self.high < 1:
            raise ValueError(f"high={self.high} must be at least 1: below, it would drop what matches")


@config
class GeometricMask:
    """Drop sequences whose geometric-mean ratio pi_old / pi_rollout is outside of [low, high]; the others have weight 1."""

    type: Literal["geometric_mask"] = "geometric_mask"
    low: NonNegativeFloat = 0.99  # Smallest ratio of a sequence that is kept. The default admits 0.01 nats per token.
    high: PositiveFloat = 1.01  # Largest ratio of a sequence that is kept.

    def __post_init__(self) -> None:
        _check_bounds("geometric_mask", self.low, self.high)


@config
class IcePop:
    """IcePop (arXiv 2510.18855): weigh each token by pi_old / pi_rollout; drop tokens where it is outside of [low, high]."""

    type: Literal["icepop"] = "icepop"
    low: NonNegativeFloat = 0.5  # Smallest ratio of a token that is kept.
    high: PositiveFloat = 5.0  # Largest ratio of a token that is kept.

    def __post_init__(self) -> None:
        _check_bounds("icepop", self.low, self.high)


@config
class ReferenceKl:
    """A penalty on the KL from the policy to a fixed reference policy."""

    beta: PositiveFloat  # Coefficient of the KL.
    # Estimator of the KL per token, from the sampled token; full: the exact KL over the whole vocabulary, which the reference
    # policy's hidden states give. It needs training.logits_budget_mib and sampling without truncation.
    estimator: str = "k3"
    where: Literal["loss", "reward"] = "loss"  # `reward`: subtract each response's KL from its reward, before advantages.
    path: str | None = None  # Hugging Face directory of the reference policy, same architecture. null: as `model.path`.


Weighting = NoWeighting | ClipCov | KlCov | Steer
Correction = NoCorrection | Tis | SequenceMis | GeometricMask | IcePop


def _check_bounds(name: str, low: float, high: float) -> None:
    """Raise ValueError if the bounds exclude a ratio of 1, which means no mismatch."""
    if not low <= 1 <= high:
        raise ValueError(
            f"correction {name} keeps ratios in [{low}, {high}], without 1: it would drop what matches; set low <= 1 <= high"
        )


@dataclass(frozen=True, kw_only=True)
class ObjectiveParts:
    """The parts of an objective that a config can replace. Strings name entries of the tables in `losses/`."""

    ratio: str  # Importance ratio pi_theta / pi_old.
    surrogate: str = "clip"  # Policy term, a function of ratio and advantage.
    clip_low: NonNegativeFloat = 0.2  # The ratio is clipped from below at 1 - clip_low.
    clip_high: NonNegativeFloat = 0.2  # The ratio is clipped from above at 1 + clip_high.
    dual_clip: PositiveFloat | None = None  # Dual-clip constant c > 1: floors the surrogate at c * A for A < 0. null: no floor.
    tau_positive: PositiveFloat = 1.0  # Temperature of soft_gate where A > 0: the larger, the narrower the gate.
    tau_negative: PositiveFloat = 1.05  # Temperature of soft_gate where A <= 0.
    max_divergence: PositiveFloat = 0.15  # Trust region of a token: difference of probabilities, or nats of trust_region_kl.
    aggregate: str = "token_mean"  # Weight of each token in the loss.
    advantage: str = "std"  # Advantage of a response relative to its group.
    mask_truncated: bool = False  # Overlong filtering: truncated responses count in their groups and are not trained on.
    kl: str = "k3_importance_weighted"  # Estimator of the KL to the old policy. The default alone is unbiased.
    kl_mask: str = "none"  # Tokens on which the KL to the old policy is penalized.
    kl_entropy_tolerance: NonNegativeFloat = 0.0  # Nats: kl_mask counts an entropy change up to this as no change.
    beta: NonNegativeFloat = 0.0  # Coefficient of the KL to the old policy.
    ref_kl: ReferenceKl | None = None  # Penalty on the KL to a reference policy. null: none.
    entropy_coefficient: Weight = 0.0  # Coefficient of the mean entropy: above 0 the loss raises it, below 0 it lowers it.
    advantage_alpha: NonNegativeFloat = 0.0  # Coefficient of the entropy that is added to the advantage.
    advantage_kappa: PositiveFloat = 2.0  # The entropy adds at most |A| / kappa to the advantage.
    weighting: Weighting = dataclasses.field(default_factory=NoWeighting)  # Token weights from the whole minibatch.
    correction: Correction = dataclasses.field(default_factory=NoCorrection)  # Correction of the rollout/train mismatch.


PARTS: Mapping[str, Any] = typing.get_type_hints(ObjectiveParts, include_extras=True)


def variants(hint: Any) -> dict[str, type]:
    """Return the dataclasses in the type of a part, by their `type` ("" where they have none); empty for a plain value."""
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    classes = [member for member in members if dataclasses.is_dataclass(member)]
    return {getattr(member, "type", ""): typing.cast(type, member) for member in classes}


def read_part(part: str, values: Mapping[str, Any]) -> Any:
    """Return a part of an objective from its fields. Raises ValueError if the type or a field is unknown, or a value is out of
    range.
    """
    kinds = variants(PARTS[part])
    kind = values.get("type", "") if "" not in kinds else ""
    if kind not in kinds:
        raise ValueError(f"type={kind!r} is unknown; use one of {', '.join(kinds)}")
    _check_names(values, {f.name for f in dataclasses.fields(kinds[kind])}, f"{part} {kind}".strip())
    return TypeAdapter(kinds[kind]).validate_python(dict(values))


def _check_names(values: Mapping[str, Any], known: set[str], owner: str) -> None:
    """Raise ValueError for a field that `owner` does not have."""
    for name in values:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            has = ", ".join(sorted(known - {"type"})) or "no field"
            hint = f"did you mean {close[0]}?" if close else f"it has {has}"
            raise ValueError(f"{name} has no effect: {owner} has no such field; {hint}")


def _replacement(part: str) -> Callable[[Any], dict[str, Any] | None]:
    """Return the validator of a part that has fields. It accepts the name of a type, or some fields, and returns the fields."""
    kinds = variants(PARTS[part])
    known = {f.name for variant in kinds.values() for f in dataclasses.fields(variant)}

    def validate(value: Any) -> dict[str, Any] | None:
        """Return the fields that the config sets; None for null."""
        if value is None:
            return None
        if isinstance(value, str) and "" not in kinds:
            value = {"type": value}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        if not isinstance(value, Mapping):
            raise ValueError(f"{part} is a section of {', '.join(sorted(known))}")
        if "" in kinds or "type" in value:
            read_part(part, value)
        else:  # fields of the row's own variant, which `losses.build_objective` knows
            _check_names(value, known, part)
        return dict(value)

    return validate


def _derived(cls: type) -> type:
    """Add every field of `ObjectiveParts` to a class, as a replacement: null means as the row has it."""
    for part, hint in PARTS.items():
        if variants(hint):
            cls.__annotations__[part] = Annotated[dict[str, Any] | None, BeforeValidator(_replacement(part))]
        else:
            cls.__annotations__[part] = hint | None
        setattr(cls, part, None)
    return cls


@config
@_derived
class ObjectiveConfig:
    """A row of `losses.OBJECTIVES`, and replacements for its parts.

    Every part of the row can be set here: `beta: 0.01`, `correction: {type: tis, high: 3}`, or for the type alone
    `correction: tis`. Fields that are left out are as in the row. [Objectives](objectives.md#parts-of-an-objective) lists all
    parts.
    """

    # Name of the method: a row of the table `OBJECTIVES` in `tepo_megatron/losses/`, or path/to/file.py:NAME of your own.
    name: str = "tepo"

    if TYPE_CHECKING:

        def __init__(self, *, name: str = "tepo", **parts: Any) -> None: ...

        def __getattr__(self, part: str) -> Any: ...

    @property
    def path(self) -> str | None:
        """Return path/to/file.py:NAME of the user's own objective; None for a row of the table."""
        return self.name if ":" in self.name else None

    @property
    def reference_path(self) -> str | None:
        """Return `objective.ref_kl.path`; None if it is not set."""
        return (self.ref_kl or {}).get("path")

    @property
    def replacements(self) -> dict[str, Any]:
        """Return the parts that are set here."""
        return {part: getattr(self, part) for part in PARTS if getattr(self, part) is not None}
