"""Log-prob and entropy of tokens whose logits are split over the tensor-parallel axis.

One pass over the local logits gives four numbers a row; one all-gather of those shares them; every rank combines the same
numbers in the same order, so all ranks hold the same bits and backward needs no collective.

Layout: R rows; V local vocabulary columns (tensor-parallel rank r owns columns [r * V, (r + 1) * V) of the vocabulary).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tepo_megatron.types import TokenStats

# Rows are worked on in chunks whose fp32 copy stays near this size, so that no [R, V] fp32 tensor is ever held.
CHUNK_BYTES = 32 * 2**20

# The maximum of a rank whose columns are all padding: finite, so that its weight exp(m - max) is 0 and never nan.
_NO_COLUMNS = -1e30


def token_stats(
    logits: Tensor,
    labels_R: Tensor,
    temperature: float,
    group: dist.ProcessGroup | None,
    vocab_size: int | None = None,
) -> TokenStats:
    """Log-prob of each label and entropy of each row under softmax(logits / temperature).

    Args:
        logits: [R, V] this rank's columns of the vocabulary; bf16, fp16, fp32 or fp64. Not modified.
        labels_R: int64, global token ids in [0, vocab_size).
        temperature: > 0.
        group: tensor-parallel group; None means one rank (never the world).
        vocab_size: columns from here on are padding and get no probability; None: all columns are real.

    Returns:
        TokenStats in fp32 (fp64 for fp64 logits), nats, the same bits on every rank of `group`.

    Gradients: with respect to `logits` only, through both outputs:
        d logprob / d z_j = [j = label] - p_j,  d entropy / d z_j = -p_j (ln p_j + H)   (Eq. 1 of the paper lacks the minus).

    Collectives: forward one all-gather of [R, 4] over `group` (none without a group); backward none.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if logits.dim() != 2 or labels_R.shape != logits.shape[:1]:
        raise ValueError(f"expected logits [R, V] and labels [R], got {tuple(logits.shape)} and {tuple(labels_R.shape)}")
    logprob_R, entropy_R = _TokenStats.apply(logits, labels_R, temperature, group, vocab_size)
    return TokenStats(logprob_R, entropy_R)


class _TokenStats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels_R: Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
        vocab_size: int | None,
    ) -> tuple[Tensor, Tensor]:
        rank = group.rank() if group is not None else 0
        first_column = rank * logits.size(1)
        columns = logits.size(1) if vocab_size is None else min(max(vocab_size - first_column, 0), logits.size(1))
        local_labels_R = labels_R - first_column
        statistics = _gather(_local_statistics(logits[:, :columns], local_labels_R, temperature), group)
        logprob_R, log_normalizer_R, entropy_R = _combine(statistics)
        ctx.save_for_backward(logits, local_labels_R, log_normalizer_R, entropy_R)
        ctx.columns, ctx.temperature = columns, temperature
        return logprob_R, entropy_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob_R: Tensor, grad_entropy_R: Tensor) -> tuple[Tensor | None, ...]:
        logits, local_labels_R, log_normalizer_R, entropy_R = ctx.saved_tensors
        columns = ctx.columns
        grad = torch.empty_like(logits)
        grad[:, columns:] = 0
        if columns:
            owned_R, column_R = _owned(local_labels_R, columns)
            for rows in _chunks(logits):
                log_p = _scaled(logits[rows, :columns], ctx.temperature) - log_normalizer_R[rows, None]
                p = log_p.exp()
                # -g_logprob p - g_entropy p (ln p + H)
                g = log_p.add_(entropy_R[rows, None]).mul_(grad_entropy_R[rows, None]).add_(grad_logprob_R[rows, None])
                g.mul_(p).neg_()
                g.scatter_add_(1, column_R[rows, None], (grad_logprob_R[rows] * owned_R[rows])[:, None])
                grad[rows, :columns] = g.div_(ctx.temperature).to(grad.dtype)
        return grad, None, None, None, None


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Slices of rows whose fp32 copy stays near CHUNK_BYTES."""
    rows = max(1, CHUNK_BYTES // (4 * max(1, logits.size(1))))
    return (slice(at, at + rows) for at in range(0, logits.size(0), rows))


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """logits / temperature as a new tensor, in fp32 at least (fp64 passes through)."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(dtype, copy=True).div_(temperature)


def _owned(local_labels_R: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Whether this rank holds the label's column, and that column (0 where it does not)."""
    owned_R = (local_labels_R >= 0) & (local_labels_R < columns)
    return owned_R, torch.where(owned_R, local_labels_R, 0)


def _local_statistics(logits: Tensor, local_labels_R: Tensor, temperature: float) -> Tensor:
    """[R, 4] of z = logits / temperature over the local columns: max m; sum exp(z - m); sum (z - m) exp(z - m); z of the label.

    The third sum is taken of z - m, not of z: the entropy is a small difference, and sum z exp(z - m) would lose
    5e-6 to 3e-5 of it in fp32.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    out = torch.zeros(logits.size(0), 4, dtype=dtype, device=logits.device)
    columns = logits.size(1)
    if columns == 0:
        out[:, 0] = _NO_COLUMNS
        return out
    owned_R, column_R = _owned(local_labels_R, columns)
    for rows in _chunks(logits):
        z = _scaled(logits[rows], temperature)
        out[rows, 3] = z.gather(1, column_R[rows, None]).squeeze(1) * owned_R[rows]
        m = z.amax(1, keepdim=True)
        z.sub_(m)
        e = z.exp()
        out[rows, 0] = m.squeeze(1)
        out[rows, 1] = e.sum(1)
        out[rows, 2] = e.mul_(z).sum(1)
    return out


def _gather(statistics: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[R, 4] of every rank as [ranks, R, 4]. R is the same on all ranks, so all of them skip an empty gather."""
    if group is None or group.size() == 1 or statistics.size(0) == 0:
        return statistics.unsqueeze(0)
    out = statistics.new_empty(group.size() * statistics.size(0), 4)
    dist.all_gather_into_tensor(out, statistics, group=group)
    return out.view(group.size(), -1, 4)


def _combine(statistics: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[ranks, R, 4] -> log-prob of the label, log-normalizer ln sum exp(z), entropy; each [R]."""
    m, s, u, label = statistics.unbind(-1)
    top_R = m.amax(0)
    shift = m - top_R
    weight = shift.exp()
    total_R = (weight * s).sum(0)
    # sum (z - top) exp(z - top), from each rank's sum around its own maximum
    moment_R = (weight * (u + shift * s)).sum(0)
    log_total_R = total_R.log()
    # (label - top) first: both are exact logits, so logits shifted by a constant lose nothing
    return (label.sum(0) - top_R) - log_total_R, top_R + log_total_R, log_total_R - moment_R / total_R
