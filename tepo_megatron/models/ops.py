"""Convert Hugging Face tensors to tensor-parallel shards of a Megatron parameter, and back.

Each operation works in both directions and only moves values, so a round trip is bitwise exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # reading families and planning layouts work without torch
    from torch import Tensor


@dataclass(frozen=True)
class RotaryTable:
    """The rotary frequencies of a model whose RoPE is scaled. They replace the plain frequencies theta^(-2i/D)."""

    inv_freq: tuple[float, ...]  # [D / 2], radians per position
    # factor of both cosines and sines (YaRN, arXiv 2309.00071); attention scores are scaled by its square
    attention_factor: float


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: the router takes a softmax over its logits and chooses the largest."""

    number: int  # number of experts, and of router logits
    per_token: int  # number of experts that are chosen per token
    ffn_size: int
    normalized: bool  # whether the weights of the chosen experts are scaled to add up to 1
    sparse_layers: tuple[int, ...]  # indices of the layers with experts, in ascending order; the others are dense


@dataclass(frozen=True)
class LinearAttention:
    """The gated delta rule, which replaces attention in some layers (arXiv 2412.06464).

    Value head h uses the query and the key of key head h // (value_heads / key_heads).
    """

    key_heads: int  # number of heads of queries and of keys
    value_heads: int  # number of heads of values, a multiple of `key_heads`
    key_dim: int  # dimension of a query or a key
    value_dim: int
    conv_width: int  # number of tokens that the causal convolution covers
    layers: tuple[int, ...]  # indices of the layers with the gated delta rule, in ascending order; the others have attention

    @property
    def convolved(self) -> tuple[int, int, int]:
        """Return the channels of queries, keys and values, all of which pass the convolution."""
        return (self.key_heads * self.key_dim, self.key_heads * self.key_dim, self.value_heads * self.value_dim)

    @property
    def projected(self) -> tuple[int, ...]:
        """Return the rows of the input projection: queries, keys, values, output gates, write strengths and decays."""
        return (*self.convolved, self.value_heads * self.value_dim, self.value_heads, self.value_heads)


@dataclass(frozen=True)
class Architecture:
    """The architecture of a decoder, with the same fields for all families."""

    num_layers: int
    hidden_size: int
    ffn_size: int  # intermediate size of the dense layers
    num_heads: int
    num_query_groups: int
    head_dim: int  # dimension of a head; it need not be hidden_size / num_heads
    vocab_size: int  # vocabulary size of the model, without Megatron's padding
    max_positions: int  # `max_position_embeddings`
    norm_eps: float
    rotary_base: float
    tied_embeddings: bool  # whether the output layer uses the weight of the embedding
    qk_norm: bool  # whether q and k have RMS norms per head
    qkv_bias: bool = False  # whether q, k and v have biases
    rotary_table: RotaryTable | None = None  # frequencies of a scaled RoPE; None: RoPE without scaling
    experts: Experts | None = None  # the mixture of experts; None: a dense model
    linear_attention: LinearAttention | None = None  # the gated delta rule of some layers; None: all layers have attention
    # whether the output of attention is multiplied by the sigmoid of a gate per channel, which the projection of the queries
    # computes
    attention_output_gate: bool = False
    rotary_percent: float = 1.0  # part of the channels of a head that RoPE rotates, from the first on
    # whether RMS norms multiply by 1 + w. The norm of the gated delta rule multiplies by w in any case.
    zero_centered_norms: bool = False

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Return the indices of the layers with the gated delta rule in place of attention."""
        return self.linear_attention.layers if self.linear_attention else ()

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Return the indices of the layers with experts."""
        return self.experts.sparse_layers if self.experts else ()


