"""Output layer fused with the token statistics: log-prob and entropy from hidden states, without holding all logits.

The output layer and the token statistics run together on chunks of rows. Logits that fit into a budget are kept for backward,
which overwrites them with their gradient; the others are recomputed there. Each chunk's part of the weight's gradient is added
directly in fp32.

Layout: R rows (those whose label is a response token); V local vocabulary columns, padding included; H hidden size.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor
from torch.autograd.function import once_differentiable

from tepo_megatron.base.types import TokenStats, Truncation
from tepo_megatron.ops.token_statistics import RowKernels, row_kernels
from tepo_megatron.ops.token_statistics.shard import (
    Normalizer,
    VocabShard,
    coefficients,
    combine,
    gather,
    local_statistics,
    masks,
    write_gradient,
)
from tepo_megatron.ops.token_statistics.teacher import (
    TeacherNormalizer,
    TeacherRows,
    combine_teacher,
    teacher_statistics,
    write_teacher_gradient,
)

# Rows per chunk: enough for a matrix product to run at full speed.
CHUNK_ROWS = 1024

# Rows of a teacher's logits at a time: they are held next to the chunk of the student's logits.
TEACHER_ROWS = 256

# Vocabulary columns per product where bf16 products are added in fp32: this bounds the fp32 temporaries.
CHUNK_COLUMNS = 4096


def output_layer_stats(
    hidden_R: Tensor,
    weight: Tensor,
    labels_R: Tensor,
    temperature: float,
    group: dist.ProcessGroup | None,
    vocab_size: int | None = None,
    *,
    mask_RK: Tensor | None = None,
    recompute: Truncation | None = None,
    teacher: TeacherRows | None = None,
    logits_budget: int = 0,
    sum_hidden_gradient: bool = True,
    backend: str | None = None,
) -> TokenStats:
    """Return `token_stats(hidden_R @ weight.T, ...)` without holding all logits.

    Args:
        hidden_R: [R, H], the same on every rank of `group`; under sequence parallelism after the gather.
        weight: [V, H], this rank's rows of the output layer's weight, in the type of `hidden_R`.
        labels_R: As for `token_stats`, like temperature, group and vocab_size.
        mask_RK: Sampling masks, as for `token_stats`, like recompute. None: the whole vocabulary.
        recompute: Truncation whose masks are recomputed. None: none are.
        sum_hidden_gradient: Whether backward sums the gradient of `hidden_R` over `group`. False under sequence parallelism,
            where the backward of the gather, a reduce-scatter, does it.
        backend: "torch" or "triton". None: Triton on CUDA where it is installed, else PyTorch.
    Raises:
        ValueError: The temperature is not positive, the shapes do not fit, or the back end is unknown or cannot run here.

    Gradients: to `hidden_R` in its type; to `weight`, summed in fp32. Without a `weight.main_grad` the sum is returned in the
    weight's type. With one (Megatron's DDP sets it) the sum is added to it, and autograd gets an empty sparse gradient, just as
    Megatron's own fused weight gradient returns a dummy (`tensor_parallel/layers.py`): the backward hook of DDP needs `.grad`
    under `overlap_grad_reduce`, and adds to `main_grad` what other uses of the weight (a tied embedding) put there.

    Memory beyond inputs and gradients: `logits_budget`, one chunk of logits, and for bf16 on a CPU (or before PyTorch 2.10) two
    fp32 pieces of CHUNK_COLUMNS rows of `weight`. With a teacher, TEACHER_ROWS rows of its logits.

    Collectives: forward that of `token_stats`; backward one all-reduce of [R, H] if `sum_hidden_gradient`.
    """
    _check(hidden_R, weight, labels_R, temperature)
    summed_over = group if sum_hidden_gradient and group is not None and group.size() > 1 else None
    if teacher is not None:
        _check_teacher(teacher, hidden_R, weight, masked=mask_RK is not None or recompute is not None)
    kernels = row_kernels(backend, hidden_R.device)
    logprob_R, entropy_R, kl_R, gathered = _OutputLayerStats.apply(
        hidden_R,
        weight,
        labels_R,
        temperature,
        group,
        vocab_size,
        mask_RK,
        recompute,
        teacher,
        logits_budget,
        summed_over,
        kernels,
    )
    return TokenStats(logprob_R, entropy_R, masks(gathered, labels_R, temperature, recompute), kl_R)


def _check(hidden_R: Tensor, weight: Tensor, labels_R: Tensor, temperature: float) -> None:
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if hidden_R.dim() != 2 or hidden_R.size(1) != weight.size(1) or labels_R.shape != hidden_R.shape[:1]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (hidden_R, weight, labels_R))
        raise ValueError(f"expected hidden [R, H], weight [V, H] and labels [R], got {shapes}")


def _check_teacher(teacher: TeacherRows, hidden_R: Tensor, weight: Tensor, masked: bool) -> None:
    """Raise ValueError if the teacher's rows do not fit to the student's, or if there are sampling masks."""
    if masked:
        raise ValueError("the KL to a teacher is over the whole vocabulary; it has no sampling masks")
    if (len(teacher.hidden_R), len(teacher.weight)) != (len(hidden_R), len(weight)):
        shapes = f"{tuple(teacher.hidden_R.shape)} and {tuple(teacher.weight.shape)}"
        raise ValueError(f"a teacher's hidden states and weight must have as many rows as the student's, got {shapes}")


class _OutputLayerStats(torch.autograd.Function):
    """The autograd function of `output_layer_stats`. It saves the logits within the budget, and recomputes the others."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_R: Tensor,
        weight: Tensor,
        labels_R: Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
        vocab_size: int | None,
        mask_RK: Tensor | None,
        recompute: Truncation | None,
        teacher: TeacherRows | None,
        logits_budget: int,
        summed_over: dist.ProcessGroup | None,
        kernels: RowKernels,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        shard = VocabShard.of(weight.size(0), labels_R, group, vocab_size, mask_RK)
        budget = logits_budget if ctx.needs_input_grad[0] or ctx.needs_input_grad[1] else 0
        kept: dict[int, Tensor] = {}  # by first row
        parts = []
        for rows, logits in _logits(hidden_R, weight, kept, budget):
            part = local_statistics(kernels, logits, shard.rows(rows), temperature, recompute)
            if teacher is not None:
                of_teacher = [
                    torch.stack(teacher_statistics(x, y, part[at, 0], shard.columns, temperature), dim=1)
                    for at, _, x, y in _with_teacher(rows, logits, teacher)
                ]
                part = torch.cat((part, torch.cat(of_teacher)), dim=1)
            parts.append(part)
        gathered = gather(torch.cat(parts), group)
        logprob_R, entropy_R, normalizer = combine(gathered, temperature)
        kl_R, of_kl = None, None
        if teacher is not None:
            mean_R, log_total_R = normalizer.mean, normalizer.total.log()
            kl_R, of_kl = combine_teacher(gathered[..., :2], gathered[..., 4:], mean_R, log_total_R, temperature)
        ctx.save_for_backward(hidden_R, weight, shard.owned_R, shard.column_R, shard.mask_RK, *normalizer, *(of_kl or ()))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(gathered)
        ctx.columns, ctx.temperature, ctx.kept = shard.columns, temperature, kept
        ctx.summed_over, ctx.kernels = summed_over, kernels
        ctx.weight, ctx.main_grad, ctx.teacher = weight, getattr(weight, "main_grad", None), teacher
        return logprob_R, entropy_R, kl_R, gathered

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprob_R: Tensor | None, grad_entropy_R: Tensor | None, grad_kl_R: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad_logprob_R is None and grad_entropy_R is None and grad_kl_R is None:
            return (None,) * 12
        hidden_R, weight, owned_R, column_R, mask_RK, top_R, total_R, mean_R, *of_teacher = ctx.saved_tensors
        normalizer = Normalizer(top_R, total_R, mean_R)
        shard = VocabShard(ctx.columns, owned_R, column_R, mask_RK)
        row = coefficients(normalizer, shard, grad_logprob_R, grad_entropy_R, ctx.temperature)
        kept, ctx.kept = ctx.kept, {}  # this pass overwrites them, so a second backward recomputes all logits
        grad_hidden = torch.empty_like(hidden_R) if ctx.needs_input_grad[0] else None
        total = ctx.main_grad if ctx.needs_input_grad[1] else None
        if total is None and ctx.needs_input_grad[1]:
            total = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        for rows, logits in _logits(hidden_R, weight, kept, 0):
            if grad_kl_R is None:
                write_gradient(ctx.kernels, logits, shard.rows(rows), ctx.temperature, row.rows(rows), logits)
            else:
                factor_R = grad_kl_R / (total_R * ctx.temperature)
                for _, at, x, y in _with_teacher(rows, logits, ctx.teacher):
                    write_teacher_gradient(
                        x, y, shard.columns, column_R[at], ctx.temperature, row.rows(at), factor_R[at],
                        normalizer=TeacherNormalizer(*(n[at] for n in of_teacher)), out=x,
                    )  # fmt: skip
            if grad_hidden is not None:
                torch.mm(logits, weight, out=grad_hidden[rows])
            if total is not None:
                add_product(total, logits, hidden_R[rows])
            kept.pop(rows.start, None)
        if grad_hidden is not None and ctx.summed_over is not None and grad_hidden.numel():
            dist.all_reduce(grad_hidden, group=ctx.summed_over)
        grad_weight = None
        if total is not None:
            grad_weight = total.to(weight.dtype) if ctx.main_grad is None else _already_added(ctx.weight)
        return (grad_hidden, grad_weight, *(None,) * 10)


