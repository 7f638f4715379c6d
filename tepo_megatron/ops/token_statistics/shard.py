"""Combine the statistics of all vocabulary shards into log-prob and entropy, and derive the logits' gradient from theirs.

Under truncated sampling the softmax is over the sampling mask of each row, whose masks are recomputed from the logits where the
engine does not give them. Layout: R rows; W local columns, padding included, of which C are real; K ids of a row's sampling
mask. Of `candidates`, C is their number on a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.base.types import MASK_TIES, MOST_CANDIDATES, NO_TOKEN, RecomputedMasks, Truncation
from tepo_megatron.ops.token_statistics import NO_COLUMNS, Coefficients, RowKernels, compute_dtype


def masked_statistics(logits: Tensor, mask_RK: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return top = max x, sum exp(d) and sum d exp(d) over this rank's columns of each row's mask, d = (x - top) / temperature.

    Args:
        logits: [R, W].
        mask_RK: int64 local columns, NO_TOKEN where another rank has the column.
    Returns:
        Three tensors [R] in `compute_dtype(logits)`. Rows without a local column have NO_COLUMNS, 0 and 0.
    """
    mine_RK = mask_RK >= 0
    x_RK = logits.gather(1, mask_RK.clamp(min=0)).to(compute_dtype(logits)).masked_fill(~mine_RK, NO_COLUMNS)
    top_R = x_RK.amax(1)
    d_RK = torch.where(mine_RK, (x_RK - top_R[:, None]) / temperature, 0)
    e_RK = torch.where(mine_RK, d_RK.exp(), 0)
    return top_R, e_RK.sum(1), (e_RK * d_RK).sum(1)


def write_masked_gradient(
    logits: Tensor, mask_RK: Tensor, column_R: Tensor, temperature: float, row: Coefficients, out: Tensor
) -> None:
    """Write the gradient of the logits into `out`: 0 at all columns but those of the row's mask.

    Args:
        logits: [R, W].
        mask_RK: int64 local columns, NO_TOKEN where another rank has the column.
        column_R: int64, the label's column. It may be any column where `row.label` is 0.
        out: [R, W], written in full. It may be `logits`.
    """
    columns_RK, mine_RK = mask_RK.clamp(min=0), mask_RK >= 0
    d_RK = (logits.gather(1, columns_RK).to(row.top.dtype) - row.top[:, None]) / temperature
    weight_RK = row.constant[:, None] if row.slope is None else row.constant[:, None] + row.slope[:, None] * d_RK
    # the label's two terms are added before they are rounded to the type of `out`
    g_RK = weight_RK * d_RK.exp() + torch.where(mask_RK == column_R[:, None], row.label[:, None], 0)
    out.zero_()
    out.scatter_add_(1, columns_RK, torch.where(mine_RK, g_RK, 0).to(out.dtype))


def candidates(logits: Tensor, columns: int, first: int, truncation: Truncation) -> Tensor:
    """Return [R, 2C]: the C largest logits of this rank's real columns, and their ids.

    Ids are exact in fp32 below 2^24. Candidates that the rank lacks are NO_COLUMNS with id NO_TOKEN. `logits`: [R, W], this
    rank's columns.
    """
    most = MOST_CANDIDATES if truncation.top_k < 0 else min(MOST_CANDIDATES, truncation.top_k + MASK_TIES)
    out = torch.full((logits.size(0), 2 * most), float(NO_TOKEN), dtype=compute_dtype(logits), device=logits.device)
    out[:, :most] = NO_COLUMNS
    if columns and logits.size(0):
        top = logits[:, :columns].topk(min(most, columns), dim=1)
        out[:, : top.values.size(1)] = top.values
        out[:, most : most + top.values.size(1)] = top.indices + first
    return out


