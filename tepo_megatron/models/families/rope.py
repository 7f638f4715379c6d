"""Read RoPE and its scalings from a HF config."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tepo_megatron.base.errors import ConversionError
from tepo_megatron.models.ops import RotaryTable

# rope_type -> fields that it needs, fields that it may have
_FIELDS: Mapping[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}, set()),
    "yarn": (
        {"factor"},
        {
            "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
            "truncate",
        },
    ),
}  # fmt: skip
_OF_ALL = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
# A token of a text has the same position in all sections of a multimodal RoPE, so these change nothing.
_SECTIONS = {"mrope_section", "mrope_interleaved"}


@dataclass(frozen=True)
class Rope:
    """RoPE as a HF config describes it."""

    theta: float
    table: RotaryTable | None  # the rotary frequencies if a scaling changes them; None: the plain ones
    percent: float  # part of the channels of a head that are rotated


def read_rope(
    hf: Mapping[str, Any],
    family: str,
    default_theta: float | None,
    head_dim: int,
    max_positions: int,
    default_percent: float | None = None,
) -> Rope:
    """Read RoPE from a HF config.

    transformers 5 keeps all parameters in `rope_parameters`; earlier files have `rope_theta` at the top level and the rest in
    `rope_scaling`.

    Args:
        default_theta: theta of a config that states none; None: the config must state it.
        default_percent: part of the channels that are rotated if the config does not say; None: always all of them.
    Raises:
        ConversionError: a type or a field is missing or unknown, or two of them contradict each other.
    """
    where, rope = _parameters(hf)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _FIELDS:
        raise ConversionError(
            f"config.json: {where}.rope_type={kind!r} is not supported for {family}; only {', '.join(_FIELDS)} are"
        )
    needed, optional = _FIELDS[kind]
    present = {k for k, v in rope.items() if v is not None}
    if missing := sorted(needed - present):
        raise ConversionError(f"config.json: {where}.{missing[0]} is missing; rope_type={kind} needs it")
    known = needed | optional | _OF_ALL | (set() if default_percent is None else _SECTIONS)
    if unknown := sorted(present - known):
        raise ConversionError(f"config.json: field {where}.{unknown[0]} is not known for rope_type={kind}")
    percent = _percent(hf, rope, where, default_percent, head_dim)
    theta = _theta(hf, rope, where, default_theta)
    if kind == "default":
        return Rope(theta, None, percent)
    given_table = {k: v for k, v in rope.items() if k not in _SECTIONS}
    given_table |= {"rope_type": kind, "rope_theta": theta, "partial_rotary_factor": percent}
    table = _table(given_table, head_dim, max_positions)
    if percent < 1 and table.attention_factor != 1:
        raise ConversionError(
            f"config.json: {where}.rope_type={kind} scales the rotated channels by {table.attention_factor:g}, which is not "
            f"supported where RoPE rotates a part of a head (partial_rotary_factor={percent:g}); use default or linear"
        )
    return Rope(theta, table, percent)


def _percent(hf: Mapping[str, Any], rope: Mapping[str, Any], where: str, default: float | None, head_dim: int) -> float:
    """Return the part of a head's channels that RoPE rotates. Raises ConversionError when it is not supported."""
    if default is None:
        if rope.get("partial_rotary_factor") not in (None, 1):
            raise ConversionError(
                f"config.json: {where}.partial_rotary_factor={rope['partial_rotary_factor']}: only 1 is supported"
            )
        return 1.0
    values = {x for x in (rope.get("partial_rotary_factor"), hf.get("partial_rotary_factor")) if x is not None}
    if len(values) > 1:
        raise ConversionError(
            f"config.json: partial_rotary_factor={hf['partial_rotary_factor']} and {where}.partial_rotary_factor="
            f"{rope['partial_rotary_factor']} differ; remove one of them"
        )
    percent = float(values.pop()) if values else default
    if not 0 < percent <= 1 or head_dim * percent % 2:
        raise ConversionError(
            f"config.json: partial_rotary_factor={percent:g} of head_dim={head_dim} rotates {head_dim * percent:g} channels; "
            "the number has to be even, at least 2 and at most head_dim"
        )
    return percent


def _parameters(hf: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the name of the config field that holds RoPE's parameters, and the parameters."""
    new, old = hf.get("rope_parameters"), hf.get("rope_scaling")
    if new and old and new != old:
        raise ConversionError("config.json: rope_parameters and rope_scaling differ; remove one of them")
    where = "rope_scaling" if old and not new else "rope_parameters"
    return where, new or old or {}


def _theta(hf: Mapping[str, Any], rope: Mapping[str, Any], where: str, default: float | None) -> float:
    """Return theta. Raises ConversionError when it is not stated or stated twice with different values."""
    values = {x for x in (rope.get("rope_theta"), hf.get("rope_theta")) if x is not None}
    if not values and default is not None:
        return default
    if not values:
        raise ConversionError(f"config.json: neither rope_theta nor {where}.rope_theta is given")
    if len(values) > 1:
        raise ConversionError(
            f"config.json: rope_theta={hf['rope_theta']} and {where}.rope_theta={rope['rope_theta']} differ; remove one of them"
        )
    return float(values.pop())


def _table(rope: dict[str, Any], head_dim: int, max_positions: int) -> RotaryTable:
    """Compute the frequencies with transformers' own functions, so that both are equal to the bit."""
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # Any config class would do, because the functions read only these fields.
    config = Qwen3Config(head_dim=head_dim, max_position_embeddings=max_positions, rope_parameters=rope)
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    return RotaryTable(tuple(inv_freq.tolist()), float(attention_factor))