def _already_added(weight: Tensor) -> Tensor | None:
    """Signal to DDP's backward hook that `main_grad` has this gradient; return the tensor that autograd puts into `.grad`.

    The empty sparse tensor takes no memory and adds nothing, neither to a tied embedding's gradient nor to `main_grad`. Returns
    the empty gradient, or None where no DDP wraps the weight, since no hook needs `.grad` then.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    indices = torch.empty(2, 0, dtype=torch.int64, device=weight.device)
    values = torch.empty(0, dtype=weight.dtype, device=weight.device)
    return torch.sparse_coo_tensor(indices, values, weight.shape, check_invariants=False)


def _logits(hidden_R: Tensor, weight: Tensor, kept: dict[int, Tensor], budget: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield chunks of rows with their logits: from `kept`, else computed, and then kept while they fit the budget (in bytes).

    Chunks that are not kept share one buffer, which the next one overwrites.
    """
    rows, buffer = hidden_R.size(0), None
    for at in range(0, max(rows, 1), CHUNK_ROWS):
        chunk = slice(at, min(rows, at + CHUNK_ROWS))
        if (logits := kept.get(at)) is None:
            size = (chunk.stop - at, weight.size(0))
            budget -= size[0] * size[1] * hidden_R.element_size()
            if budget >= 0:
                logits = kept[at] = hidden_R.new_empty(size)
            else:
                buffer = hidden_R.new_empty(size) if buffer is None else buffer  # the last chunk alone may be smaller
                logits = buffer[: size[0]]
            torch.mm(hidden_R[chunk], weight.t(), out=logits)
        yield chunk, logits