def recomputed_masks(offered: Tensor, labels_R: Tensor, temperature: float, truncation: Truncation) -> RecomputedMasks:
    """Return each row's sampling mask. Tokens whose logits equal that of the last of top-k are kept too.

    `labels_R`: int64, global ids of the sampled tokens.
    """
    most = (offered.size(2) - 2) // 2
    x_RC, ids_RC = (part.transpose(0, 1).flatten(1) for part in (offered[:, :, 2 : 2 + most], offered[:, :, 2 + most :].long()))
    ids_RC, order_RC = ids_RC.sort(dim=1)
    x_RC, order_RC = x_RC.gather(1, order_RC).sort(dim=1, descending=True, stable=True)
    x_RC, ids_RC = x_RC[:, :most], ids_RC.gather(1, order_RC)[:, :most]
    p_RC = ((x_RC - x_RC[:, :1]) / temperature).exp()
    kept_RC = ids_RC != NO_TOKEN
    if 0 < truncation.top_k < most:
        kept_RC &= x_RC >= x_RC[:, truncation.top_k - 1, None]
    if truncation.top_p < 1:
        if truncation.renormalizes and truncation.top_k > 0:
            whole_R = torch.where(kept_RC, p_RC, 0).sum(1)
        else:
            whole_R = (((offered[:, :, 0] - x_RC[:, 0]) / temperature).exp() * offered[:, :, 1]).sum(0)
        before_RC = p_RC.cumsum(1) - p_RC
        kept_RC &= before_RC < truncation.top_p * whole_R[:, None]
        kept_RC[:, 0] = True
    outside_R = ~((ids_RC == labels_R[:, None]) & kept_RC).any(1)
    last_RC = torch.where(outside_R, labels_R, NO_TOKEN)[:, None]
    unlimited = truncation.top_k < 0 or truncation.top_k > most
    cut_R = kept_RC[:, -1] if unlimited else torch.zeros_like(outside_R)
    return RecomputedMasks(torch.cat((torch.where(kept_RC, ids_RC, NO_TOKEN), last_RC), 1), outside_R, cut_R)


Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class VocabShard:
    """This rank's shard of the vocabulary, and the labels that lie in it."""

    columns: int  # number of real (not padding) columns on this rank
    owned_R: Tensor  # bool, whether the label is one of them
    column_R: Tensor  # int64, the label's local column, 0 if it is not owned
    # int64, local columns of the row's sampling mask, NO_TOKEN for those of other ranks. None: all columns count.
    mask_RK: Tensor | None = None
    first: int = 0  # global id of the first column

    @classmethod
    def of(
        cls,
        width: int,
        labels_R: Tensor,
        group: dist.ProcessGroup | None,
        vocab_size: int | None,
        mask_RK: Tensor | None = None,
    ) -> VocabShard:
        """Return the shard of this rank.

        Args:
            labels_R: int64, global token ids.
            group: Tensor-parallel group. None: one rank.
            vocab_size: Real columns over all ranks. None: there is no padding.
            mask_RK: int64, global ids of the row's sampling mask, filled up with NO_TOKEN. None: all columns count.
        """
        first = (group.rank() if group is not None else 0) * width
        columns = width if vocab_size is None else min(max(vocab_size - first, 0), width)
        local_R = labels_R - first
        owned_R = (local_R >= 0) & (local_R < columns)
        if mask_RK is not None:
            mask_RK = torch.where((mask_RK >= first) & (mask_RK < first + columns), mask_RK - first, NO_TOKEN)
        return cls(columns, owned_R, torch.where(owned_R, local_R, 0), mask_RK, first)

    def rows(self, rows: slice) -> VocabShard:
        """Return the shard for some rows."""
        mask = None if self.mask_RK is None else self.mask_RK[rows]
        return VocabShard(self.columns, self.owned_R[rows], self.column_R[rows], mask, self.first)


class Normalizer(NamedTuple):
    """The normalizer of softmax(logits / temperature) over all ranks, with d = (logit - top) / temperature. All [R]."""

    top: Tensor
    total: Tensor  # sum exp(d)
    mean: Tensor  # expectation of d under the softmax


def local_statistics(
    kernels: RowKernels, logits: Tensor, shard: VocabShard, temperature: float, recompute: Truncation | None = None
) -> Tensor:
    """Return [R, 4] over this rank's real columns: largest logit, sum exp(d), sum d exp(d), the label's logit (0 if not owned).

    The third sum is taken of d, not of the logits: the entropy is a small difference of sums, and would lose 5e-6 to 3e-5 in
    fp32. With a sampling mask, only its columns count. With `recompute` [R, 6 + 2C]: the first two over all columns, and the
    `candidates`, follow.

    Args:
        logits: [R, W], this rank's columns.
        recompute: Truncation whose masks are to be recomputed. None: no masks are.
    """
    out = torch.zeros(logits.size(0), 4, dtype=compute_dtype(logits), device=logits.device)
    if shard.columns == 0:
        out[:, 0] = NO_COLUMNS
    elif logits.size(0):
        if shard.mask_RK is not None:
            parts = masked_statistics(logits, shard.mask_RK, temperature)
        else:
            parts = kernels.statistics(logits, shard.columns, temperature)
        for column, x in enumerate(parts):
            out[:, column] = x
        out[:, 3] = torch.where(shard.owned_R, logits.gather(1, shard.column_R[:, None]).squeeze(1), 0)
    if recompute is None:
        return out
    whole = out[:, :2]
    if shard.mask_RK is not None:
        whole = local_statistics(kernels, logits, replace(shard, mask_RK=None), temperature)[:, :2]
    return torch.cat((out, whole, candidates(logits, shard.columns, shard.first, recompute)), dim=1)


