"""Rotary position embedding (RoPE) of packed tokens, used where Transformer Engine's is not.

Megatron-Core's own implementation (0.16) splits packed tokens into sequences, and computes cosines and sines again for the
queries and keys of every layer. Here the tables are computed once per microbatch, and all its layers share them.
"""

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tepo_megatron.ops.context_parallel import zigzag_rows

_NEVER_INTERLEAVED = "rotary_interleaved must be False: no supported model family rotates adjacent channels"


def install_in_megatron(shared_prompts: bool = False) -> None:
    """Install these functions as those that `TransformerConfig.apply_rope_fusion` calls, unless Transformer Engine's are there.

    With `shared_prompts` the function for packed tokens is installed in any case: Transformer Engine's cannot share prompts.
    """
    if rope_utils.fused_apply_rotary_pos_emb_thd is None or shared_prompts:
        rope_utils.fused_apply_rotary_pos_emb_thd = PACKED
    if rope_utils.fused_apply_rotary_pos_emb is None:
        rope_utils.fused_apply_rotary_pos_emb = rotate


def rotate(t: Tensor, freqs: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate each head vector of sequences that are not packed, as `PackedRotary` does for packed ones.

    `freqs`: fp32 [S, 1, 1, R], the angles of each position, the same R / 2 twice. R <= D: see `PackedRotary`.
    """
    assert not interleaved, _NEVER_INTERLEAVED
    angle = freqs[..., : freqs.size(-1) // 2]
    return _rotated(t, angle.cos().to(t.dtype), angle.sin().to(t.dtype))


@dataclass(frozen=True)
class RotaryTables:
    """The tables of a microbatch."""

    # cu_seqlens, freqs: the tensors that they were computed for
    cu_seqlens: Tensor
    freqs: Tensor
    dtype: torch.dtype  # the type of cos and sin
    # cos, sin: [S, 1, R / 2], of each token's angles
    cos: Tensor
    sin: Tensor

    def are_of(self, cu_seqlens: Tensor, freqs: Tensor, dtype: torch.dtype) -> bool:
        """Return whether the tables were computed for these very tensors. Args: those of `PackedRotary`."""
        return self.cu_seqlens is cu_seqlens and self.freqs is freqs and self.dtype == dtype


class PackedRotary:
    """A replacement for Megatron's fused RoPE function for packed sequences.

    `tables`: the tables of the last microbatch, cached for its other layers; None: there are none.
    """

    def __init__(self) -> None:
        self.tables: RotaryTables | None = None
        # one entry per microbatch whose `cu_seqlens` is alive: a pipeline recomputes one after the forward passes of later ones
        self._starts: MutableMapping[Tensor, Sequence[int]] = WeakTensorKeyDictionary()

    def start(self, cu_seqlens: Tensor, starts: Sequence[int]) -> None:
        """Register the positions at which the pieces of a microbatch start. Without this call they start at 0."""
        self._starts[cu_seqlens] = starts

    def clear(self) -> None:
        """Drop the cached tables and all registered starts."""
        self.tables = None
        self._starts.clear()

    def __call__(
        self, t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_size: int = 1, cp_rank: int = 0, interleaved: bool = False
    ) -> Tensor:
        """Rotate each head vector by its position in its sequence: pairs (x_j, x_{j + R/2}) by the angle position * theta_j.

        Only the first R channels of a head are rotated; the others pass unchanged. `freqs`: fp32 [positions, 1, 1, R], the
        angles of each position, the same R / 2 twice. Returns [S, heads, D] in the type of `t`. Gradients: to `t`.
        """
        assert not interleaved, _NEVER_INTERLEAVED
        if self.tables is None or not self.tables.are_of(cu_seqlens, freqs, t.dtype):
            rows = zigzag_rows(cu_seqlens, cp_size, cp_rank)
            sequence = torch.searchsorted(cu_seqlens[1:].long(), rows, right=True)
            first = cu_seqlens[:-1].long()
            if (starts := self._starts.get(cu_seqlens)) is not None:
                first = first - torch.tensor(starts, device=first.device)
            angle = freqs[rows - first[sequence], 0, :, : freqs.size(-1) // 2]
            self.tables = RotaryTables(cu_seqlens, freqs, t.dtype, angle.cos().to(t.dtype), angle.sin().to(t.dtype))
        return _rotated(t, self.tables.cos, self.tables.sin)


PACKED = PackedRotary()  # the instance that Megatron calls


def _rotated(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return t with the first 2 cos.size(-1) channels of each head rotated."""
    channels = 2 * cos.size(-1)
    if channels == t.size(-1):
        turned: Tensor = _Rotation.apply(t, cos, sin)
        return turned
    return torch.cat((_Rotation.apply(t[..., :channels], cos, sin), t[..., channels:]), dim=-1)


class _Rotation(torch.autograd.Function):
    """A rotation in forward, and the inverse rotation of the gradient in backward. It saves only cos and sin."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(t, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grads[0], cos, sin, -1), None, None


def _turned(t: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Return t rotated by the angle (sign 1) or back (sign -1)."""
    first, second = t.chunk(2, dim=-1)
    out = torch.empty(t.shape, dtype=t.dtype, device=t.device)
    a, b = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=a).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=b).addcmul_(first, sin, value=sign)
    return out