def _with_teacher(rows: slice, logits: Tensor, teacher: TeacherRows) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Yield pieces of a chunk with the teacher's logits: rows within the chunk, within all rows, the student's and its logits.

    All pieces share one buffer for the teacher's logits, which the next one overwrites.
    """
    size, buffer = rows.stop - rows.start, None
    for at in range(0, max(size, 1), TEACHER_ROWS):
        piece = slice(at, min(size, at + TEACHER_ROWS))
        of_all = slice(rows.start + piece.start, rows.start + piece.stop)
        if buffer is None:
            buffer = teacher.hidden_R.new_empty(piece.stop - at, teacher.weight.size(0))
        y = buffer[: piece.stop - at]
        torch.mm(teacher.hidden_R[of_all], teacher.weight.t(), out=y)
        yield piece, of_all, logits[piece], y


def add_product(total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    """Add gradient.T @ hidden to `total` in place, summed in the type of `total`.

    `total`: [V, H], the sum, in the type of the others or in fp32.
    """
    if gradient.dtype == total.dtype:
        total.addmm_(gradient.t(), hidden)
    elif total.device.type == "cuda":
        add_on_tensor_cores(total, gradient.t(), hidden)
    else:
        wide = hidden.to(total.dtype)
        for at in range(0, total.size(0), CHUNK_COLUMNS):
            piece = gradient[:, at : at + CHUNK_COLUMNS].t()
            total[at : at + CHUNK_COLUMNS].addmm_(piece.to(total.dtype), wide)


def adds_within_product(version: str) -> bool:
    """Return whether `torch.addmm` of bf16 matrices takes an fp32 sum: since PyTorch 2.10 (pytorch/pytorch#167931)."""
    return Version(version).release >= (2, 10)


ADDS_WITHIN_PRODUCT = adds_within_product(torch.__version__)


def add_on_tensor_cores(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a [V, r] @ b [r, H], both bf16, to the fp32 `total` [V, H]. Tensor cores multiply in bf16 and add in fp32.

    `out` must be the same tensor object as the one that is added to: PyTorch copies `total` first if `out` is another view of
    it. Before PyTorch 2.10 the product is added in pieces, which reads and writes fp32 twice. A `total` of one row or one
    column is added in pieces too, because PyTorch may take it for a bias and pass it to cuBLASLt without its values. `total`:
    fp32 [V, H], the sum, changed in place.
    """
    if ADDS_WITHIN_PRODUCT and min(total.shape) > 1:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
        return
    for at in range(0, total.size(0), CHUNK_COLUMNS):
        total[at : at + CHUNK_COLUMNS].add_(torch.mm(a[at : at + CHUNK_COLUMNS], b, out_dtype=total.dtype))
