"""The gated delta rule in the actor: its layouts, its kernels, what stays in fp32, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.actor import build
from tepo_megatron.actor.layout import check_layout, check_shared_prompts
from tepo_megatron.actor.linear_attention import LinearLayout
from tepo_megatron.actor.rotary import PackedRotary, rotate
from tepo_megatron.base.errors import ConfigError
from tepo_megatron.config import ModelConfig, ParallelConfig, TrainingConfig
from tepo_megatron.models.families import find_family, read_config
from tepo_megatron.models.ops import Architecture
from tests.tiny import hybrid_config, tiny_model
from tests.unit.models.test_families import QWEN3_5
from tests.worlds import run_world

CPU = torch.device("cpu")


def published(**changes: Any) -> Architecture:
    return find_family(QWEN3_5).architecture(QWEN3_5 | changes)


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ({"cp": 3}, r"parallel.tp \* parallel.cp=3 does not divide the 16 key heads .*use a cp of 1, 2, 4, 8 or 16$"),
        ({"tp": 4, "cp": 8, "sequence_parallel": True}, r"tp \* parallel.cp=32 .*; use a cp of 1, 2 or 4$"),
    ],
)
def test_layouts_that_do_not_split_the_key_heads_are_refused(parallel: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_layout(published(), ParallelConfig(**parallel))


def test_prompts_are_shared_by_no_hybrid() -> None:
    model = ModelConfig(path="m", precision="fp32")
    assert not build.shares_prompts(TrainingConfig(), model, CPU, 1, published())
    assert build.shares_prompts(TrainingConfig(), model, CPU, 1)
    always = TrainingConfig(share_prompts="always")
    said = "share_prompts=always, but the model has layers with the gated delta rule.* use auto"
    with pytest.raises(ConfigError, match=said):
        check_shared_prompts(published(), always)
    with pytest.raises(ConfigError, match=said):
        build.shares_prompts(always, model, CPU, 1, published())


def layers_of(rank: int, path: Path, name: Any) -> dict[str, tuple[str, str]]:
    """The dtype and the module's class of each parameter of a model."""
    from tepo_megatron.dist import parallel
    from tepo_megatron.dist.platform import activate

    groups = parallel.initialize(ParallelConfig(), activate("cpu"), 0)
    found = read_config(path)
    arch, model = find_family(found).architecture(found), ModelConfig(path=str(path), precision=name)
    config = build.transformer_config(arch, model, ParallelConfig(), groups.device)
    (chunk,) = build.build_chunks(config, arch, model, groups)
    modules = dict(chunk.named_modules())
    out = {
        n: (str(p.dtype).removeprefix("torch."), type(modules[n.rpartition(".")[0]]).__name__)
        for n, p in chunk.named_parameters()
    }
    parallel.shutdown()
    return out


def test_what_no_precision_rounds(tmp_path: Path) -> None:
    """A_log is fp32 in a bf16 model. It, dt_bias, convolution and norms belong to no linear layer, so FP8 skips them."""
    tiny_model(tmp_path / "model", hybrid_config())
    (found,) = run_world(1, layers_of, tmp_path / "model", "bf16")
    layer = "decoder.layers.0.self_attention."
    mine = {n.removeprefix(layer): kinds for n, kinds in found.items() if n.startswith(layer)}
    assert mine == {
        "A_log": ("float32", "GatedDeltaNet"),
        "dt_bias": ("bfloat16", "GatedDeltaNet"),
        "conv_weight": ("bfloat16", "GatedDeltaNet"),
        "norm_weight": ("bfloat16", "GatedDeltaNet"),
        "in_proj.weight": ("bfloat16", "ColumnParallelLinear"),
        "out_proj.weight": ("bfloat16", "RowParallelLinear"),
    }
    assert found["decoder.layers.0.input_layernorm.weight"] == ("bfloat16", "ZeroCenteredRMSNorm")
    assert found["decoder.layers.3.self_attention.q_layernorm.weight"] == ("bfloat16", "ZeroCenteredRMSNorm")
    assert {n for n, (dtype, _) in found.items() if dtype == "float32"} == {
        f"decoder.layers.{i}.self_attention.A_log" for i in (0, 1, 2)
    }


def test_the_tokens_of_the_ranks_are_put_in_order() -> None:
    layout = LinearLayout.of((8, 0, 4), 2, CPU)
    # rank 0 holds chunks 0 and 3 of each sequence, rank 1 chunks 1 and 2
    assert layout.rows_T is not None and layout.rows_T.tolist() == [0, 1, 6, 7, 8, 11, 2, 3, 4, 5, 9, 10]
    assert layout.position_T.tolist() == [*range(8), *range(4)] and layout.starts.tolist() == [0, 8, 8, 12]
    assert LinearLayout.of((8,), 1, CPU).rows_T is None


def test_only_the_first_channels_of_a_head_are_rotated() -> None:
    lengths, rotated = torch.tensor([5, 7]), 4
    t = torch.randn(12, 3, 10, generator=torch.Generator().manual_seed(0))
    half = torch.outer(torch.arange(7.0), torch.tensor([1.0, 0.1]))
    freqs = torch.cat((half, half), dim=-1)[:, None, None, :]
    cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).int()
    found = PackedRotary()(t, cu_seqlens, freqs)
    assert torch.equal(found[..., rotated:], t[..., rotated:])
    assert torch.equal(found[..., :rotated], PackedRotary()(t[..., :rotated], cu_seqlens, freqs))
    unpacked = rotate(t[5:, None], freqs)
    assert torch.equal(unpacked[:, 0], found[5:])
