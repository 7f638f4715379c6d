"""One policy-optimization method as a loss: a choice of ratio, surrogate, weighting, penalties and aggregation.

loss = -sum_R a * ( c * lambda * surrogate(ratio, A) - rho * |l - l_old| - beta * M * KL(old) - b * KL(ref) + alpha * H )

The sum runs over response rows. a: weight of the row in the mean; c: correction of the rollout/train mismatch;
lambda, rho: weight and penalty of the weighting; A: advantage; l: log-prob; M: KL mask; b: ref_kl.beta; H: entropy; alpha:
entropy_coefficient.

An aggregation is a function (segments, whole, group_tokens_R) -> weight_R, an `Aggregate`:
    segments: the sequence of each row, and the length |y_i| of each sequence
    whole: N response tokens, G sequences and P prompts of the whole minibatch, over all ranks and microbatches
    group_tokens_R: response tokens in the minibatch of the prompt that the row belongs to

Since the denominators are those of the whole minibatch, the sum of the weighted rows over ranks and microbatches is the
objective, however the sequences are distributed.
"""

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.base.types import Denominators, LossOutput, TokenStats
from tepo_megatron.config.objective import ObjectiveParts
from tepo_megatron.losses import contradictions, diagnostics
from tepo_megatron.losses.advantages import ADVANTAGES, PER_TERM
from tepo_megatron.losses.kl import ESTIMATORS, FULL_VOCABULARY, MASKS
from tepo_megatron.losses.ratio import CORRECTIONS, RATIOS
from tepo_megatron.losses.surrogate import LOG_RATIO_BOUNDS, SURROGATES, ClipBounds
from tepo_megatron.losses.weighting import WEIGHTINGS, BatchStatistics, MinibatchTokens, TokenWeights
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


@dataclass(frozen=True)
class LossInputs:
    """The inputs for the response rows (_R) of one microbatch."""

    advantage_R: Tensor  # advantage, constant over each sequence
    old_logprob_R: Tensor  # nats, log-probs under the actor's weights at the start of the rollout batch
    old_entropy_R: Tensor  # nats, entropies under the same weights
    rollout_logprob_R: Tensor  # nats, log-probs that the inference engine reported
    segments: Segments  # the sequence of each row, and sums over sequences
    group_tokens_R: Tensor  # response tokens that the minibatch has of the row's prompt, at least 1
    whole: Denominators  # counts of the whole minibatch, the denominators of the loss
    ref_logprob_R: Tensor | None = None  # nats, log-probs under the reference policy. None: the objective uses none.
    weights: TokenWeights | None = None  # weights from `Objective.batch_statistics`. None: the objective has no weighting.
    # Nats; an entropy change below it is rounding noise. Only metrics use it. None: not known.
    noise_floor: float | None = None


def advantage_with_entropy(advantage_R: Tensor, entropy_R: Tensor, alpha: float, kappa: float) -> Tensor:
    """Return A + min(alpha sg[H], |A| / kappa), which favours tokens of high entropy (arXiv 2506.14758).

    No gradient passes through the entropy. The result differs from token to token of a sequence.

    Args:
        advantage_R: Advantage A.
        entropy_R: Entropy H in nats.
    """
    return advantage_R + torch.minimum(alpha * entropy_R.detach(), advantage_R.abs() / kappa)


