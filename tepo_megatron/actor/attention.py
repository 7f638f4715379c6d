"""Core attention on PyTorch's kernels, used where Transformer Engine is not: flash attention for packed sequences on a GPU in
16 bits, else scaled dot product attention (SDPA) in buckets.

Suffixes and dimensions are those of attention_layout.py, which computes the positions of a microbatch's tokens.

Where responses share prompts, the attention of each token to its own piece is computed in the layout's buckets, as without
sharing. The attention of responses to their prompt is computed in one call per prompt, with the queries of all its responses.
Both are merged by their log-sum-exps; backward passes the merged output and log-sum-exp to each call (ops/flash_attention.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.autograd.function import once_differentiable

from tepo_megatron.actor.attention_layout import AttentionLayout, spread
from tepo_megatron.actor.packed_attention import PackedLayout
from tepo_megatron.base.errors import ConfigError
from tepo_megatron.ops.flash_attention import AttendedKeys, flash_attention_of, merge, packed_flash_of


@dataclass(frozen=True)
class _Call:
    """One attention call: n = `sequences`, `length` queries each, and the first `end` of the `stride` key rows of each."""

    first_query: int
    sequences: int
    length: int
    first_key: int
    stride: int
    end: int
    keys: AttendedKeys

    def of_queries(self, x: Tensor) -> Tensor:
        """Return a view of the call's queries: [rows, H, ...] -> [n, H, length, ...]."""
        rows = x.narrow(0, self.first_query, self.sequences * self.length)
        return rows.unflatten(0, (self.sequences, self.length)).transpose(1, 2)

    def of_keys(self, x: Tensor) -> Tensor:
        """Return a view of the call's keys or values: [rows, K, D] -> [n, K, end, D]."""
        rows = x.narrow(0, self.first_key, self.sequences * self.stride)
        return rows.unflatten(0, (self.sequences, self.stride))[:, : self.end].transpose(1, 2)


def _own_calls(layout: AttentionLayout) -> Iterator[_Call]:
    """Yield the calls of each piece over itself. Rows of queries and keys are the layout's slots."""
    query = key = 0
    for bucket in layout.buckets:
        stride = bucket.total * bucket.chunk
        for piece, mask in zip(bucket.pieces, bucket.masks, strict=True):
            end, keys = (piece + 1) * bucket.chunk, AttendedKeys(causal=mask is None, mask=mask)
            yield _Call(query, bucket.sequences, bucket.chunk, key, stride, end, keys)
            query += bucket.sequences * bucket.chunk
        key += bucket.key_rows


def _prompt_calls(layout: AttentionLayout) -> Iterator[_Call]:
    """Yield the calls of responses over their prompt. Rows of queries are local tokens, rows of keys the layout's slots."""
    for p in layout.prompts:
        yield _Call(p.first_query, 1, p.queries, p.first_key, p.keys, p.keys, AttendedKeys())


def shared_attention(query_S: Tensor, key_T: Tensor, value_T: Tensor, layout: AttentionLayout, scale: float | None) -> Tensor:
    """Return attention [S, H D] in which responses attend to their shared prompts.

    Gradients: to queries, keys and values. Autograd refuses second derivatives.

    Args:
        query_S: [S, H, D], local queries.
        key_T: [T, K, D], keys of all CP ranks.
        value_T: [T, K, D], their values.
        scale: Factor of the scores. None: 1 / sqrt(D).
    """
    output_S: Tensor = _SharedAttention.apply(query_S, key_T, value_T, layout, scale)
    return output_S.flatten(1)


