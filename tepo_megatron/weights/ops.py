"""How one Megatron parameter is made of Hugging Face tensors, and how it is split over tensor-parallel ranks.

Each operation works both ways and moves values only, so a round trip is bitwise exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # families are read, and layouts planned, without torch
    from torch import Tensor


@dataclass(frozen=True)
class RotaryTable:
    """What replaces RoPE's plain frequencies theta^(-2i/D).

    inv_freq: [D / 2] radians per position; attention_factor: by which both cosines and sines are multiplied (YaRN,
    arXiv 2309.00071), that is, the attention scores by its square.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: softmax over `number` router logits, the `per_token` largest chosen.

    ffn_size: of one expert; normalized: the weights of the chosen ones add up to 1; sparse_layers: those with experts, in
    ascending order (the others are dense).
    """

    number: int
    per_token: int
    ffn_size: int
    normalized: bool
    sparse_layers: tuple[int, ...]


@dataclass(frozen=True)
class Architecture:
    """What a Hugging Face config says of a decoder, in one vocabulary for all families.

    ffn_size: of the dense layers; head_dim need not be hidden_size / num_heads; vocab_size is the true one (Megatron pads it);
    rotary_base: RoPE's theta; rotary_table: None for RoPE without scaling; experts: None for a dense model.
    """

    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rotary_base: float
    tied_embeddings: bool
    qk_norm: bool
    qkv_bias: bool = False
    rotary_table: RotaryTable | None = None
    experts: Experts | None = None

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Layers with experts."""
        return self.experts.sparse_layers if self.experts else ()


class Op(Protocol):
    """Both directions of one table row."""

    def shard(self, hf: Sequence[Tensor], arch: Architecture, size: int, rank: int) -> Tensor:
        """The Megatron shard of tensor-parallel rank `rank` of `size`, from whole HF tensors."""

    def unshard(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        """The whole HF tensors, from the shards of all tensor-parallel ranks."""


@dataclass(frozen=True)
class Replicated:
    """The same tensor on every tensor-parallel rank (norms, routers)."""

    def shard(self, hf: Sequence[Tensor], arch: Architecture, size: int, rank: int) -> Tensor:
        return hf[0]

    def unshard(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        return [shards[0]]


@dataclass(frozen=True)
class Split:
    """One tensor cut along `dim`: 0 for column-parallel, 1 for row-parallel linear layers."""

    dim: int

    def shard(self, hf: Sequence[Tensor], arch: Architecture, size: int, rank: int) -> Tensor:
        return hf[0].chunk(size, self.dim)[rank]

    def unshard(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        import torch

        return [torch.cat(list(shards), self.dim)]


@dataclass(frozen=True)
class Vocabulary:
    """Rows of the vocabulary, zero-padded to `padded_vocab_size` before the cut."""

    def shard(self, hf: Sequence[Tensor], arch: Architecture, size: int, rank: int) -> Tensor:
        if hf[0].shape != (arch.vocab_size, arch.hidden_size):  # padding would hide it
            raise ValueError(f"expected {(arch.vocab_size, arch.hidden_size)}, got {tuple(hf[0].shape)}")
        import torch

        rows = padded_vocab_size(arch.vocab_size, size) // size
        part = hf[0][rank * rows : (rank + 1) * rows]
        return torch.nn.functional.pad(part, (0, 0, 0, rows - part.size(0)))

    def unshard(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        import torch

        return [torch.cat(list(shards))[: arch.vocab_size]]


@dataclass(frozen=True)
class FusedQKV:
    """q, k, v weights or biases, interleaved by query group: [q heads of group 0, k 0, v 0, q heads of group 1, ...]."""

    def shard(self, hf: Sequence[Tensor], arch: Architecture, size: int, rank: int) -> Tensor:
        import torch

        rows = [n * arch.head_dim for n in (arch.num_heads, arch.num_query_groups, arch.num_query_groups)]
        if [x.size(0) for x in hf] != rows:  # the sum of wrong ones may fit
            raise ValueError(f"expected {rows} rows, got {[x.size(0) for x in hf]}")
        q, k, v = (x.view(arch.num_query_groups, -1, *x.shape[1:]) for x in hf)
        groups = torch.cat((q, k, v), dim=1).chunk(size)[rank]
        return groups.reshape(-1, *groups.shape[2:])

    def unshard(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        import torch

        fused = torch.cat(list(shards))
        groups = fused.view(arch.num_query_groups, -1, *fused.shape[1:])
        q_rows = arch.num_heads // arch.num_query_groups * arch.head_dim
        parts = groups.split((q_rows, arch.head_dim, arch.head_dim), dim=1)
        return [x.reshape(-1, *x.shape[2:]) for x in parts]


@dataclass(frozen=True)
class FusedGateUp:
    """Gate and up projections; each rank holds its part of the gate above its part of the up projection."""

    def shard(self, hf: Sequence[Tensor], arch: Architecture, size: int, rank: int) -> Tensor:
        import torch

        if hf[0].shape != hf[1].shape:
            raise ValueError(f"gate {tuple(hf[0].shape)} and up {tuple(hf[1].shape)} differ")
        return torch.cat([x.chunk(size)[rank] for x in hf])

    def unshard(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        import torch

        halves = [x.chunk(2) for x in shards]
        return [torch.cat([gate for gate, _ in halves]), torch.cat([up for _, up in halves])]


# Rows of the vocabulary per tensor-parallel rank come in multiples of this, for the matrix units of GPUs.
VOCAB_MULTIPLE = 16


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """The vocabulary size that Megatron allocates: a multiple of 16 tp."""
    multiple = VOCAB_MULTIPLE * tp
    return -(-vocab_size // multiple) * multiple
