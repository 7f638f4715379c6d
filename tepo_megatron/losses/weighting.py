"""Weights that depend on the whole minibatch: which tokens, out of all N, learn less, and which pay for moving.

A weighting is a function (MinibatchTokens, WeightingOptions) -> BatchStatistics. It runs once per optimizer step, before any
backward, over all ranks' tokens at once, so its means, maxima and top-k are those of the minibatch. No gradient passes through.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tepo_megatron.losses.ratio import exp_clamped


@dataclass(frozen=True)
class MinibatchTokens:
    """All N response tokens of a minibatch, without gradient.

    logprob_N, entropy_N: nats, of the current weights; log_ratio_N: l - l_old; clipped_N: bool, rows on which the surrogate's
    bounds act; key_N: int64, a random number that belongs to the token, not to its place (ties and draws are settled by it).
    """

    advantage_N: Tensor
    logprob_N: Tensor
    entropy_N: Tensor
    log_ratio_N: Tensor
    clipped_N: Tensor
    key_N: Tensor

    @property
    def covariance_N(self) -> Tensor:
        """(A - mean A)(l - mean l), whose mean over the tokens is Cov(A, l)."""
        return (self.advantage_N - self.advantage_N.mean()) * (self.logprob_N - self.logprob_N.mean())


@dataclass(frozen=True)
class WeightingOptions:
    """share: of the N tokens, at least one token; low, high: bounds on the covariance; beta: coefficient of |l - l_old|;
    lambda_min: the smallest weight.
    """

    share: float
    low: float
    high: float
    beta: float
    lambda_min: float


@dataclass(frozen=True)
class TokenWeights:
    """weight_R multiplies the surrogate, penalty_R multiplies |l - l_old|; of the rows of one microbatch."""

    weight_R: Tensor
    penalty_R: Tensor


@dataclass(frozen=True)
class BatchStatistics:
    """What a weighting found: `TokenWeights` of all N tokens of the minibatch."""

    weight_N: Tensor
    penalty_N: Tensor

    def rows(self, token_R: Tensor) -> TokenWeights:
        """Those of a microbatch's rows; token_R: their places among the N tokens."""
        return TokenWeights(self.weight_N[token_R], self.penalty_N[token_R])


@dataclass(frozen=True)
class Weighting:
    """statistics: what it computes; constant: whether weight_N is 1 throughout."""

    statistics: Callable[[MinibatchTokens, WeightingOptions], BatchStatistics]
    constant: bool = False


def clip_cov(tokens: MinibatchTokens, options: WeightingOptions) -> BatchStatistics:
    """Clip-Cov (arXiv 2505.22617): `share` of the tokens, drawn from those with a covariance in (low, high) that the surrogate
    does not clip anyway, learn nothing.
    """
    covariance_N = tokens.covariance_N
    candidate_N = ~tokens.clipped_N & (covariance_N > options.low) & (covariance_N < options.high)
    last = torch.iinfo(torch.int64).max
    drawn = torch.where(candidate_N, tokens.key_N, last).argsort()[: _count(tokens, options)]
    return BatchStatistics(1.0 - (_marked(drawn, candidate_N) & candidate_N).to(covariance_N), torch.zeros_like(covariance_N))


def kl_cov(tokens: MinibatchTokens, options: WeightingOptions) -> BatchStatistics:
    """KL-Cov (arXiv 2505.22617): the `share` of the tokens with the largest covariance pay beta |l - l_old|."""
    covariance_N = tokens.covariance_N
    shuffled = tokens.key_N.argsort()  # ties fall as the keys do, not as the tokens happen to lie
    largest = shuffled[covariance_N[shuffled].argsort(descending=True, stable=True)[: _count(tokens, options)]]
    chosen_N = _marked(largest, tokens.clipped_N)
    return BatchStatistics(torch.ones_like(covariance_N), options.beta * chosen_N.to(covariance_N))


def steer(tokens: MinibatchTokens, options: WeightingOptions) -> BatchStatistics:
    """STEER (arXiv 2510.10150; "STEEL" in the TEPO paper): tokens whose step would change the entropy much learn less.

    lambda = clamp(exp(-k |Omega|), lambda_min, 1), Omega = A r (1 - pi) (ln pi + H) the token's estimated entropy change and
    k = -ln lambda_min / max(max |Omega|, 0.02), so the largest change of the minibatch gets lambda_min.
    """
    ratio_N, not_chosen_N = exp_clamped(tokens.log_ratio_N), -torch.expm1(tokens.logprob_N)  # 1 - pi, exact near 0
    omega_N = (tokens.advantage_N * ratio_N * not_chosen_N * (tokens.logprob_N + tokens.entropy_N)).abs()
    largest = torch.cat((omega_N, omega_N.new_full((1,), 0.02))).max()
    weight_N = (omega_N * (math.log(options.lambda_min) / largest)).exp().clamp(options.lambda_min, 1.0)
    return BatchStatistics(weight_N, torch.zeros_like(weight_N))


def _count(tokens: MinibatchTokens, options: WeightingOptions) -> int:
    return max(1, math.floor(options.share * tokens.key_N.numel()))


def _marked(indices: Tensor, like_N: Tensor) -> Tensor:
    marked_N = torch.zeros_like(like_N, dtype=torch.bool)
    marked_N[indices] = True
    return marked_N


WEIGHTINGS: dict[str, Weighting | None] = {
    "none": None,
    "clip_cov": Weighting(clip_cov),
    "kl_cov": Weighting(kl_cov, constant=True),
    "steer": Weighting(steer),
}
