"""Packed rotary embedding against Megatron-Core's own, sequence by sequence."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd

from tepo_megatron.actor.rotary import PackedRotary

HEADS, D = 3, 8


@pytest.mark.parametrize(("cp", "rank"), [(1, 0), (2, 0), (2, 1), (4, 2)])
def test_values_and_gradients_are_megatrons(cp: int, rank: int) -> None:
    lengths = torch.tensor([8, 16, 8, 40])
    cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).int()
    half = torch.outer(torch.arange(40.0), 10.0 ** -torch.arange(D / 2))
    freqs = torch.cat((half, half), dim=-1)[:, None, None, :]
    generator = torch.Generator().manual_seed(0)
    t = torch.randn(int(lengths.sum()) // cp, HEADS, D, generator=generator).requires_grad_()
    upstream = torch.randn(t.shape, generator=generator)
    group = SimpleNamespace(size=lambda: cp, rank=lambda: rank)
    outs = []
    for rotate in (
        lambda: _apply_rotary_pos_emb_thd(t, cu_seqlens, freqs, cp_group=group),
        lambda: PackedRotary()(t, cu_seqlens, freqs, cp, rank),
    ):
        out = rotate()
        outs.append((out, torch.autograd.grad(out, t, upstream)[0]))
    (expected, expected_grad), (found, grad) = outs
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-6, atol=1e-6)


def test_pieces_behind_a_shared_prompt_start_after_it() -> None:
    """Compare with separate sequences, of which only the part behind the prompt counts; other tensors start at 0."""
    t, half = torch.randn(14, HEADS, D), torch.rand(12, D // 2)
    freqs = torch.cat((half, half), dim=-1)[:, None, None, :]
    rotate, cu_seqlens = PackedRotary(), torch.tensor([0, 4, 9, 9, 14])
    rotate.start(cu_seqlens, (0, 3, 3, 0))
    found = rotate(t, cu_seqlens, freqs)
    alone = torch.cat((t[:3], t[4:9]))
    assert torch.equal(found[4:9], PackedRotary()(alone, torch.tensor([0, 8]), freqs)[3:])
    others = torch.cat((t[:4], t[9:]))
    assert torch.equal(torch.cat((found[:4], found[9:])), PackedRotary()(others, torch.tensor([0, 4, 9]), freqs))
    assert torch.equal(rotate(t, cu_seqlens.clone(), freqs), PackedRotary()(t, cu_seqlens, freqs))
