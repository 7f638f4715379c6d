"""Convert Hugging Face tensors to tensor-parallel shards of a Megatron parameter, and back.

Each operation works in both directions and only moves values, so a round trip is bitwise exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # reading families and planning layouts work without torch
    from torch import Tensor


@dataclass(frozen=True)
class RotaryTable:
    """The rotary frequencies of a model whose RoPE is scaled. They replace the plain frequencies theta^(-2i/D).

    Attributes:
        inv_freq: [D / 2], radians per position.
        attention_factor: factor of both cosines and sines (YaRN, arXiv 2309.00071); attention scores are scaled by its square.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: the router takes a softmax over its logits and chooses the largest.

    Attributes:
        number: number of experts, and of router logits.
        per_token: number of experts that are chosen per token.
        ffn_size: intermediate size of one expert.
        normalized: whether the weights of the chosen experts are scaled to add up to 1.
        sparse_layers: indices of the layers with experts, in ascending order; the others are dense.
    """

    number: int
    per_token: int
    ffn_size: int
    normalized: bool
    sparse_layers: tuple[int, ...]


@dataclass(frozen=True)
class Architecture:
    """The architecture of a decoder, with the same fields for all families.

    Attributes:
        num_layers: number of decoder layers.
        hidden_size: width of the residual stream.
        ffn_size: intermediate size of the dense layers.
        num_heads: number of query heads.
        num_query_groups: number of key-value heads.
        head_dim: dimension of a head; it need not be hidden_size / num_heads.
        vocab_size: vocabulary size of the model, without Megatron's padding.
        max_positions: `max_position_embeddings`.
        norm_eps: epsilon of the RMS norms.
        rotary_base: RoPE's theta.
        tied_embeddings: whether the output layer uses the weight of the embedding.
        qk_norm: whether q and k have RMS norms per head.
        qkv_bias: whether q, k and v have biases.
        rotary_table: frequencies of a scaled RoPE; None: RoPE without scaling.
        experts: the mixture of experts; None: a dense model.
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
        """Return the indices of the layers with experts."""
        return self.experts.sparse_layers if self.experts else ()


class Op(Protocol):
    """Converts the tensors of one table row in both directions."""

    def shard(self, hf: Sequence[Tensor], arch: Architecture, size: int, rank: int) -> Tensor:
        """Return one tensor-parallel rank's shard of the Megatron parameter.

        Args:
            hf: the whole HF tensors, in the order of the row.
            arch: architecture of the model.
            size: number of tensor-parallel ranks.
            rank: the tensor-parallel rank.
        """

    def unshard(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        """Return the whole HF tensors, in the order of the row.

        Args:
            shards: the Megatron shards of all tensor-parallel ranks, in order.
            arch: architecture of the model.
        """


@dataclass(frozen=True)
class Replicated:
    """Keeps the same tensor on every tensor-parallel rank (norms, routers)."""

    def shard(self, hf: Sequence[Tensor], arch: Architecture, size: int, rank: int) -> Tensor:
        return hf[0]

    def unshard(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        return [shards[0]]


@dataclass(frozen=True)
class Split:
    """Splits one tensor along `dim`: 0 for column-parallel, 1 for row-parallel linear layers."""

    dim: int

    def shard(self, hf: Sequence[Tensor], arch: Architecture, size: int, rank: int) -> Tensor:
        return hf[0].chunk(size, self.dim)[rank]

    def unshard(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        import torch

        return [torch.cat(list(shards), self.dim)]


@dataclass(frozen=True)
class Vocabulary:
    """Splits the rows of the vocabulary, after zero-padding them to `padded_vocab_size`."""

    def shard(self, hf: Sequence[Tensor], arch: Architecture, size: int, rank: int) -> Tensor:
        if hf[0].shape != (arch.vocab_size, arch.hidden_size):  # padding would hide a wrong number of rows
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
    """Interleaves q, k, v weights or biases by query group: [q heads of group 0, k 0, v 0, q heads of group 1, ...]."""

    def shard(self, hf: Sequence[Tensor], arch: Architecture, size: int, rank: int) -> Tensor:
        import torch

        rows = [n * arch.head_dim for n in (arch.num_heads, arch.num_query_groups, arch.num_query_groups)]
        if [x.size(0) for x in hf] != rows:  # wrong numbers of rows may have the right sum
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
    """Concatenates gate and up projections: each rank has its part of the gate above its part of the up projection."""

    def shard(self, hf: Sequence[Tensor], arch: Architecture, size: int, rank: int) -> Tensor:
        import torch

        if hf[0].shape != hf[1].shape:
            raise ValueError(f"gate {tuple(hf[0].shape)} and up {tuple(hf[1].shape)} differ")
        return torch.cat([x.chunk(size)[rank] for x in hf])

    def unshard(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        import torch

        halves = [x.chunk(2) for x in shards]
        return [torch.cat([gate for gate, _ in halves]), torch.cat([up for _, up in halves])]


# The number of vocabulary rows per tensor-parallel rank is a multiple of this, for the matrix units of GPUs.
VOCAB_MULTIPLE = 16


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Return the vocabulary size that Megatron allocates: the next multiple of 16 tp.

    Args:
        vocab_size: vocabulary size of the model.
        tp: number of tensor-parallel ranks.
    """
    multiple = VOCAB_MULTIPLE * tp
    return -(-vocab_size // multiple) * multiple
