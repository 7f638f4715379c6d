"""The log-sum-exp of CUDA's attention, and gradients from that of a softmax over more keys, against fp64."""

import math

import pytest
import torch

from tepo_megatron.ops.flash_attention import AttendedKeys, flash_attention_of, merge

DEVICE = torch.device("cuda")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_two_parts_of_a_softmax(dtype: torch.dtype, tolerance: float, masked: bool) -> None:
    """70 tokens that see 131 before them and themselves up to their own place, the latter as a triangle or as a mask."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    flash, before, length, heads, kv_heads, channels = flash_attention_of(DEVICE), 131, 70, 4, 2, 64

    def draw(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(1, heads, tokens, channels, device=DEVICE, generator=generator).to(dtype)

    q, k, v, grad = draw(heads, length), draw(kv_heads, before + length), draw(kv_heads, before + length), draw(heads, length)
    triangle = torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril()
    own = AttendedKeys(mask=triangle[None, None]) if masked else AttendedKeys(causal=True)
    calls = [(k[:, :, :before], v[:, :, :before], AttendedKeys()), (k[:, :, before:], v[:, :, before:], own)]
    out, lse = merge(*flash.forward(q, *calls[0], None), *flash.forward(q, *calls[1], None))
    parts = [flash.backward(grad, q, *call[:2], out, lse, call[2], None) for call in calls]
    found = [
        out,
        parts[0][0] + parts[1][0],
        *(torch.cat((a, b), dim=2) for a, b in zip(parts[0][1:], parts[1][1:], strict=True)),
    ]

    exact = [x.double().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(heads // kv_heads, dim=1) for x in exact[1:])
    seen = torch.cat((torch.ones(length, before, dtype=torch.bool, device=DEVICE), triangle), dim=1)
    scores = (exact[0] @ keys.transpose(-1, -2) / math.sqrt(channels)).masked_fill(~seen, -math.inf)
    expected = scores.softmax(-1) @ values
    gradients = torch.autograd.grad(expected, exact, grad.double())
    for ours, theirs in zip(found, (expected.detach(), *gradients), strict=True):
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()