class Op(Protocol):
    """Converts the tensors of one table row in both directions."""

    def shard(self, hf: Sequence[Tensor], arch: Architecture, size: int, rank: int) -> Tensor:
        """Return one tensor-parallel rank's shard of the Megatron parameter."""

    def unshard(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        """Return the whole HF tensors, in the order of the row."""


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
class FusedGatedQKV:
    """Interleaves q, k, v by query group where q has an output gate: [q heads of group 0, their gates, k 0, v 0, q heads ...].

    HF's q projection has the rows of one head after another: [query of head 0, gate of head 0, query of head 1, ...].
    """

    def shard(self, hf: Sequence[Tensor], arch: Architecture, size: int, rank: int) -> Tensor:
        import torch

        rows = [n * arch.head_dim for n in (2 * arch.num_heads, arch.num_query_groups, arch.num_query_groups)]
        if [x.size(0) for x in hf] != rows:  # wrong numbers of rows may have the right sum
            raise ValueError(f"expected {rows} rows, got {[x.size(0) for x in hf]}")
        rest = hf[0].shape[1:]
        heads = hf[0].view(arch.num_query_groups, -1, 2, arch.head_dim, *rest)
        k, v = (x.view(arch.num_query_groups, arch.head_dim, *rest) for x in hf[1:])
        groups = torch.cat((heads.transpose(1, 2).flatten(1, 3), k, v), dim=1).chunk(size)[rank]
        return groups.flatten(0, 1)

    def unshard(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        import torch

        fused = torch.cat(list(shards))
        groups = fused.view(arch.num_query_groups, -1, *fused.shape[1:])
        per_group = arch.num_heads // arch.num_query_groups
        q, k, v = groups.split((2 * per_group * arch.head_dim, arch.head_dim, arch.head_dim), dim=1)
        heads = q.unflatten(1, (2, per_group, arch.head_dim)).transpose(1, 2)
        return [heads.flatten(0, 3), k.flatten(0, 1), v.flatten(0, 1)]


@dataclass(frozen=True)
class FusedHeads:
    """Concatenates the rows of several kinds of heads of the gated delta rule; each rank has its part of every kind.

    HF's first tensor has the rows of queries, keys and values, and each other tensor has one kind.
    """

    # whether the tensor is the convolution's, [channels, 1, width] in HF and [channels, width] in Megatron
    convolution: bool = False
    unquantized: tuple[str, ...] = ()  # endings of the names of the HF tensors that an FP8 model keeps in high precision

    def kinds(self, arch: Architecture) -> tuple[int, ...]:
        """Return the rows of each kind in the whole model."""
        if arch.linear_attention is None:
            raise ValueError("the architecture has no linear attention")
        return arch.linear_attention.convolved if self.convolution else arch.linear_attention.projected

    def shard(self, hf: Sequence[Tensor], arch: Architecture, size: int, rank: int) -> Tensor:
        import torch

        kinds = self.kinds(arch)
        expected = [sum(kinds[:3]), *kinds[3:]]
        if [x.size(0) for x in hf] != expected:
            raise ValueError(f"expected {expected} rows, got {[x.size(0) for x in hf]}")
        first = hf[0].squeeze(1) if self.convolution else hf[0]
        return torch.cat([x.chunk(size)[rank] for x in (*first.split(kinds[:3]), *hf[1:])])

    def unshard(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        import torch

        parts = [x.split([rows // len(shards) for rows in self.kinds(arch)]) for x in shards]
        whole = [torch.cat(kind) for kind in zip(*parts, strict=True)]
        first = torch.cat(whole[:3])
        return [first.unsqueeze(1) if self.convolution else first, *whole[3:]]


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
    """Return the vocabulary size that Megatron allocates: the next multiple of 16 tp."""
    multiple = VOCAB_MULTIPLE * tp
    return -(-vocab_size // multiple) * multiple


def forward_operations(arch: Architecture, lengths: Iterable[tuple[int, int]]) -> float | None:
    """Return the operations of a forward pass over sequences: the sum of 2 P L + 2 V h R + 2 H D L^2 layers.

    P parameters that a token meets in the layers (of experts those that it is sent to), vocabulary V, hidden size h, H heads of
    D channels; causal attention counts the half of all scores. None: layers with the gated delta rule are not counted.

    Args:
        lengths: (L, R) of each sequence: all its tokens, and those whose rows reach the output layer.
    """
    if arch.linear_layers:
        return None
    heads = (2 + arch.attention_output_gate) * arch.num_heads + 2 * arch.num_query_groups
    attention, sparse = arch.hidden_size * arch.head_dim * heads, len(arch.sparse_layers)
    ffn = (arch.num_layers - sparse) * arch.ffn_size
    ffn += sparse * arch.experts.ffn_size * arch.experts.per_token if arch.experts else 0
    parameters = arch.num_layers * attention + 3 * arch.hidden_size * ffn
    scores = 2 * arch.num_heads * arch.head_dim * arch.num_layers
    output = 2 * arch.vocab_size * arch.hidden_size
    return float(sum(2 * parameters * length + output * rows + scores * length**2 for length, rows in lengths))
