"""The Qwen3.5 family: its config fields, the files with a vision tower, and the fused rows at odd sizes."""

from typing import Any

import pytest

from tepo_megatron.base.errors import ConversionError
from tepo_megatron.models.families import find_family
from tests.unit.models.test_families import QWEN3_5, read

KINDS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
OUTER = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "vision_config": {"depth": 27},
    "image_token_id": 248056, "video_token_id": 248057, "vision_start_token_id": 248053, "vision_end_token_id": 248054,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.57.0",
}  # fmt: skip
MULTIMODAL = OUTER | {"text_config": {k: v for k, v in QWEN3_5.items() if k != "architectures"}}


def text(**changes: Any) -> dict[str, Any]:
    return {k: v for k, v in (QWEN3_5 | changes).items() if v is not ...}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid' is not supported for qwen3_5"),
        ({"attn_output_gate": False}, "attn_output_gate=False"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype='bfloat16' .* only \"float32\" is"),
        ({"mlp_only_layers": [3]}, "mlp_only_layers=3 is not supported"),
        ({"layer_types": KINDS}, "layer_types has 4 entries, and num_hidden_layers=32"),
        ({"layer_types": ["sliding_attention"] * 32}, "layer_types has 'sliding_attention'; only linear_attention and"),
        ({"linear_num_value_heads": 40}, "linear_num_value_heads=40 is no multiple of linear_num_key_heads=16"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim=0 is not a positive integer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 and rope_parameters.partial_rotary_factor=0.25 differ"),
        ({"head_dim": 10}, "partial_rotary_factor=0.25 of head_dim=10 rotates 2.5 channels"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e7}},
            "rope_parameters.rope_type=yarn scales the rotated channels by 1.13863",
        ),
        ({"linear_scale": 2}, "field linear_scale is not known for the qwen3_5 family"),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConversionError, match=f"config.json: .*{message}"):
        read(text(**change))


def test_the_text_model_of_a_multimodal_file_is_the_same() -> None:
    assert read(MULTIMODAL) == read(QWEN3_5)
    family = find_family(MULTIMODAL)
    names = family.tensor_names(read(MULTIMODAL))
    alone = {n.replace("model.", "model.language_model.", 1) for n in find_family(QWEN3_5).tensor_names(read(QWEN3_5))}
    assert names == {"lm_head.weight" if "lm_head" in n else n for n in alone}
    assert family.embedding == "model.language_model.embed_tokens.weight"
    for name in ("model.visual.blocks.0.attn.qkv.weight", "mtp.fc.weight"):
        assert family.ignores(name) and family.carries(name)
    assert not find_family(QWEN3_5).ignores("model.visual.blocks.0.attn.qkv.weight")
