"""Attention of a packed microbatch in which responses share prompts.

Suffixes and dimensions are those of attention_layout.py. The attention of each token to its own piece is computed in the
layout's buckets, as without sharing. The attention of responses to their prompt is computed in one call per prompt, with the
queries of all its responses. Both are merged by their log-sum-exps; backward passes the merged output and log-sum-exp to each
call (ops/flash_attention.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tepo_megatron.actor.attention_layout import AttentionLayout, spread
from tepo_megatron.ops.flash_attention import AttendedKeys, flash_attention_of, merge


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
            torch.cat([part.transpose(1, 2).flatten(0, 1) for part in found]).index_select(0, layout.query_slot_S)
            for found in zip(*parts, strict=True)
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
            found = flash.backward(grad, q, call.of_keys(keys), call.of_keys(values), output, lse, call.keys, scale)
            for total, part in zip(
                (call.of_queries(grad_q), call.of_keys(grad_keys), call.of_keys(grad_values)), found, strict=True
            ):
                total.add_(part)

        for call in _own_calls(layout):
            add(call, queries, grad_queries, grads, outputs, lses)
        grad_query_S = grad_queries.index_select(0, layout.query_slot_S)
        for call in _prompt_calls(layout):
            add(call, query_S, grad_query_S, grad_S, output_S, lse_S)
        grad_key_T, grad_value_T = (x.index_select(0, layout.key_slot_T) for x in (grad_keys, grad_values))
        return grad_query_S, grad_key_T, grad_value_T, None, None
