"""Core attention on PyTorch's SDPA, for where Transformer Engine is not installed.

Suffixes: _S packed tokens on this context-parallel (CP) rank, _T on all of them (T = cp S). Further dimensions: H heads, K
key-value heads, D channels; n sequences of one bucket, C tokens of their longest chunk.

Short sequences are many, and a call of SDPA costs more than attending to twenty tokens does. So sequences of similar length are
padded to the same length and attended to in one call. The padding lies at the end, where causal attention never looks: no key
mask is needed. Where each token goes is worked out once per microbatch and shared by all layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from tepo_megatron.errors import ConfigError
from tepo_megatron.ops.context_parallel import concatenated_ranges, zigzag_chunks, zigzag_rows

# Sequences share a bucket when the longest has at most so many times the tokens of the shortest, or so many more: many short
# sequences then take far fewer calls, and long ones little padding.
_PADDING_RATIO = 1.1
_PADDING_TOKENS = 8


class SDPACoreAttention(MegatronModule):
    """Causal attention in the place that Megatron's layer specs call `core_attention`: grouped queries, packed sequences, CP.

    Under CP every rank holds zigzag chunks of each sequence (ops/context_parallel.py). Keys and values of all ranks are
    gathered; each of the rank's two chunks of queries then attends to the sequence up to its own end.
    Collectives: forward: one all-gather of keys and values over CP; backward: one reduce-scatter over CP. None without CP.

    Raises ConfigError, at construction, for what it does not compute: attention that is not causal self-attention, dropout,
    sliding windows, attention sinks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """As Megatron calls it. softmax_scale: 1 / sqrt(D) by default; cp_comm_type: Transformer Engine's, without effect."""
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        _check_supported(config, layer_number, attn_mask_type, attention_type, dropout)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self.cp_group = pg_collection.cp
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Packed (THD): query [S, H, D], key and value [S, K, D] -> [S, H D]; else [s, b, H, D], [s, b, K, D] -> [s, b, H D].

        packed_seq_params: its `cu_seqlens_q_padded` (else `cu_seqlens_q`) counts the tokens of all CP ranks. Raises ValueError
        when the lengths do not add up to the tokens given, when 2 cp does not divide one, or for a mask or a bias.
        """
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("SDPACoreAttention is causal by position and takes neither mask nor bias; pass None")
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            return self._attend(query, key, value, self._packed_layout(packed_seq_params, query))
        length, batch = query.shape[:2]
        layout = _Layout.of([length * self.cp_group.size()] * batch, self.cp_group, query.device)
        query, key, value = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        output_S = self._attend(query, key, value, layout)
        return output_S.view(batch, length, -1).transpose(0, 1)

    def _packed_layout(self, params: PackedSeqParams, query_S: Tensor) -> _Layout:
        """The microbatch's layout, left on `params` by the first layer: on a GPU, reading `cu_seqlens` waits for it."""
        layout: _Layout | None = getattr(params, "sdpa_layout", None)
        if layout is None:
            cu = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
            lengths = [b - a for a, b in itertools.pairwise(cu.tolist())]
            if sum(lengths) != query_S.size(0) * self.cp_group.size():
                raise ValueError(
                    f"cu_seqlens describe {sum(lengths)} tokens over all context-parallel ranks, but each of the "
                    f"{self.cp_group.size()} ranks holds {query_S.size(0)}"
                )
            layout = _Layout.of(lengths, self.cp_group, query_S.device)
            params.sdpa_layout = layout
        return layout

    def _attend(self, query_S: Tensor, key_S: Tensor, value_S: Tensor, layout: _Layout) -> Tensor:
        """[S, H, D], [S, K, D], [S, K, D] -> [S, H D]."""
        key_T, value_T = self._gather(key_S, value_S)
        queries = _spread(query_S, layout.query_slot_S, layout.query_rows)
        keys = _spread(key_T, layout.key_slot_T, layout.key_rows)
        values = _spread(value_T, layout.key_slot_T, layout.key_rows)
        outputs: list[Tensor] = []
        for bucket, q, k, v in zip(
            layout.buckets,
            queries.split([b.query_rows for b in layout.buckets]),
            keys.split([b.key_rows for b in layout.buckets]),
            values.split([b.key_rows for b in layout.buckets]),
            strict=True,
        ):
            outputs += bucket.attend(q, k, v, self.softmax_scale)
        return torch.cat(outputs).index_select(0, layout.query_slot_S).flatten(1)

    def _gather(self, key_S: Tensor, value_S: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all CP ranks, rank after rank. Forward: all-gather over CP; backward: reduce-scatter over CP."""
        if self.cp_group.size() == 1:
            return key_S, value_S
        both_T = gather_from_sequence_parallel_region(torch.cat((key_S, value_S), dim=-1), group=self.cp_group)
        key_T, value_T = both_T.split((key_S.size(-1), value_S.size(-1)), dim=-1)
        return key_T, value_T


@dataclass(frozen=True)
class _Bucket:
    """Sequences of similar length, padded to the longest.

    chunk: C; pieces: the chunks that this rank's queries lie in; total: chunks of a sequence; masks: for each piece, which keys
    each query sees, bool [n or 1, 1, C, (piece + 1) C], or None where it is the plain causal triangle.
    """

    sequences: int
    chunk: int
    pieces: tuple[int, ...]
    total: int
    masks: tuple[Tensor | None, ...]

    @property
    def query_rows(self) -> int:
        """Queries of this rank, with padding."""
        return self.sequences * len(self.pieces) * self.chunk

    @property
    def key_rows(self) -> int:
        """Keys of all CP ranks, with padding."""
        return self.sequences * self.total * self.chunk

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> list[Tensor]:
        """[query_rows, H, D], [key_rows, K, D], [key_rows, K, D] -> for each piece [n C, H, D], together [query_rows, H, D]."""
        key, value = (x.unflatten(0, (self.sequences, -1)).transpose(1, 2) for x in (key, value))
        outputs = []
        for i, (piece, mask) in enumerate(zip(self.pieces, self.masks, strict=True)):
            end = (piece + 1) * self.chunk
            output = F.scaled_dot_product_attention(
                query.unflatten(0, (len(self.pieces), self.sequences, self.chunk))[i].transpose(1, 2),
                key[:, :, :end],
                value[:, :, :end],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=key.size(1) != query.size(1),
            )
            outputs.append(output.transpose(1, 2).flatten(0, 1))
        return outputs


@dataclass(frozen=True)
class _Layout:
    """Where the tokens of a microbatch lie in the padded buckets, one bucket after another.

    query_slot_S: int64, the row of each local query, in a bucket [piece, n, C]; key_slot_T: int64, the row of each gathered
    key, in a bucket [n, chunk of the sequence, C].
    """

    buckets: tuple[_Bucket, ...]
    query_slot_S: Tensor
    key_slot_T: Tensor

    @property
    def query_rows(self) -> int:
        """Rows of all buckets."""
        return sum(b.query_rows for b in self.buckets)

    @property
    def key_rows(self) -> int:
        """Rows of all buckets."""
        return sum(b.key_rows for b in self.buckets)

    @classmethod
    def of(cls, lengths: Sequence[int], cp_group: torch.distributed.ProcessGroup, device: torch.device) -> _Layout:
        """For sequences of these lengths over all CP ranks, as this rank sees them."""
        cp_size, cp_rank = cp_group.size(), cp_group.rank()
        pieces, total = zigzag_chunks(cp_size, cp_rank), 1 if cp_size == 1 else 2 * cp_size
        lengths_G = torch.tensor(lengths)
        chunk_G = lengths_G // total
        cu_seqlens = torch.cat((lengths_G.new_zeros(1), lengths_G.cumsum(0)))
        gathered_T = torch.cat([zigzag_rows(cu_seqlens, cp_size, rank) for rank in range(cp_size)])
        query_first = torch.zeros(len(lengths), len(pieces), dtype=torch.int64)  # row of each chunk's first token
        key_first = torch.zeros(len(lengths), dtype=torch.int64)  # row of each sequence's first token
        buckets: list[_Bucket] = []
        query_rows = key_rows = 0
        for members in _similar(lengths):
            chunk = lengths[members[0]] // total
            masks = tuple(_mask(piece, chunk_G[members], chunk, device) for piece in pieces)
            bucket = _Bucket(len(members), chunk, pieces, total, masks)
            chunk_rows = torch.arange(query_rows, query_rows + bucket.query_rows, chunk)
            query_first[members] = chunk_rows.view(len(pieces), len(members)).T
            key_first[members] = torch.arange(key_rows, key_rows + bucket.key_rows, total * chunk)
            query_rows, key_rows = query_rows + bucket.query_rows, key_rows + bucket.key_rows
            buckets.append(bucket)
        query_slot_S = concatenated_ranges(query_first.flatten(), chunk_G.repeat_interleave(len(pieces)))
        key_slot_T = concatenated_ranges(key_first, lengths_G)[gathered_T]
        return cls(tuple(buckets), query_slot_S.to(device), key_slot_T.to(device))


def _similar(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of `lengths` in buckets of similar length, the longest first."""
    buckets: list[list[int]] = []
    longest = 0
    for i in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i]):
        if not buckets or longest > max(lengths[i] * _PADDING_RATIO, lengths[i] + _PADDING_TOKENS):
            buckets.append([])
            longest = lengths[i]
        buckets[-1].append(i)
    return buckets


