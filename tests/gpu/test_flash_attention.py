"""The log-sum-exp of CUDA's attention, and gradients from that of a softmax over more keys, against fp64."""

import math

import pytest
import torch
from torch import Tensor

from tepo_megatron.ops.flash_attention import AttendedKeys, PackedCall, PackedFlash, flash_attention_of, merge

DEVICE = torch.device("cuda")
HEADS, KV_HEADS, CHANNELS = 4, 2, 64
BEFORE, LENGTHS = (131, 64, 5), (70, 1, 300)  # tokens of each sequence before its queries, and its queries


def draws(queries: int, keys: int, dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value, and the gradient of the output: [tokens, heads, D]."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    rows = ((queries, HEADS), (keys, KV_HEADS), (keys, KV_HEADS), (queries, HEADS))
    return [torch.randn(*n, CHANNELS, device=DEVICE, generator=generator).to(dtype) for n in rows]


def exactly(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """Output and gradients in fp64 of the last tokens of one sequence over all of it."""
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in exact[1:])
    future = torch.ones(q.size(0), k.size(0), dtype=torch.bool, device=DEVICE).triu(1 + k.size(0) - q.size(0))
    scores = torch.einsum("ihd,jhd->hij", exact[0], keys) / math.sqrt(CHANNELS)
    out = torch.einsum("hij,jhd->ihd", scores.masked_fill(future, -math.inf).softmax(-1), values)
    return [out.detach(), *torch.autograd.grad(out, exact, grad.double())]


def check(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("masked", [False, True])
def test_two_parts_of_a_softmax_in_fp32(masked: bool) -> None:
    """70 tokens that see 131 before them and themselves up to their own place, the latter as a triangle or as a mask."""
    before, length, flash = BEFORE[0], LENGTHS[0], flash_attention_of(DEVICE)
    tensors = draws(length, before + length, torch.float32)
    q, k, v, grad = (x.transpose(0, 1)[None] for x in tensors)
    triangle = torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril()
    own = AttendedKeys(mask=triangle[None, None]) if masked else AttendedKeys(causal=True)
    calls = [(k[:, :, :before], v[:, :, :before], AttendedKeys()), (k[:, :, before:], v[:, :, before:], own)]
    out, lse = merge(*flash.forward(q, *calls[0], None), *flash.forward(q, *calls[1], None))
    parts = [flash.backward(grad, q, *call[:2], out, lse, call[2], None) for call in calls]
    keys = (torch.cat((a, b), dim=2) for a, b in zip(parts[0][1:], parts[1][1:], strict=True))
    check([x[0].transpose(0, 1) for x in (out, parts[0][0] + parts[1][0], *keys)], exactly(*tensors), 1e-5)


def call_of(queries: list[int], keys: list[int], causal: bool) -> PackedCall:
    cu_q, cu_k = (torch.tensor([0, *n], device=DEVICE).cumsum(0).int() for n in (queries, keys))
    return PackedCall(None, None, cu_q, cu_k, max(queries), max(keys), causal)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_packed_sequences_in_one_call_and_as_two_parts(dtype: torch.dtype) -> None:
    """The last tokens of three sequences: over all of their sequence, and over what is before them and themselves."""
    flash, lengths, keys = PackedFlash(), list(LENGTHS), [a + b for a, b in zip(BEFORE, LENGTHS, strict=True)]
    tensors = q, k, v, grad = draws(sum(lengths), sum(keys), dtype)
    each = [x.split(n) for x, n in zip(tensors, (lengths, keys, keys, lengths), strict=True)]
    expected = [torch.cat(parts) for parts in zip(*(exactly(*one) for one in zip(*each, strict=True)), strict=True)]

    whole = call_of(lengths, keys, True)
    out, lse = flash.forward(q, k, v, whole, None)
    check([out, *flash.backward(grad, q, k, v, out, lse, whole, None)], expected, 1e-2)

    own = torch.cat([torch.arange(n, device=DEVICE) >= before for n, before in zip(keys, BEFORE, strict=True)])
    calls = [(call_of(lengths, list(BEFORE), False), ~own), (call_of(lengths, lengths, True), own)]
    (out, lse), (more, more_lse) = (flash.forward(q, k[rows], v[rows], call, None) for call, rows in calls)
    out, lse_QH = merge(out, lse.T, more, more_lse.T)
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for call, rows in calls:
        parts = flash.backward(grad, q, k[rows], v[rows], out, lse_QH.T.contiguous(), call, None)
        grads[0] += parts[0]
        for total, part in zip(grads[1:], parts[1:], strict=True):
            total[rows] = part
    check([out, *grads], expected, 1e-2)
