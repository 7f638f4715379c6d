"""Attention of a packed microbatch by a kernel that takes packed sequences, so that nothing is padded or copied into slots.

Suffixes and dimensions are those of attention_layout.py. The first call is that of each piece over its sequence up to its own
end. Where responses share prompts, a second one is that of the responses over their prompts; both are merged by their
log-sum-exps (ops/flash_attention.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tepo_megatron.actor.attention_layout import shared_prompts
from tepo_megatron.ops.context_parallel import concatenated_ranges, zigzag_chunks, zigzag_rows
from tepo_megatron.ops.flash_attention import PackedCall, PackedFlash, merge


@dataclass(frozen=True)
class PackedLayout:
    """The calls of a microbatch: of all local queries, then of those that attend to a shared prompt, if there are any."""

    kernel: PackedFlash
    calls: tuple[PackedCall, ...]

    @classmethod
    def of(
        cls,
        kernel: PackedFlash,
        lengths: Sequence[int],
        cp_group: dist.ProcessGroup,
        device: torch.device,
        starts: Sequence[int] | None = None,
    ) -> "PackedLayout":
        """Return this rank's calls. The lengths are padded, over all CP ranks; `starts` is that of a PackedMicrobatch."""
        cp_size, pieces = cp_group.size(), torch.tensor(zigzag_chunks(cp_group.size(), cp_group.rank()))
        lengths_G = torch.tensor(lengths)
        cu_seqlens = torch.cat((lengths_G.new_zeros(1), lengths_G.cumsum(0)))
        row_T = None  # of each token of the microbatch, where keys of several ranks lie one rank after another
        if cp_size > 1:
            row_T = torch.cat([zigzag_rows(cu_seqlens, cp_size, rank) for rank in range(cp_size)]).argsort()
        chunk_G = lengths_G // (1 if cp_size == 1 else 2 * cp_size)
        queries = chunk_G.repeat_interleave(len(pieces))
        first_key = cu_seqlens[:-1].repeat_interleave(len(pieces))
        keys = (chunk_G[:, None] * (pieces + 1)).flatten()
        rows = None if row_T is None else row_T[concatenated_ranges(first_key, keys)]
        calls = [_call(None, rows, queries, keys, True, device)]
        local_cu = (cu_seqlens // cp_size).tolist()
        if prompts := () if starts is None else shared_prompts(starts, local_cu, cu_seqlens.tolist()):
            first = torch.tensor([[p.first_query, p.first_key] for p in prompts])
            size = torch.tensor([[p.queries, p.keys] for p in prompts])
            query_rows, key_rows = (concatenated_ranges(first[:, i], size[:, i]) for i in range(2))
            key_rows = key_rows if row_T is None else row_T[key_rows]
            calls.append(_call(query_rows, key_rows, size[:, 0], size[:, 1], False, device))
        return cls(kernel, tuple(calls))

    def attend(self, query_S: Tensor, key_T: Tensor, value_T: Tensor, scale: float | None) -> Tensor:
        """Return attention [S, H D]. Gradients: to queries, keys and values. Autograd refuses second derivatives.

        Args:
            query_S: [S, H, D], local queries.
            key_T: [T, K, D], keys of all CP ranks.
            value_T: [T, K, D], their values.
            scale: Factor of the scores. None: 1 / sqrt(D).
        """
        output_S: Tensor = _PackedAttention.apply(query_S, key_T, value_T, self, scale)
        return output_S.flatten(1)


def _call(
    query_rows: Tensor | None, key_rows: Tensor | None, queries: Tensor, keys: Tensor, causal: bool, device: torch.device
) -> PackedCall:
    """Return a call with its tensors on the device. `queries` and `keys` are the lengths; those of 0 are left out."""
    queries, keys = queries[queries > 0], keys[queries > 0]
    cu_q, cu_k = (torch.cat((n.new_zeros(1), n.cumsum(0))).int().to(device) for n in (queries, keys))
    longest = [max(n.tolist(), default=0) for n in (queries, keys)]
    rows = [None if x is None else x.to(device) for x in (query_rows, key_rows)]
    return PackedCall(rows[0], rows[1], cu_q, cu_k, longest[0], longest[1], causal)


def _chosen(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def _add_to(total: Tensor, rows: Tensor | None, part: Tensor) -> None:
    """Add to these rows of a tensor; a row may be there several times."""
    if rows is None:
        total.add_(part)
    else:
        total.index_add_(0, rows, part)


class _PackedAttention(torch.autograd.Function):
    """The autograd function of `PackedLayout.attend`. It saves queries, keys, values, the output and its log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, query_S: Tensor, key_T: Tensor, value_T: Tensor, layout: PackedLayout, scale: float | None) -> Tensor:
        own, *others = layout.calls
        key, value = (_chosen(x, own.key_rows) for x in (key_T, value_T))
        output_S, lse = layout.kernel.forward(query_S, key, value, own, scale)
        for call in others:
            rows = call.query_rows
            assert rows is not None
            key, value = (_chosen(x, call.key_rows) for x in (key_T, value_T))
            more, more_lse = layout.kernel.forward(query_S.index_select(0, rows), key, value, call, scale)
            merged, whole = merge(output_S.index_select(0, rows), lse.index_select(1, rows).T, more, more_lse.T)
            output_S.index_copy_(0, rows, merged)
            lse.index_copy_(1, rows, whole.T)
        ctx.save_for_backward(query_S, key_T, value_T, output_S, lse)
        ctx.layout, ctx.scale = layout, scale
        return output_S

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_S: Tensor) -> tuple[Tensor | None, ...]:
        query_S, key_T, value_T, output_S, lse = ctx.saved_tensors
        totals: list[Tensor] | None = None
        for call in ctx.layout.calls:
            rows = call.query_rows
            grad, query, output = (_chosen(x, rows) for x in (grad_S, query_S, output_S))
            key, value = (_chosen(x, call.key_rows) for x in (key_T, value_T))
            of_rows = lse if rows is None else lse.index_select(1, rows)
            parts = ctx.layout.kernel.backward(grad, query, key, value, output, of_rows, call, ctx.scale)
            if totals is None and call.key_rows is None:
                totals = list(parts)
                continue
            totals = totals or [torch.zeros_like(x) for x in (query_S, key_T, value_T)]
            for total, part_rows, part in zip(totals, (rows, call.key_rows, call.key_rows), parts, strict=True):
                _add_to(total, part_rows, part)
        assert totals is not None
        return *totals, None, None
