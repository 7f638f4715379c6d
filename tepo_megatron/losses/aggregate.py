"""Aggregation of per-token values to one number: the weight of each response row (_R), denominators included.

An aggregation is a function (segments, whole, group_tokens_R) -> weight_R, an `Aggregate`:
    segments: the sequence of each row, and the length |y_i| of each sequence
    whole: N response tokens, G sequences and P prompts of the whole minibatch, over all ranks and microbatches
    group_tokens_R: response tokens in the minibatch of the prompt that the row belongs to

Since the denominators are those of the whole minibatch, the sum of the weighted rows over ranks and microbatches is the
objective, however the sequences are distributed.
"""

from collections.abc import Callable

from torch import Tensor

from tepo_megatron.base.types import Denominators
from tepo_megatron.ops.context_parallel import Segments

Aggregate = Callable[[Segments, Denominators, Tensor], Tensor]


def token_mean(segments: Segments, whole: Denominators, group_tokens_R: Tensor) -> Tensor:
    """Return 1 / N: every token has the same weight (Algorithm 1; DAPO, arXiv 2503.14476)."""
    return (1.0 / whole.tokens).expand(segments.sequence_R.numel())


def sequence_mean_token_mean(segments: Segments, whole: Denominators, group_tokens_R: Tensor) -> Tensor:
    """Return 1 / (G |y_i|): every sequence has the same weight (GRPO, GSPO)."""
    return segments.spread(1.0 / (whole.sequences * segments.lengths_G))


def sequence_mean_token_sum(segments: Segments, whole: Denominators, group_tokens_R: Tensor) -> Tensor:
    """Return 1 / G: a sequence has a weight proportional to its length (Table 3, Panel D)."""
    return (1.0 / whole.sequences).expand(segments.sequence_R.numel())


def sequence_mean_token_sum_norm(segments: Segments, whole: Denominators, group_tokens_R: Tensor) -> Tensor:
    """Return 1 / (G L) with L the maximum length of a response: one constant for all lengths (Dr. GRPO, arXiv 2503.20783)."""
    return (1.0 / (whole.sequences * whole.max_response_tokens)).expand(segments.sequence_R.numel())


def prompt_mean_token_mean(segments: Segments, whole: Denominators, group_tokens_R: Tensor) -> Tensor:
    """Return 1 / (P N_p), N_p the response tokens of the row's prompt: the denominator that Eq. 4 has per prompt."""
    return 1.0 / (whole.prompts * group_tokens_R)


_AGGREGATES = (
    token_mean, sequence_mean_token_mean, sequence_mean_token_sum, sequence_mean_token_sum_norm, prompt_mean_token_mean,
)  # fmt: skip
AGGREGATES: dict[str, Aggregate] = {aggregate.__name__: aggregate for aggregate in _AGGREGATES}
