"""Metrics and histograms that a loss reports for one microbatch, all without gradient.

A metric is a (numerator, denominator) pair. Both are summed over microbatches and ranks before the division.
"""

from dataclasses import dataclass

from torch import Tensor

from tepo_megatron.losses.weighting import TokenWeights
from tepo_megatron.monitor.metrics import counts

# The names are a constant, because ranks that compute no loss need them too. A metric whose denominators add up to 0 was not
# measured.
METRICS = (
    "loss/total", "loss/kl", "loss/ref_kl", "loss/clip_fraction", "loss/clip_fraction_low", "loss/clip_fraction_high",
    "tepo/kl_mask_share", "tepo/mask_below_noise", "weighting/affected_share", "correction/weight_mean",
)  # fmt: skip
# dH (entropy change, nats) of tokens with A > 0 and with A < 0
HISTOGRAMS = ("tepo/dH_up", "tepo/dH_down")

Pairs = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class LossTerms:
    """The parts of a loss, per response row (_R)."""

    loss: Tensor  # scalar, the loss of the microbatch
    advantage_R: Tensor  # advantage, with the entropy term if the objective has one
    ratio_R: Tensor  # importance ratio, detached
    clipped_R: Tensor  # bool, the rows on which the surrogate's bounds act
    entropy_change_R: Tensor  # nats, current minus old entropy
    mask_R: Tensor  # bool, the rows with a KL penalty to the old policy
    aggregate_R: Tensor  # weight of the row in the loss, denominators included
    penalty_R: Tensor  # nats, masked KL to the old policy, before its coefficient
    ref_penalty_R: Tensor | None  # nats, KL to the reference policy, before its coefficient. None: the loss has no such term.
    # bool, rows whose weight is below 0.99 or whose penalty is not 0. None: the objective has no weighting.
    affected_R: Tensor | None
    correction_R: Tensor | None  # weight of the rollout/train correction. None: the objective has no correction.
    weights: TokenWeights | None  # weight and penalty of the weighting. None: the objective has no weighting.
    loss_R: Tensor  # part of the loss. The rows of all ranks and microbatches add up to the minibatch's loss.


def metrics(terms: LossTerms, whole_tokens: Tensor, noise_floor: float | None) -> Pairs:
    """Return a (numerator, denominator) pair for each name in METRICS.

    The denominators of `loss/total`, `loss/kl` and `loss/ref_kl` add up to 1 over the minibatch. The others are counts of rows.
    `noise_floor`: Nats; |dH| below it is rounding noise. None: not known.
    """
    t = terms
    tokens = t.loss.new_full((), float(t.mask_R.numel()))
    nothing = tokens.new_zeros(())
    share = tokens / whole_tokens
    pairs: Pairs = {
        "loss/total": (t.loss_R.detach().double().sum(), share),  # often a small difference of large sums
        "loss/kl": ((t.aggregate_R * t.penalty_R.detach()).sum(), share),
        "loss/clip_fraction": (t.clipped_R.sum(), tokens),
        "loss/clip_fraction_low": ((t.clipped_R & (t.ratio_R < 1)).sum(), tokens),
        "loss/clip_fraction_high": ((t.clipped_R & (t.ratio_R > 1)).sum(), tokens),
        "tepo/kl_mask_share": (t.mask_R.sum(), tokens),
        "tepo/mask_below_noise": (nothing, nothing),
        "loss/ref_kl": (nothing, nothing),
        "weighting/affected_share": (nothing, nothing),
        "correction/weight_mean": (nothing, nothing),
    }
    if noise_floor is not None:
        pairs["tepo/mask_below_noise"] = ((t.mask_R & (t.entropy_change_R.abs() < noise_floor)).sum(), t.mask_R.sum())
    if t.ref_penalty_R is not None:
        pairs["loss/ref_kl"] = ((t.aggregate_R * t.ref_penalty_R.detach()).sum(), share)
    if t.affected_R is not None:
        pairs["weighting/affected_share"] = (t.affected_R.sum(), tokens)
    if t.correction_R is not None:
        pairs["correction/weight_mean"] = (t.correction_R.sum(), tokens)
    return pairs


def histograms(terms: LossTerms) -> dict[str, Tensor]:
    """Return the counts of dH (int64, one per bin) for each name in HISTOGRAMS."""
    sides = (terms.advantage_R > 0, terms.advantage_R < 0)
    return {name: counts(terms.entropy_change_R, side_R) for name, side_R in zip(HISTOGRAMS, sides, strict=True)}


def rows(terms: LossTerms) -> dict[str, Tensor]:
    """Return the terms of each row by name, detached and without any computation; terms that the loss lacks are left out."""
    t = terms
    columns = {
        "advantage": t.advantage_R, "ratio": t.ratio_R, "clipped": t.clipped_R, "entropy_change": t.entropy_change_R,
        "kl_mask": t.mask_R, "kl": t.penalty_R, "ref_kl": t.ref_penalty_R, "correction": t.correction_R,
        "weight": None if t.weights is None else t.weights.weight_R,
        "penalty": None if t.weights is None else t.weights.penalty_R,
        "share": t.aggregate_R, "loss": t.loss_R,
    }  # fmt: skip
    return {name: x_R.detach() for name, x_R in columns.items() if x_R is not None}
