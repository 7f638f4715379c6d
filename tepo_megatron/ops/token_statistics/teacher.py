"""The exact KL to a teacher over the whole vocabulary, from the logits of both, chunk by chunk.

With d = (x - top) / temperature of the student's logits, t the same of the teacher's, p = exp(d) / Z and q = exp(t) / Z_t:

    KL(p || q) = E_p[d] - ln Z - E_p[t] + ln Z_t
    d KL / d x_j = p_j (d_j - ln Z - t_j + ln Z_t - KL) / temperature

Each rank sums over its own columns, relative to its own maxima; the sums of all ranks travel in the one all-gather that the
student's statistics take anyway. The teacher gets no gradient.

Layout: R rows; C real columns of this rank's vocabulary shard, W with padding; H hidden size of the teacher.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tepo_megatron.ops.token_statistics import NO_COLUMNS, Coefficients, compute_dtype

CHUNK_BYTES = 2**22  # of each fp32 buffer on the way


@dataclass(frozen=True)
class TeacherRows:
    """The teacher's side of some response rows."""

    hidden_R: Tensor  # [R, H], the input of its output layer, the same on every tensor-parallel rank
    weight: Tensor  # [W, H], this rank's rows of its output layer's weight, split as the student's


class TeacherNormalizer(NamedTuple):
    """The numbers over all ranks that backward needs of each row. All [R]. `offset`: ln Z_t - ln Z - KL."""

    top: Tensor
    offset: Tensor


def teacher_statistics(
    logits: Tensor, teacher_logits: Tensor, top_R: Tensor, columns: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the teacher's largest logit, sum exp(t), and sum exp(d) t over this rank's real columns. All [R].

    Args:
        logits: [R, W], the student's.
        teacher_logits: [R, W].
        top_R: The student's largest logit on this rank.
    """
    dtype = compute_dtype(logits)
    top, total, cross = logits.new_zeros(3, logits.size(0), dtype=dtype).unbind(0)
    if columns == 0:
        return top.fill_(NO_COLUMNS), total, cross
    for rows in _chunks(logits.size(0), columns, dtype):
        x, y = logits[rows, :columns].to(dtype), teacher_logits[rows, :columns].to(dtype)
        torch.amax(y, 1, out=top[rows])
        d = torch.sub(x, top_R[rows, None]).div_(temperature).exp_()
        t = torch.sub(y, top[rows, None]).div_(temperature)
        torch.sum(d.mul_(t), 1, out=cross[rows])
        torch.sum(t.exp_(), 1, out=total[rows])
    return top, total, cross


def combine_teacher(
    statistics: Tensor, of_teacher: Tensor, mean_R: Tensor, log_total_R: Tensor, temperature: float
) -> tuple[Tensor, TeacherNormalizer]:
    """Return the KL [R] in nats, and what backward needs.

    Args:
        mean_R: E_p[d] over all ranks.
        log_total_R: ln Z over all ranks.
    """
    tops, totals = statistics.unbind(-1)
    teacher_tops, teacher_totals, crosses = of_teacher.unbind(-1)
    weight = ((tops - tops.amax(0)) / temperature).exp()
    top_R = teacher_tops.amax(0)
    shift = (teacher_tops - top_R) / temperature
    teacher_mean_R = (weight * (crosses + shift * totals)).sum(0) / (weight * totals).sum(0)
    teacher_log_total_R = (shift.exp() * teacher_totals).sum(0).log()
    kl_R = (mean_R - log_total_R) - (teacher_mean_R - teacher_log_total_R)
    return kl_R, TeacherNormalizer(top_R, teacher_log_total_R - log_total_R - kl_R)


def write_teacher_gradient(
    logits: Tensor,
    teacher_logits: Tensor,
    columns: int,
    column_R: Tensor,
    temperature: float,
    row: Coefficients,
    factor_R: Tensor,
    normalizer: TeacherNormalizer,
    out: Tensor,
) -> None:
    """Write the gradient of the student's logits into `out`, that of the KL included, and zeros into its padding.

    d and t are subtracted before they are rounded to the type of `out`: close to the teacher they nearly cancel.

    Args:
        logits: [R, W], the student's.
        teacher_logits: [R, W].
        column_R: int64, the label's column. It may be any real column where `row.label` is 0.
        factor_R: Gradient of the loss with respect to the KL, divided by Z and the temperature.
        out: [R, W]. It may be `logits`.
    """
    out[:, columns:] = 0
    if columns == 0:
        return
    dtype = compute_dtype(logits)
    for rows in _chunks(logits.size(0), columns, dtype):
        d = torch.sub(logits[rows, :columns].to(dtype), row.top[rows, None]).div_(temperature)
        t = torch.sub(teacher_logits[rows, :columns].to(dtype), normalizer.top[rows, None]).div_(temperature)
        probability = d.exp()
        slope = t.neg_().add_(d).add_(normalizer.offset[rows, None]).mul_(factor_R[rows, None]).add_(row.constant[rows, None])
        if row.slope is not None:
            slope.addcmul_(d, row.slope[rows, None])
        gradient = slope.mul_(probability)
        gradient.scatter_add_(1, column_R[rows, None], row.label[rows, None])
        out[rows, :columns] = gradient


def _chunks(rows: int, columns: int, dtype: torch.dtype) -> Iterator[slice]:
    """Yield chunks of rows whose buffers have CHUNK_BYTES at most, or one row."""
    size = max(1, CHUNK_BYTES // (columns * dtype.itemsize))
    for at in range(0, rows, size):
        yield slice(at, min(rows, at + size))
