"""Building blocks of the config's sections."""

import typing
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

T = typing.TypeVar("T")


@typing.dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
def config(cls: type[T]) -> type[T]:
    """A section of the config: keyword-only, frozen, validated, unknown keys refused."""
    section = dataclass(config=ConfigDict(extra="forbid", coerce_numbers_to_str=True), kw_only=True, frozen=True)
    return typing.cast(type[T], section(cls))


Positive = Annotated[int, Field(ge=1, strict=True)]  # strict: `true` is no number
NonNegative = Annotated[int, Field(ge=0, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Weight = Annotated[float, Field(allow_inf_nan=False)]


def without_nulls(value: Any) -> Any:
    """Return a section without the keys that are null, which so take their defaults; anything else as it is."""
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value
