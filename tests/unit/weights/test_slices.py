"""The parts of a tensor, their names on the wire, and which tensors are cut how."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tepo_megatron.config import GroupTransportConfig, ParallelConfig, RolloutConfig, ServerConfig, SyncConfig
from tepo_megatron.config.sync import check_transport
from tepo_megatron.weight_sync.buckets import slice_dims
from tepo_megatron.weight_sync.slices import TensorSlice, refuse_gaps, sliced
from tepo_megatron.weights.ops import FusedGatedQKV, FusedGateUp, FusedHeads, FusedQKV, Replicated, Split, Vocabulary


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize(("shape", "dim"), [((8, 3), 0), ((3, 8), 1), ((8,), 0), ((3, 5), None)])
@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_parts_together_are_the_tensor(shape: tuple[int, ...], dim: int | None, lanes: int, dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)
    parts = dict(sliced("model.a.weight", tensor, lanes, dim))
    assert len(parts) == lanes
    seen = torch.zeros(shape, dtype=torch.int64)
    for key, part in parts.items():
        place = TensorSlice.of_key(key)
        assert place.name == "model.a.weight" and place.whole_shape(tuple(part.shape)) == list(shape)
        assert place.key == key or lanes == 1
        whole = place.embedded(part)
        assert whole.shape == tensor.shape and whole.dtype == dtype
        mine = whole == tensor
        seen += mine
        assert mine.sum() == part.numel()
        filler = whole[~mine]
        assert filler.isnan().all() if dtype.is_floating_point else not filler.any()
    assert (seen == (lanes if dim is None else 1)).all()


ARCH: Any = SimpleNamespace(num_heads=8, num_query_groups=2, head_dim=4, vocab_size=128, hidden_size=32)


@pytest.mark.parametrize(
    ("op", "shapes", "lanes", "dims"),
    [
        (Replicated(), [(32,)], 2, [None]),
        (Split(0), [(32, 6)], 4, [0]),
        (Split(1), [(6, 32)], 4, [1]),
        (Split(1), [(32, 6)], 4, [None]),  # no equal parts
        (FusedGateUp(), [(64, 32), (64, 32)], 2, [0, 0]),
        (FusedQKV(), [(32, 32), (8, 32), (8, 32)], 2, [0, 0, 0]),
        (FusedQKV(), [(32, 32), (8, 32), (8, 32)], 4, [0, None, None]),  # two ranks have the same head
        (FusedGatedQKV(), [(64, 32), (8, 32), (8, 32)], 2, [0, 0, 0]),
        (FusedGatedQKV(), [(64, 32), (8, 32), (8, 32)], 4, [0, None, None]),
        (FusedHeads(), [(24, 32), (12, 32), (4, 32), (4, 32)], 2, [None, 0, 0, 0]),  # a rank's q, k and v lie apart
        (FusedHeads(convolution=True), [(24, 1, 4)], 2, [None]),
        (Vocabulary(), [(128, 32)], 2, [0]),
        (FusedGatedQKV(), [(64, 32), (8, 32), (8, 32)], 2, [0, 0, 0]),  # a query head and its gate are neighbours
        (FusedGatedQKV(), [(64, 32), (8, 32), (8, 32)], 4, [0, None, None]),
        (FusedHeads(), [(64, 32), (32, 32), (8, 32), (8, 32)], 2, [None, 0, 0, 0]),
        (FusedHeads(convolution=True), [(64, 1, 4)], 2, [None]),
    ],
)
def test_tensors_are_cut_as_the_engines_divide_them(op: Any, shapes: Any, lanes: int, dims: Any) -> None:
    assert slice_dims(op, shapes, ARCH, lanes) == dims


def test_a_vocabulary_that_the_engines_pad_is_sent_whole() -> None:
    padded: Any = SimpleNamespace(**vars(ARCH) | {"vocab_size": 100})
    assert slice_dims(Vocabulary(), [(100, 32)], padded, 2) == [None]


def test_a_model_with_gaps_is_refused() -> None:
    model = torch.nn.Linear(4, 4)
    refuse_gaps(model)
    model.weight.data[2, 1] = torch.nan
    with pytest.raises(ValueError, match=r"1 parameters have gaps.*slices=true expects: weight; set it to false"):
        refuse_gaps(model)


@pytest.mark.parametrize(
    ("sync", "arguments", "message"),
    [
        ({"quantize": "fp8"}, [], r"sync\.transport\.slices=true with sync\.quantize=fp8.*sync\.quantize=none"),
        ({}, ["--enable-expert-parallel"], r"slices=true with --enable-expert-parallel in rollout\.server\.extra_args"),
        ({}, ["--ep-size=2"], r"slices=true with --ep-size=2"),
    ],
)
def test_what_does_not_fit_slices_is_refused(sync: dict[str, Any], arguments: list[str], message: str) -> None:
    transport = GroupTransportConfig(type="group", slices=True)
    settings = SyncConfig(transport=transport, **sync)
    rollout = RolloutConfig(server=ServerConfig(tp=2, extra_args=arguments))
    with pytest.raises(ValueError, match=message):
        check_transport(settings, rollout, ParallelConfig(), "cuda")