def _mask(piece: int, chunk_n: Tensor, chunk: int, device: torch.device) -> Tensor | None:
    """Query j of a chunk is token piece * (its sequence's chunk length) + j and sees all up to itself."""
    if piece == 0:
        return None
    if bool((chunk_n == chunk).all()):
        chunk_n = chunk_n[:1]
    position = piece * chunk_n.to(device)[:, None] + torch.arange(chunk, device=device)
    return (torch.arange((piece + 1) * chunk, device=device) <= position[:, :, None]).unsqueeze(1)


def _spread(x: Tensor, slot: Tensor, rows: int) -> Tensor:
    """x[i] at row slot[i], zeros elsewhere. Backward is a gather, without atomics."""
    return x.new_zeros(rows, *x.shape[1:]).index_copy(0, slot, x)


def _check_supported(
    config: TransformerConfig, layer_number: int, mask_type: AttnMaskType, attention_type: str, dropout: float
) -> None:
    refused: dict[str, Any] = {}
    if mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
        refused["attn_mask_type"] = mask_type.name
    if attention_type != "self":
        refused["attention_type"] = attention_type
    if dropout:
        refused["attention_dropout"] = dropout
    if config.window_size is not None:
        refused["window_size"] = config.window_size
    if config.softmax_type != "vanilla":
        refused["softmax_type"] = config.softmax_type
    if refused:
        what = ", ".join(f"{key}={value}" for key, value in refused.items())
        raise ConfigError(
            f"model.attention=sdpa computes causal self-attention only; layer {layer_number} asks for {what}; use "
            "model.attention=te on platform=cuda"
        )
