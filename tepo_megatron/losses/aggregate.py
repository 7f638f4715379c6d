"""From per-token values to one number: the weight of each response row (_R), denominators included.

The denominators are those of the whole minibatch (all ranks and microbatches), so a sum of weighted rows over ranks and
microbatches is the objective, however the sequences were laid out.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tepo_megatron.ops.segments import Segments
from tepo_megatron.types import Denominators

Aggregate = Callable[[Segments, Denominators], Tensor]


def token_mean(segments: Segments, whole: Denominators) -> Tensor:
    """1 / N: every token counts alike (Eq. 4; DAPO, arXiv 2503.14476)."""
    return (1.0 / whole.tokens).expand(segments.sequence_R.numel())


def sequence_mean_token_mean(segments: Segments, whole: Denominators) -> Tensor:
    """1 / (G |y_i|): every sequence counts alike (GRPO, GSPO)."""
    return segments.spread(1.0 / (whole.sequences * segments.lengths_G))


def sequence_mean_token_sum(segments: Segments, whole: Denominators) -> Tensor:
    """1 / G: long sequences count more (Table 3, Panel D)."""
    return (1.0 / whole.sequences).expand(segments.sequence_R.numel())


AGGREGATES: dict[str, Aggregate] = {
    "token_mean": token_mean,
    "sequence_mean_token_mean": sequence_mean_token_mean,
    "sequence_mean_token_sum": sequence_mean_token_sum,
}
