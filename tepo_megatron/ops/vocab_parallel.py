"""Log-prob and entropy of tokens whose logits are split over the vocabulary, along the tensor-parallel axis.

One pass over the local logits gives four numbers per row, and one all-gather shares them. Every rank combines the same numbers
in the same order, so all ranks hold the same bits and backward needs no collective. Backward overwrites the logits with their
gradient, so that no second tensor of their size is held.

Layout: R rows; V local vocabulary columns (tensor-parallel rank r owns columns [r * V, (r + 1) * V) of the vocabulary).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tepo_megatron.base.types import TokenStats, Truncation
from tepo_megatron.ops.token_statistics import RowKernels, row_kernels
from tepo_megatron.ops.token_statistics.shard import (
    VocabShard,
    coefficients,
    combine,
    gather,
    local_statistics,
    masks,
    write_gradient,
)


def token_stats(
    logits: Tensor,
    labels_R: Tensor,
    temperature: float,
    group: dist.ProcessGroup | None,
    vocab_size: int | None = None,
    *,
    mask_RK: Tensor | None = None,
    recompute: Truncation | None = None,
    keep_logits: bool = False,
    backend: str | None = None,
) -> TokenStats:
    """Return the log-prob of each label and the entropy of each row under softmax(logits / temperature).

    Args:
        logits: [R, V], this rank's columns of the vocabulary, finite; bf16, fp16, fp32 or fp64. Forward does not modify them.
        labels_R: int64, global token ids in [0, vocab_size).
        group: Tensor-parallel group. None: one rank (never the world).
        vocab_size: Columns from here on are padding and get no probability. None: all columns are real.
        mask_RK: int64 [R, K], distinct global ids over which each row's softmax is, its label among them, filled up with
            NO_TOKEN. Other logits get no gradient. None: the whole vocabulary.
        recompute: Also recompute the sampling masks of this truncation from the logits, `TokenStats.recomputed`. None: do not.
        backend: "torch" or "triton". None: Triton on CUDA where it is installed, else PyTorch.

    Returns TokenStats in nats, fp32 (fp64 for fp64 logits), the same bits on every rank of `group`. Raises ValueError if the
    temperature is not positive, the shapes do not fit, or the back end is unknown or cannot run here.

    Gradients: with respect to `logits` only, through both outputs:
        d logprob / d z_j = [j = label] - p_j,  d entropy / d z_j = -p_j (ln p_j + H)   (Eq. 1 of the paper lacks the minus).
        A loss of any other form, KL terms included, reaches the logits through these two.

    Backward consumes the logits: afterwards their storage holds the gradient, and no code may read them again. Backward raises
    RuntimeError if the logits were changed since forward. A second backward through the same forward, or through another use of
    the same logits, is such a change. An operation that saved the logits for its own backward (the tanh that produced them, a
    softmax of them) makes autograd raise when its backward runs. `keep_logits=True` avoids all three. Logits are not
    overwritten if they are leaves or views of leaves, if they retain their gradient, or if their rows are not contiguous (they
    are copied).

    Memory beyond the logits: O(R), and with PyTorch two buffers of a few rows.
    Collectives: forward one all-gather of [R, 4] over `group` (none without a group); backward none. With `recompute` it is of
    [R, 6 + 2C], C <= 256.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if logits.dim() != 2 or labels_R.shape != logits.shape[:1]:
        raise ValueError(f"expected logits [R, V] and labels [R], got {tuple(logits.shape)} and {tuple(labels_R.shape)}")
    if _rows_overlap_or_scatter(logits):
        logits = logits.contiguous()  # a new tensor, which backward may overwrite
    keep_logits = keep_logits or _kept(logits)
    kernels = row_kernels(backend, logits.device)
    logprob_R, entropy_R, gathered = _TokenStats.apply(
        logits, labels_R, temperature, group, vocab_size, mask_RK, recompute, keep_logits, kernels
    )
    return TokenStats(logprob_R, entropy_R, masks(gathered, labels_R, temperature, recompute))


class _TokenStats(torch.autograd.Function):
    """The autograd function of `token_stats`. It saves the logits and five numbers per row."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels_R: Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
        vocab_size: int | None,
        mask_RK: Tensor | None,
        recompute: Truncation | None,
        keep_logits: bool,
        kernels: RowKernels,
    ) -> tuple[Tensor, Tensor, Tensor]:
        shard = VocabShard.of(logits.size(1), labels_R, group, vocab_size, mask_RK)
        gathered = gather(local_statistics(kernels, logits, shard, temperature, recompute), group)
        logprob_R, entropy_R, normalizer = combine(gathered, temperature)
        ctx.save_for_backward(logits, shard.owned_R, shard.column_R, shard.mask_RK, *normalizer)
        ctx.set_materialize_grads(False)  # no gradient is less work than a gradient of zeros
        ctx.mark_non_differentiable(gathered)
        ctx.columns, ctx.temperature, ctx.keep_logits, ctx.kernels = shard.columns, temperature, keep_logits, kernels
        return logprob_R, entropy_R, gathered

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprob_R: Tensor | None, grad_entropy_R: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad_logprob_R is None and grad_entropy_R is None:
            return (None,) * 9
        try:
            logits, owned_R, column_R, mask_RK, *normalizer = ctx.saved_tensors
        except RuntimeError as e:
            if "modified by an inplace operation" not in str(e):
                raise
            raise RuntimeError(
                "the logits of token_stats were overwritten after its forward, perhaps by its own backward; "
                "to use them again, pass keep_logits=True"
            ) from e
        shard = VocabShard(ctx.columns, owned_R, column_R, mask_RK)
        row = coefficients(normalizer, shard, grad_logprob_R, grad_entropy_R, ctx.temperature)
        logits = logits.detach()  # the same storage
        grad = torch.empty_like(logits) if ctx.keep_logits else logits
        write_gradient(ctx.kernels, logits, shard, ctx.temperature, row, grad)
        return (grad, *(None,) * 8)


def _kept(logits: Tensor) -> bool:
    """Return whether backward must not overwrite these logits: a leaf, a view of one, or a tensor that retains its gradient."""
    return logits.is_leaf or logits.retains_grad or (logits._base is not None and logits._base.is_leaf)


def _rows_overlap_or_scatter(logits: Tensor) -> bool:
    """Return whether the rows are not contiguous or share memory (expanded tensors)."""
    rows, columns = logits.shape
    return (columns > 1 and logits.stride(1) != 1) or (rows > 1 and logits.stride(0) < columns)
