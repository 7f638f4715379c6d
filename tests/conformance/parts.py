"""The input of a loss function under test: a part of a minibatch, padded as in most trainers.

    def loss(part: Part) -> Tensor

returns a scalar: what this part contributes to the loss (to be minimised). The kit calls the function once for each microbatch
of each rank, adds up what it returns, and compares the sum and its gradients with the loss of the whole minibatch. A function
whose trainer averages over ranks therefore divides by `part.ranks`, one whose trainer averages over microbatches by
`part.microbatches`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.minibatches import Batch


@dataclass(frozen=True)
class Layout:
    """Distribution of the sequences over ranks and microbatches.

    Attributes:
        rows: For each rank, for each of its microbatches, the sequences in it.
        halves: Number of context-parallel ranks over which the tokens of every sequence are distributed; 1: whole sequences.
    """

    rows: tuple[tuple[tuple[int, ...], ...], ...]
    halves: int = 1


@dataclass(frozen=True)
class Part:
    """One microbatch on one rank. B sequences, padded on the right to T tokens; floating-point tensors in the case's dtype.

    Attributes:
        logprob: [B, T] nats, of the current policy; differentiable.
        entropy: [B, T] nats, of the current policy's whole distribution; differentiable.
        old_logprob: [B, T] nats, of the policy at the start of the rollout batch.
        old_entropy: [B, T] nats, likewise.
        rollout_logprob: [B, T] nats, of the engine that sampled.
        ref_logprob: [B, T] nats, of the reference policy.
        advantage: [B], after group normalisation.
        mask: bool [B, T], the response tokens that this part holds; a sequence may have none.
        length: int64 [B], response tokens of each sequence over all parts.
        key: int64 [B, T], random numbers for whoever draws tokens.
        tokens: Response tokens of the whole minibatch.
        sequences: Sequences of the whole minibatch.
        ranks: Data-parallel (and context-parallel) ranks.
        microbatches: Of each rank.
        whole: The whole minibatch without gradient, for what depends on all of it; None: this is it.
        rows: int64 [B], the places of these sequences in `whole`.
    """

    logprob: Tensor
    entropy: Tensor
    old_logprob: Tensor
    old_entropy: Tensor
    rollout_logprob: Tensor
    ref_logprob: Tensor
    advantage: Tensor
    mask: Tensor
    length: Tensor
    key: Tensor
    tokens: int
    sequences: int
    ranks: int
    microbatches: int
    whole: "Part | None"
    rows: Tensor


def parts_of(batch: Batch, logprob_N: Tensor, entropy_N: Tensor, layout: Layout, padding: float) -> list[Part]:
    """Distribute a minibatch over parts.

    Args:
        logprob_N: Current log-probs, leaves of the graph. Their dtype is that of all tensors.
        entropy_N: Current entropies, likewise.
        padding: Value of log-probs and entropies outside the mask.
    """
    everything = list(range(len(batch.responses)))
    whole = _part(batch, logprob_N.detach(), entropy_N.detach(), everything, (1, 1, 1, 0), padding, None)
    out = []
    for rank in layout.rows:
        for rows in rank:
            for half in range(layout.halves):
                sizes = len(layout.rows) * layout.halves, len(rank), layout.halves, half
                alone = len(layout.rows) == len(rank) == layout.halves == 1
                out.append(_part(batch, logprob_N, entropy_N, rows, sizes, padding, None if alone else whole))
    return out


def _part(
    batch: Batch,
    logprob_N: Tensor,
    entropy_N: Tensor,
    rows: Sequence[int],
    sizes: tuple[int, int, int, int],
    padding: float,
    whole: Part | None,
) -> Part:
    """Return one part.

    Args:
        sizes: Ranks, microbatches, halves, and the number of this half.
    """
    lengths = torch.tensor([len(r.old) for r in batch.responses])
    first = lengths.cumsum(0) - lengths
    ranks, microbatches, halves, half = sizes
    own, width = lengths[list(rows)], max(1, int(lengths[list(rows)].max()))
    place = torch.arange(width).expand(len(rows), width)
    mask = place < own[:, None]
    if halves > 1:  # the first and the last quarter of a sequence on one rank, the middle on the other
        edge = (place * 4 < own[:, None]) | (place * 4 >= 3 * own[:, None])
        mask = mask & (edge if half == 0 else ~edge)
    token = (first[list(rows)][:, None] + place).clamp(max=max(0, logprob_N.numel() - 1))

    def padded(x_N: Tensor, outside: float = padding) -> Tensor:
        if x_N.numel() == 0:
            return torch.full(mask.shape, outside, dtype=x_N.dtype)
        return torch.where(mask, x_N[token], torch.full((), outside, dtype=x_N.dtype))

    dtype = logprob_N.dtype
    return Part(
        logprob=padded(logprob_N),
        entropy=padded(entropy_N),
        old_logprob=padded(batch.flat("old").to(dtype), -padding),
        old_entropy=padded(batch.flat("old_entropy").to(dtype)),
        rollout_logprob=padded(batch.flat("rollout").to(dtype)),
        ref_logprob=padded(batch.flat("ref").to(dtype)),
        advantage=torch.tensor([batch.responses[i].advantage for i in rows], dtype=dtype),
        mask=mask,
        length=own,
        key=torch.where(mask, batch.keys[token], 0) if logprob_N.numel() else torch.zeros(mask.shape, dtype=torch.int64),
        tokens=logprob_N.numel(),
        sequences=len(lengths),
        ranks=ranks,
        microbatches=microbatches,
        whole=whole,
        rows=torch.tensor(list(rows)),
    )
