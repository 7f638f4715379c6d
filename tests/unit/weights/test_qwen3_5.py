"""The Qwen3.5 family: its config fields, the files with a vision tower, and the fused rows at odd sizes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tepo_megatron.errors import ConversionError
from tepo_megatron.weights.families import find_family
from tepo_megatron.weights.ops import Architecture, FusedGatedQKV, FusedHeads, LinearAttention
from tests.unit.weights.test_families import QWEN3_5, TINY, TINY_HYBRID, read

KINDS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
OUTER = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "vision_config": {"depth": 27},
    "image_token_id": 248056, "video_token_id": 248057, "vision_start_token_id": 248053, "vision_end_token_id": 248054,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.57.0",
}  # fmt: skip
MULTIMODAL = OUTER | {"text_config": {k: v for k, v in QWEN3_5.items() if k != "architectures"}}


def text(**changes: Any) -> dict[str, Any]:
    return {k: v for k, v in (QWEN3_5 | changes).items() if v is not ...}


def test_the_hybrid_is_read() -> None:
    arch = read(QWEN3_5)
    layers = tuple(i for i in range(32) if i % 4 != 3)
    assert arch.linear_attention == LinearAttention(16, 32, 128, 128, 4, layers) and arch.linear_layers == layers
    assert arch.attention_output_gate and arch.zero_centered_norms and arch.rotary_percent == 0.25
    assert arch.linear_attention.convolved == (2048, 2048, 4096)
    assert arch.linear_attention.projected == (2048, 2048, 4096, 4096, 32, 32)
    assert read(text(layer_types=...)) == arch  # every fourth layer has attention
    assert read(text(layer_types=["full_attention"] * 32)).linear_attention is None


@pytest.mark.parametrize("factor", [{"partial_rotary_factor": 0.5}, {}], ids=["at the top", "absent"])
def test_the_rotated_part_is_read_from_either_place(factor: dict[str, float]) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e7}
    assert read(text(rope_parameters=rope, **factor)).rotary_percent == factor.get("partial_rotary_factor", 0.25)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": ...}, "text_config is missing; the qwen3_5 family needs it"),
        ({"audio_config": {}}, "field audio_config is not known next to text_config"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True and text_config.tie_word_embeddings=False differ"),
        ({"text_config": {**MULTIMODAL["text_config"], "sinks": 4}}, "field sinks is not known for the qwen3_5 family"),
    ],
    ids=str,
)
def test_a_multimodal_config_is_checked_too(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConversionError, match=f"config.json: {message}"):
        read({k: v for k, v in (MULTIMODAL | change).items() if v is not ...})


ODD = text(**TINY | TINY_HYBRID | {"num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_key_heads": 4,
                                   "linear_num_value_heads": 12})  # fmt: skip


def sequence(*shape: int) -> Tensor:
    """Return different values, so that a row in a wrong place is seen."""
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def check_round_trip(op: Any, whole: list[Tensor], arch: Architecture, size: int) -> list[Tensor]:
    shards = [op.shard(whole, arch, size, rank) for rank in range(size)]
    assert all(torch.equal(a, b) for a, b in zip(op.unshard(shards, arch), whole, strict=True))
    return shards


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gated_queries_are_grouped_with_their_keys(size: int) -> None:
    arch = read(ODD)
    q, k, v = sequence(2 * 24 * 8, 3), -sequence(32, 3), 0.5 + sequence(32, 3)
    shards = check_round_trip(FusedGatedQKV(), [q, k, v], arch, size)
    heads, groups = q.view(24, 2, 8, 3), iter(torch.cat(shards).view(4, -1, 8, 3))
    for group, fused in enumerate(groups):
        mine = heads[6 * group : 6 * group + 6]
        expected = [*mine[:, 0], *mine[:, 1], k.view(4, 8, 3)[group], v.view(4, 8, 3)[group]]
        assert torch.equal(fused, torch.stack(expected))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_rank_has_its_part_of_every_kind_of_head(size: int) -> None:
    arch = read(ODD)
    qkv, z, b, a = sequence(16 + 16 + 60, 3), -sequence(60, 3), 0.5 + sequence(12, 3), 0.25 - sequence(12, 3)
    shards = check_round_trip(FusedHeads(), [qkv, z, b, a], arch, size)
    q, k, v = qkv.split((16, 16, 60))
    for rank, shard in enumerate(shards):
        assert torch.equal(shard, torch.cat([x.chunk(size)[rank] for x in (q, k, v, z, b, a)]))
    conv = sequence(92, 1, 4)
    shards = check_round_trip(FusedHeads(convolution=True), [conv], arch, size)
    for rank, shard in enumerate(shards):
        assert torch.equal(shard, torch.cat([x.chunk(size)[rank] for x in conv[:, 0].split((16, 16, 60))]))


@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        (FusedGatedQKV(), [(24 * 8, 3), (32 + 96, 3), (32 + 96, 3)]),
        (FusedHeads(), [(92, 3), (60, 3), (13, 3), (11, 3)]),
        (FusedHeads(convolution=True), [(90, 1, 4)]),
    ],
    ids=str,
)
def test_rows_of_another_model_are_refused(op: Any, shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match=r"expected \[.*\] rows, got \["):
        op.shard([torch.zeros(shape) for shape in shapes], read(ODD), 1, 0)
