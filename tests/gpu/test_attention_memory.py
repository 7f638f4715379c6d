"""Attention on a GPU, as a context-parallel rank calls it: memory far below that of all scores; values."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tepo_megatron.actor.attention_layout import AttentionLayout
from tepo_megatron.actor.packed_attention import PackedLayout
from tepo_megatron.ops.flash_attention import packed_flash_of

DEVICE = torch.device("cuda")
HEADS, KV_HEADS, CHANNELS = 32, 8, 128
PARTS = 4  # chunks of a sequence; the first of two context-parallel ranks has the first and the last one
CP_GROUP: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0)


def inputs_of(lengths: list[int], dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Local queries, keys and values of all ranks, and the gradient that comes back to the output."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    keys = sum(lengths)
    rows = ((keys // 2, HEADS), (keys, KV_HEADS), (keys, KV_HEADS), (keys // 2, HEADS))
    *leaves, grad = (torch.randn(*n, CHANNELS, device=DEVICE, generator=generator).to(dtype) for n in rows)
    return leaves, grad.flatten(1)


def attend(leaves: list[Tensor], lengths: list[int]) -> Tensor:
    """Return the output [S, H D], as `SDPACoreAttention` computes it."""
    query, key, value = leaves
    kernel, device = packed_flash_of(query), query.device
    assert (kernel is not None) == (query.dtype == torch.bfloat16)
    if kernel is not None:
        return PackedLayout.of(kernel, lengths, CP_GROUP, device).attend(query, key, value, None)
    layout = AttentionLayout.of(lengths, CP_GROUP, device)
    (bucket,) = layout.buckets
    return torch.cat(bucket.attend(*layout.in_slots(query, key, value), None)).index_select(0, layout.query_slot_S).flatten(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_memory_of_16k_tokens_is_far_below_that_of_their_scores(dtype: torch.dtype) -> None:
    length = 16_384
    leaves, grad = inputs_of([length], dtype)
    leaves = [x.requires_grad_() for x in leaves]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend(leaves, [length]).backward(grad)
    extra = torch.cuda.max_memory_allocated() - before
    scores = HEADS * length // PARTS * length * dtype.itemsize  # scores of the last piece, stored once
    assert extra < scores / 2, (extra, scores)
    assert all(x.grad is not None and x.grad.isfinite().all() for x in leaves)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float32, 1e-4)], ids=str)
@pytest.mark.parametrize("lengths", [[384], [260, 244]], ids=["one mask", "a mask for each sequence"])
def test_values_and_gradients_against_fp64(lengths: list[int], dtype: torch.dtype, tolerance: float) -> None:
    leaves, grad = inputs_of(lengths, dtype)
    results = []
    for device, kind in ((DEVICE, dtype), (torch.device("cpu"), torch.float64)):
        copies = [x.detach().to(device, kind).requires_grad_() for x in leaves]
        output = attend(copies, lengths)
        output.backward(grad.to(device, kind))
        results.append([output.detach(), *(x.grad for x in copies if x.grad is not None)])
    ours, exact = results
    assert len(ours) == len(exact) == 4
    for a, b in zip(ours, exact, strict=True):
        assert (a.cpu().double() - b).norm() <= tolerance * b.norm()