def gather(statistics: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Gather the local statistics [R, 4] of every rank as [ranks, R, 4]. They may have further columns.

    Collectives: one all-gather over `group`, none with one rank or R = 0. R is the same on all ranks, so all of them skip it.

    Args:
        statistics: [R, 4] of this rank.
        group: Tensor-parallel group. None: one rank.
    """
    if group is None or group.size() == 1 or statistics.size(0) == 0:
        return statistics.unsqueeze(0)
    rows, columns = statistics.shape
    out = statistics.new_empty(group.size() * rows, columns)
    dist.all_gather_into_tensor(out, statistics, group=group)
    return out.view(group.size(), rows, columns)


def combine(statistics: Tensor, temperature: float) -> tuple[Tensor, Tensor, Normalizer]:
    """Return the log-prob of the label [R], the entropy [R], both in nats, and the normalizer for backward."""
    tops, totals, moments, label = statistics[..., :4].unbind(-1)
    top_R = tops.amax(0)
    shift = (tops - top_R) / temperature
    weight = shift.exp()
    total_R = (weight * totals).sum(0)
    # each rank's sum of d exp(d) was taken relative to its own maximum
    mean_R = (weight * (moments + shift * totals)).sum(0) / total_R
    log_total_R = total_R.log()
    # (label - top) first: both are exact logits, so a constant shift of all logits costs no precision
    logprob_R = (label.sum(0) - top_R) / temperature - log_total_R
    return logprob_R, log_total_R - mean_R, Normalizer(top_R, total_R, mean_R)


def masks(statistics: Tensor, labels_R: Tensor, temperature: float, recompute: Truncation | None) -> RecomputedMasks | None:
    """Return the recomputed sampling masks; None if none were asked for.

    Args:
        labels_R: int64, global token ids.
        recompute: The truncation. None: no masks.
    """
    return None if recompute is None else recomputed_masks(statistics[..., 4:], labels_R, temperature, recompute)


def coefficients(
    normalizer: Tensors, shard: VocabShard, grad_logprob_R: Tensor | None, grad_entropy_R: Tensor | None, temperature: float
) -> Coefficients:
    """Return the coefficients of each row's gradient.

    The gradient is (g_logprob ([j = label] - p) - g_entropy p (ln p + H)) / temperature, with p = exp(d) / total and
    ln p + H = d - mean.

    Args:
        grad_logprob_R: Gradient of the log-prob. None: 0. At least one of the two gradients is given.
        grad_entropy_R: Gradient of the entropy. None: 0.
    """
    top_R, total_R, mean_R = normalizer
    scale_R = -1 / (total_R * temperature)
    label_R = torch.zeros_like(total_R) if grad_logprob_R is None else grad_logprob_R * shard.owned_R / temperature
    constant_R = torch.zeros_like(total_R) if grad_logprob_R is None else grad_logprob_R * scale_R
    if grad_entropy_R is None:
        return Coefficients(top_R, constant_R, None, label_R)
    slope_R = grad_entropy_R * scale_R
    return Coefficients(top_R, constant_R - slope_R * mean_R, slope_R, label_R)


def write_gradient(
    kernels: RowKernels, logits: Tensor, shard: VocabShard, temperature: float, row: Coefficients, out: Tensor
) -> None:
    """Write the gradient of the logits into `out`, 0 at padding, and record for autograd that `out` has changed.

    Args:
        logits: [R, W], this rank's columns.
        out: [R, W]. It may be `logits`.
    """
    if shard.columns == 0:
        out.zero_()
    elif logits.size(0) and shard.mask_RK is not None:
        write_masked_gradient(logits, shard.mask_RK, shard.column_R, temperature, row, out)
    elif logits.size(0):
        kernels.gradient(logits, shard.columns, shard.column_R, temperature, row, out)
    torch.autograd.graph.increment_version(out)  # a kernel's stores are invisible to autograd
