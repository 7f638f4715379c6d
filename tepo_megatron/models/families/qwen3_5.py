"""Define the dense Qwen3.5 family (text): the gated delta rule in most layers, gated attention with partial RoPE in the others.

All RMS norms multiply by 1 + w, except for the norm of the gated delta rule, which multiplies by w. `FAMILY` reads the files of
the text model alone. `MULTIMODAL` reads the text model of the files that also hold a vision tower.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tepo_megatron.base.errors import ConversionError
from tepo_megatron.models.families.family import OUTER, QK_NORM, Family, Layers, WeightMapping, positive, swiglu
from tepo_megatron.models.ops import FusedGatedQKV, FusedHeads, LinearAttention, Op, Replicated, Split

_LINEAR, _FULL = "linear_attention", "full_attention"
_SIZES = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "conv_width": "linear_conv_kernel_dim",
}
_PREFIX, _TEXT_PREFIX = "model.", "model.language_model."


def read_linear_attention(hf: Mapping[str, Any]) -> LinearAttention:
    """Read the gated delta rule from a HF config. Without `layer_types`, `full_attention_interval` says which layers have it.

    Raises ConversionError when the two contradict each other or a layer has an unknown kind, or when sizes do not fit.
    """
    number, every = positive(hf, "num_hidden_layers"), positive(hf, "full_attention_interval")
    regular = [_FULL if (layer + 1) % every == 0 else _LINEAR for layer in range(number)]
    kinds = hf.get("layer_types") or regular
    if len(kinds) != number:
        raise ConversionError(f"config.json: layer_types has {len(kinds)} entries, and num_hidden_layers={number}")
    if unknown := sorted(set(kinds) - {_LINEAR, _FULL}):
        raise ConversionError(f"config.json: layer_types has {unknown[0]!r}; only {_LINEAR} and {_FULL} are supported")
    sizes = {name: positive(hf, key) for name, key in _SIZES.items()}
    if sizes["value_heads"] % sizes["key_heads"]:
        raise ConversionError(
            f"config.json: linear_num_value_heads={sizes['value_heads']} is no multiple of "
            f"linear_num_key_heads={sizes['key_heads']}"
        )
    return LinearAttention(**sizes, layers=tuple(layer for layer, kind in enumerate(kinds) if kind == _LINEAR))


def _row(parameter: str, module: str, tensors: tuple[str, ...], op: Op, layers: Layers) -> WeightMapping:
    hf = tuple(f"model.layers.{{layer}}.{module}.{name}" for name in tensors)
    return WeightMapping("decoder.layers.{layer}.self_attention." + parameter, hf, op, layers)


_ATTENTION = (
    _row("linear_qkv.weight", "self_attn", ("q_proj.weight", "k_proj.weight", "v_proj.weight"), FusedGatedQKV(), "full"),
    _row("linear_proj.weight", "self_attn", ("o_proj.weight",), Split(dim=1), "full"),
    *(replace(row, layers="full") for row in QK_NORM),
)

_PROJECTED = tuple(f"in_proj_{kind}.weight" for kind in ("qkv", "z", "b", "a"))
# The state is multiplied by the decays of all tokens after it, so their relative errors add up. Both are 1 % of the rows.
_GATES = ("in_proj_b.weight", "in_proj_a.weight")
_DELTA_RULE = (
    _row("in_proj.weight", "linear_attn", _PROJECTED, FusedHeads(unquantized=_GATES), "linear"),
    _row("conv_weight", "linear_attn", ("conv1d.weight",), FusedHeads(convolution=True), "linear"),
    _row("A_log", "linear_attn", ("A_log",), Split(dim=0), "linear"),
    _row("dt_bias", "linear_attn", ("dt_bias",), Split(dim=0), "linear"),
    _row("norm_weight", "linear_attn", ("norm.weight",), Replicated(), "linear"),
    _row("out_proj.weight", "linear_attn", ("out_proj.weight",), Split(dim=1), "linear"),
)

FAMILY = Family(
    name="qwen3_5",
    rows=OUTER + _ATTENTION + _DELTA_RULE + swiglu(),
    qk_norm=True,
    attention_output_gate=True,
    zero_centered_norms=True,
    default_rotary_percent=0.25,
    required={
        "attention_bias": (False,), "attn_output_gate": (True,), "output_gate_type": ("swish", "silu"),
        "mlp_only_layers": ([],),
        "mamba_ssm_dtype": ("float32",),  # the state of the delta rule is always kept in fp32
    },
    # the multi-token prediction layers, which no log-prob depends on
    no_effect=frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}),
    mapped=frozenset({*_SIZES.values(), "layer_types", "full_attention_interval"}),
    defaults={
        "head_dim": 256, "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    },
    read_linear_attention=read_linear_attention,
    carried_tensors=r"^mtp\.",
)  # fmt: skip

MULTIMODAL = replace(
    FAMILY,
    rows=tuple(
        replace(row, hf=tuple(_TEXT_PREFIX + n.removeprefix(_PREFIX) if n.startswith(_PREFIX) else n for n in row.hf))
        for row in FAMILY.rows
    ),
    text_config="text_config",
    outer_fields=frozenset({
        "vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id",
        "language_model_only",
    }),
    carried_tensors=r"^(mtp|model\.visual|visual)\.",
)  # fmt: skip