def choices() -> dict[str, Collection[str]]:
    """Return the names that each part may have now: a user's file may have added some to the tables."""
    return {
        "ratio": RATIOS, "surrogate": SURROGATES, "kl": ESTIMATORS, "kl_mask": MASKS,
        "ref_kl.estimator": (*ESTIMATORS, FULL_VOCABULARY),
        "weighting.type": WEIGHTINGS, "correction.type": CORRECTIONS, "aggregate": AGGREGATES,
        "advantage": ADVANTAGES | PER_TERM,
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Objective(ObjectiveParts):
    """A method, callable as its loss. Each string names an entry of RATIOS, SURROGATES, ESTIMATORS (`kl`), MASKS, AGGREGATES or
    ADVANTAGES. `weighting` and `correction` have a type each, which names an entry of WEIGHTINGS or CORRECTIONS. Raises
    ConfigError if a name is in no table, or parts contradict each other.
    """

    dynamic_sampling: bool = False  # sample further prompts to replace groups whose scores are all equal
    overlong_shaping: bool = False  # subtract a penalty from the reward of responses close to the length limit

    def __post_init__(self) -> None:
        for part, table in choices().items():
            name = _field(self, part)
            if name is not None and name not in table:
                raise ConfigError(f"objective.{part}={name!r} is unknown; use one of {', '.join(table)}")
        contradictions.check(self)

    def replace(self, **parts: Any) -> "Objective":
        """Return the same method with these fields replaced. A field given as None keeps its value."""
        return dataclasses.replace(self, **{k: v for k, v in parts.items() if v is not None})

    @property
    def has_constant_factors(self) -> bool:
        """Return whether every factor of the ratio is the same on all tokens of a sequence (`constant_factors` in ratio.py).

        The group's advantage and the denominators are. Entropy inside the advantage is not, nor is a weighting or a correction
        whose values differ from token to token.
        """
        weighting, correction = WEIGHTINGS[self.weighting.type], CORRECTIONS[self.correction.type]
        return (
            self.advantage_alpha == 0
            and (weighting is None or weighting.constant)
            and (correction is None or correction.constant)
        )

    @property
    def needs_teacher(self) -> bool:
        """Return whether the loss has the exact KL to the reference policy, `TokenStats.teacher_kl_R`."""
        return self.ref_kl is not None and self.ref_kl.estimator == FULL_VOCABULARY

    @property
    def needs_batch_statistics(self) -> bool:
        """Return whether `batch_statistics` must be called before any backward of an update."""
        return WEIGHTINGS[self.weighting.type] is not None

    def batch_statistics(self, stats_N: TokenStats, inputs_N: LossInputs, keys_N: Tensor) -> BatchStatistics:
        """Return the weights that the weighting gives to all N response tokens of a minibatch. No collective, no gradient.

        Args:
            stats_N: Log-probs and entropies under the current weights.
            inputs_N: Loss inputs whose rows are all N tokens, with segments that have no context-parallel group.
            keys_N: int64, a random number for each token, the same in every layout.
        """
        weighting = WEIGHTINGS[self.weighting.type]
        assert weighting is not None
        logprob_N, entropy_N = stats_N.logprob_R.detach(), stats_N.entropy_R.detach()
        log_ratio_N = logprob_N - inputs_N.old_logprob_R
        advantage_N = self._advantage(inputs_N.advantage_R, entropy_N)
        _, _, clipped_N = self._policy_term(logprob_N, log_ratio_N, advantage_N, inputs_N, True)
        tokens = MinibatchTokens(advantage_N, logprob_N, entropy_N, log_ratio_N, clipped_N, keys_N)
        return dataclasses.replace(weighting.statistics(tokens, self.weighting), tokens=tokens)

    def __call__(self, stats: TokenStats, inputs: LossInputs) -> LossOutput:
        """Return the part of the minibatch's loss that the rows of one microbatch on this rank contribute.

        Gradients: through `stats.logprob_R`; through `stats.entropy_R` by the entropy bonus alone, since the mask's dH and the
        entropy inside the advantage are detached. Collectives: those of the ratio and of the correction.
        """
        segments = inputs.segments
        advantage_R = self._advantage(inputs.advantage_R, stats.entropy_R)
        log_ratio_R = stats.logprob_R - inputs.old_logprob_R
        constant = self.has_constant_factors
        ratio_R, value_R, clipped_R = self._policy_term(stats.logprob_R, log_ratio_R, advantage_R, inputs, constant)

        correction_R = affected_R = ref_penalty_R = None
        if correction := CORRECTIONS[self.correction.type]:
            mismatch_R = inputs.old_logprob_R - inputs.rollout_logprob_R
            correction_R = correction.weight(mismatch_R, segments, self.correction)
            value_R = correction_R * value_R
        if self.needs_batch_statistics:
            assert inputs.weights is not None, f"objective.weighting.type={self.weighting.type} needs batch_statistics"
            affected_R = (inputs.weights.weight_R < 0.99) | (inputs.weights.penalty_R != 0)
            value_R = inputs.weights.weight_R * value_R - inputs.weights.penalty_R * log_ratio_R.abs()

        entropy_change_R = stats.entropy_R.detach() - inputs.old_entropy_R
        mask_R = MASKS[self.kl_mask](advantage_R, entropy_change_R, self.kl_entropy_tolerance)
        penalty_R = mask_R * ESTIMATORS[self.kl](log_ratio_R, log_ratio_R)
        value_R = value_R - self.beta * penalty_R
        if self.ref_kl is not None and self.ref_kl.where == "loss":
            ref_penalty_R = self._reference_penalty(stats, inputs, log_ratio_R)
            value_R = value_R - self.ref_kl.beta * ref_penalty_R
        if self.entropy_coefficient:
            value_R = value_R + self.entropy_coefficient * stats.entropy_R

        aggregate_R = AGGREGATES[self.aggregate](segments, inputs.whole, inputs.group_tokens_R)
        loss_R = -(aggregate_R * value_R)
        loss = loss_R.sum()
        ratio_R = ratio_R.detach()
        terms = diagnostics.LossTerms(
            loss, advantage_R, ratio_R, clipped_R, entropy_change_R, mask_R, aggregate_R, penalty_R,
            ref_penalty_R, affected_R, correction_R, inputs.weights, loss_R,
        )  # fmt: skip
        metrics = diagnostics.metrics(terms, inputs.whole.tokens, inputs.noise_floor)
        return LossOutput(loss, metrics, diagnostics.histograms(terms), ratio_R, diagnostics.rows(terms))

    def _reference_penalty(self, stats: TokenStats, inputs: LossInputs, log_ratio_R: Tensor) -> Tensor:
        """Return the KL to the reference policy of each token in nats, exact or estimated from the sampled token."""
        assert self.ref_kl is not None
        if self.needs_teacher:
            assert stats.teacher_kl_R is not None, "the exact KL needs the logits of the reference policy"
            return stats.teacher_kl_R
        assert inputs.ref_logprob_R is not None, "objective.ref_kl needs the log-probs of the reference policy"
        return ESTIMATORS[self.ref_kl.estimator](stats.logprob_R - inputs.ref_logprob_R, log_ratio_R)

    def _policy_term(
        self, logprob_R: Tensor, log_ratio_R: Tensor, advantage_R: Tensor, inputs: LossInputs, constant_factors: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ratio_R, the surrogate's value_R and clipped_R. Collectives: those of the ratio.

        Args:
            logprob_R: Current log-probs in nats.
            log_ratio_R: Nats, l - l_old.
            advantage_R: Advantage, with the entropy term if the objective has one.
        """
        bounds = ClipBounds(
            self.clip_low, self.clip_high, self.dual_clip, self.tau_positive, self.tau_negative, self.max_divergence
        )
        bounded_R = None
        if bound := LOG_RATIO_BOUNDS.get(self.surrogate):
            log_ratio_R, bounded_R = bound(log_ratio_R, advantage_R, bounds)
        ratio_R = RATIOS[self.ratio](log_ratio_R, inputs.segments, constant_factors)
        value_R, clipped_R = SURROGATES[self.surrogate](ratio_R, logprob_R, inputs.old_logprob_R, advantage_R, bounds)
        return ratio_R, value_R, clipped_R if bounded_R is None else bounded_R

    def _advantage(self, advantage_R: Tensor, entropy_R: Tensor) -> Tensor:
        if not self.advantage_alpha:
            return advantage_R
        return advantage_with_entropy(advantage_R, entropy_R, self.advantage_alpha, self.advantage_kappa)


def _field(objective: Objective, path: str) -> Any:
    """Return a field of an objective, or a field of one of its parts; None if the objective does not have the part."""
    part, _, field = path.partition(".")
    value = getattr(objective, part)
    return getattr(value, field) if field and value is not None else value