class _SharedAttention(torch.autograd.Function):
    """The autograd function of `shared_attention`. It saves queries, keys, values, the output and its log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, query_S: Tensor, key_T: Tensor, value_T: Tensor, layout: AttentionLayout, scale: float | None
    ) -> Tensor:
        flash = flash_attention_of(query_S.device)
        queries, keys, values = layout.in_slots(query_S, key_T, value_T)
        parts = [
            flash.forward(call.of_queries(queries), call.of_keys(keys), call.of_keys(values), call.keys, scale)
            for call in _own_calls(layout)
        ]
        output_S, lse_S = (
            torch.cat([part.transpose(1, 2).flatten(0, 1) for part in outputs]).index_select(0, layout.query_slot_S)
            for outputs in zip(*parts, strict=True)
        )
        for call in _prompt_calls(layout):
            part = flash.forward(call.of_queries(query_S), call.of_keys(keys), call.of_keys(values), call.keys, scale)
            output, lse = call.of_queries(output_S), call.of_queries(lse_S)
            merged, whole = merge(output, lse, *part)
            output.copy_(merged)
            lse.copy_(whole)
        ctx.save_for_backward(query_S, key_T, value_T, output_S, lse_S)
        ctx.layout, ctx.scale = layout, scale
        return output_S

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_S: Tensor) -> tuple[Tensor | None, ...]:
        query_S, key_T, value_T, output_S, lse_S = ctx.saved_tensors
        layout, scale, flash = ctx.layout, ctx.scale, flash_attention_of(query_S.device)
        queries, keys, values = layout.in_slots(query_S, key_T, value_T)
        grads, outputs, lses = (spread(x, layout.query_slot_S, layout.query_rows) for x in (grad_S, output_S, lse_S))
        grad_queries, grad_keys, grad_values = (torch.zeros_like(x) for x in (queries, keys, values))

        def add(call: _Call, q: Tensor, grad_q: Tensor, grad: Tensor, output: Tensor, lse: Tensor) -> None:
            """Add the gradients of one call. All tensor arguments have its query rows."""
            q, grad, output, lse = (call.of_queries(x) for x in (q, grad, output, lse))
            gradients = flash.backward(grad, q, call.of_keys(keys), call.of_keys(values), output, lse, call.keys, scale)
            for total, part in zip(
                (call.of_queries(grad_q), call.of_keys(grad_keys), call.of_keys(grad_values)), gradients, strict=True
            ):
                total.add_(part)

        for call in _own_calls(layout):
            add(call, queries, grad_queries, grads, outputs, lses)
        grad_query_S = grad_queries.index_select(0, layout.query_slot_S)
        for call in _prompt_calls(layout):
            add(call, query_S, grad_query_S, grad_S, output_S, lse_S)
        grad_key_T, grad_value_T = (x.index_select(0, layout.key_slot_T) for x in (grad_keys, grad_values))
        return grad_query_S, grad_key_T, grad_value_T, None, None


class SDPACoreAttention(MegatronModule):
    """Causal self-attention as `core_attention` of Megatron's layer specs, for grouped queries, packed sequences and CP.

    Under CP every rank holds zigzag chunks of each sequence (ops/context_parallel.py). Keys and values of all ranks are
    gathered; each of the rank's two chunks of queries then attends to the sequence up to its own end. Collectives: forward one
    all-gather of keys and values over CP; backward one reduce-scatter over CP. None without CP. Raises ConfigError at
    construction for attention that is not causal self-attention, dropout, sliding windows or attention sinks.
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
        """Take the arguments that Megatron passes. softmax_scale None: 1 / sqrt(D). cp_comm_type has no effect here."""
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
        """Return the attention output: [S, H D] for packed sequences (THD), else [s, b, H D].

        Args:
            query: [S, H, D] if packed, else [s, b, H, D].
            key: [S, K, D] if packed, else [s, b, K, D].
        Raises:
            ValueError: The lengths do not add up to the tokens, 2 cp does not divide a length, or there is a mask or a bias.
        """
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("SDPACoreAttention is causal by position and takes neither mask nor bias; pass None")
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            return self._attend(query, key, value, self._packed_layout(packed_seq_params, query))
        length, batch = query.shape[:2]
        query, key, value = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        layout = self._layout([length * self.cp_group.size()] * batch, query)
        return self._attend(query, key, value, layout).view(batch, length, -1).transpose(0, 1)

    def _layout(
        self, lengths: Sequence[int], query_S: Tensor, starts: Sequence[int] | None = None
    ) -> AttentionLayout | PackedLayout:
        """Return the layout of sequences, for the kernel that takes these queries."""
        if (kernel := packed_flash_of(query_S)) is not None:
            return PackedLayout.of(kernel, lengths, self.cp_group, query_S.device, starts)
        return AttentionLayout.of(lengths, self.cp_group, query_S.device, starts)

    def _packed_layout(self, params: PackedSeqParams, query_S: Tensor) -> AttentionLayout | PackedLayout:
        """Return the layout of the microbatch. The first layer stores it on `params`: reading `cu_seqlens` waits for a GPU."""
        layout: AttentionLayout | PackedLayout | None = getattr(params, "sdpa_layout", None)
        if layout is None:
            cu = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
            lengths = [b - a for a, b in itertools.pairwise(cu.tolist())]
            if sum(lengths) != query_S.size(0) * self.cp_group.size():
                raise ValueError(
                    f"cu_seqlens describe {sum(lengths)} tokens over all context-parallel ranks, but each of the "
                    f"{self.cp_group.size()} ranks holds {query_S.size(0)}"
                )
            layout = self._layout(lengths, query_S, getattr(params, "starts", None))
            params.sdpa_layout = layout
        return layout

    def _attend(self, query_S: Tensor, key_S: Tensor, value_S: Tensor, layout: AttentionLayout | PackedLayout) -> Tensor:
        """Return attention [S, H D] of local queries [S, H, D], keys [S, K, D] and values [S, K, D]."""
        key_T, value_T = self._gather(key_S, value_S)
        if isinstance(layout, PackedLayout):
            return layout.attend(query_S, key_T, value_T, self.softmax_scale)
        if layout.prompts:
            return shared_attention(query_S, key_T, value_T, layout, self.softmax_scale)
        queries, keys, values = layout.in_slots(query_S, key_T, value_T)
        outputs: list[Tensor] = []
        key_rows = [b.key_rows for b in layout.buckets]
        query_parts = queries.split([b.query_rows for b in layout.buckets])
        for bucket, q, k, v in zip(layout.buckets, query_parts, keys.split(key_rows), values.split(key_rows), strict=True):
            outputs += bucket.attend(q, k, v, self.softmax_scale)
        return torch.cat(outputs).index_select(0, layout.query_slot_S).flatten(1)

    def _gather(self, key_S: Tensor, value_S: Tensor) -> tuple[Tensor, Tensor]:
        """Gather keys and values of all CP ranks, rank after rank. Collectives: forward all-gather, backward reduce-scatter."""
        if self.cp_group.size() == 1:
            return key_S, value_S
        both_T = gather_from_sequence_parallel_region(torch.cat((key_S, value_S), dim=-1), group=self.cp_group)
        key_T, value_T = both_T.split((key_S.size(-1), value_S.size(-1)), dim=-1)
        return key_T, value_T


def _check_supported(
    config: TransformerConfig, layer_number: int, mask_type: AttnMaskType, attention_type: str, dropout: float
) -> None:
    """Raise ConfigError for attention that `SDPACoreAttention` does not compute. The message names what the layer asks for."""
    refused = (
        ("attn_mask_type", mask_type.name, mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal)),
        ("attention_type", attention_type, attention_type != "self"),
        ("attention_dropout", dropout, dropout),
        ("window_size", config.window_size, config.window_size is not None),
        ("softmax_type", config.softmax_type, config.softmax_type != "vanilla"),
    )
    if what := ", ".join(f"{key}={value}" for key, value, is_refused in refused if is_refused):
        raise ConfigError(
            f"model.attention=sdpa computes causal self-attention only; layer {layer_number} asks for {what}; use "
            "model.attention=te on platform=cuda"
        )
