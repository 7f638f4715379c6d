"""Building blocks of the config's sections, and the defaults that differ between `platform: cpu` and `platform: cuda`.

A key in the table `PLATFORM_DEFAULTS` is `null` or `auto` in the config until somebody sets it; `default_of` gives the value of
the platform then. Nothing else in the package may choose a value of a config key by the platform. The recipe gate
(`tests/gate/`) trains every shipped YAML on a CPU with the `cuda` column forced on.
"""

import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import pydantic.dataclasses
from pydantic import ConfigDict, Field

T = TypeVar("T")


@typing.dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
def config(cls: type[T]) -> type[T]:
    """A section of the config: keyword-only, frozen, validated, unknown keys refused."""
    section = pydantic.dataclasses.dataclass(
        config=ConfigDict(extra="forbid", coerce_numbers_to_str=True), kw_only=True, frozen=True
    )
    return typing.cast(type[T], section(cls))


Positive = Annotated[int, Field(ge=1, strict=True)]  # strict: `true` is no number
NonNegative = Annotated[int, Field(ge=0, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Weight = Annotated[float, Field(allow_inf_nan=False)]


def without_nulls(value: Any) -> Any:
    """Return a section without the keys that are null, which so take their defaults; anything else as it is."""
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


@dataclass(frozen=True)
class PlatformDefault:
    """The value that a key takes on each platform when the config leaves it at null, and the reason for the difference."""

    cpu: Any
    cuda: Any
    why: str


PLATFORM_DEFAULTS: Mapping[str, PlatformDefault] = {
    "megatron.ddp.overlap_grad_reduce": PlatformDefault(False, True, "gloo has no stream that runs next to the backward pass"),
    "megatron.ddp.overlap_param_gather": PlatformDefault(False, True, "gloo has no stream that runs next to the forward pass"),
    "training.share_prompts": PlatformDefault(
        "where it saves", "never", "Transformer Engine's packed attention cannot share keys; on GPUs it is not measured"
    ),
    "megatron.transformer.gradient_accumulation_fusion": PlatformDefault(
        False, True, "saves a GPU one write and two reads of every weight gradient; published CPU runs were made without"
    ),
}


def default_of(key: str, platform: str, value: T | None) -> T:
    """Return `value`, or the platform's default where `value` is None."""
    return getattr(PLATFORM_DEFAULTS[key], platform) if value is None else value


# Limit since the invitation to a group of sync.transport=group: the first start of NCCL over InfiniBand takes minutes, the
# ranks are past their start; then the groups are formed again, and after some attempts SyncError
JOIN_SECONDS = PlatformDefault(30.0, 300.0, "the first start of NCCL over InfiniBand can take minutes")


def join_seconds(platform: str) -> float:
    """Return the seconds in which ranks and servers must have formed the groups of `sync.transport=group`, in one attempt.

    The groups are formed at the first delivery and again whenever a server comes back, and connect in a broadcast of one byte.
    """
    return getattr(JOIN_SECONDS, platform)
