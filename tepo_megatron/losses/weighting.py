"""Token weights and penalties that depend on the whole minibatch: Clip-Cov, KL-Cov and STEER.

A weighting is a function (tokens, part) -> BatchStatistics:
    tokens: the N response tokens of all ranks and microbatches, so that means, maxima and top-k are those of the minibatch
    part: the weighting's fields in the objective: shares, bounds and coefficients

It runs once per optimizer step, before any backward. No gradient passes through it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tepo_megatron.config.objective import ClipCov, KlCov, Steer
from tepo_megatron.losses.ratio import exp_clamped


@dataclass(frozen=True)
class MinibatchTokens:
    """All N response tokens of a minibatch, without gradient."""

    advantage_N: Tensor  # advantage A, with the entropy term if the objective has one
    logprob_N: Tensor  # nats, log-probs l under the current weights
    entropy_N: Tensor  # nats, entropies H under the current weights
    log_ratio_N: Tensor  # nats, l - l_old
    clipped_N: Tensor  # bool, the rows on which the surrogate's bounds act
    # int64, a random number that belongs to the token, whatever its place in the batch. It decides ties and draws.
    key_N: Tensor

    @property
    def covariance_N(self) -> Tensor:
        """Return (A - mean A)(l - mean l) of each token. Its mean over the tokens is Cov(A, l)."""
        return (self.advantage_N - self.advantage_N.mean()) * (self.logprob_N - self.logprob_N.mean())


@dataclass(frozen=True)
class TokenWeights:
    """The weights of one microbatch's rows: weight_R multiplies the surrogate, penalty_R multiplies |l - l_old|."""

    weight_R: Tensor
    penalty_R: Tensor


@dataclass(frozen=True)
class BatchStatistics:
    """The result of a weighting: the fields of `TokenWeights` for all N tokens of the minibatch."""

    # weight_N, penalty_N: the fields of `TokenWeights`
    weight_N: Tensor
    penalty_N: Tensor
    tokens: MinibatchTokens | None = None  # the tokens that they were computed from, for records of the loss

    def rows(self, token_R: Tensor) -> TokenWeights:
        """Return the weights of the rows whose indices among the N tokens are `token_R` (int64)."""
        return TokenWeights(self.weight_N[token_R], self.penalty_N[token_R])


@dataclass(frozen=True)
class Weighting:
    """An entry of `WEIGHTINGS`.

    `constant`: whether weight_N is 1 on every token. `Objective.has_constant_factors` depends on it.
    """

    statistics: Callable[[MinibatchTokens, Any], BatchStatistics]
    constant: bool = False


def clip_cov(tokens: MinibatchTokens, part: ClipCov) -> BatchStatistics:
    """Return weight 0 for randomly drawn tokens with a high covariance, 1 for the others (Clip-Cov, arXiv 2505.22617).

    `share` of all tokens is drawn, from the tokens with a covariance in (low, high) that the surrogate does not clip already.

    Args: see the top of this file.
    """
    covariance_N = tokens.covariance_N
    candidate_N = ~tokens.clipped_N & (covariance_N > part.low) & (covariance_N < part.high)
    last = torch.iinfo(torch.int64).max
    drawn = torch.where(candidate_N, tokens.key_N, last).argsort()[: _count(tokens, part.share)]
    return BatchStatistics(1.0 - (_marked(drawn, candidate_N) & candidate_N).to(covariance_N), torch.zeros_like(covariance_N))


def kl_cov(tokens: MinibatchTokens, part: KlCov) -> BatchStatistics:
    """Return the penalty coefficient beta of |l - l_old| for the tokens with the largest covariance (KL-Cov, arXiv 2505.22617).

    `share` of all tokens is picked; the others have penalty 0. All weights are 1.

    Args: see the top of this file.
    """
    covariance_N = tokens.covariance_N
    shuffled = tokens.key_N.argsort()  # the keys decide ties, so that the layout of the tokens does not
    largest = shuffled[covariance_N[shuffled].argsort(descending=True, stable=True)[: _count(tokens, part.share)]]
    chosen_N = _marked(largest, tokens.clipped_N)
    return BatchStatistics(torch.ones_like(covariance_N), part.beta * chosen_N.to(covariance_N))


def steer(tokens: MinibatchTokens, part: Steer) -> BatchStatistics:
    """Return smaller weights for tokens whose update would change the entropy more (STEER, arXiv 2510.10150).

    The TEPO paper calls it STEEL. The weight is lambda = clamp(exp(-k |Omega|), lambda_min, 1), where
    Omega = A r (1 - pi) (ln pi + H) is the estimated entropy change of the token. k = -ln lambda_min / max(max |Omega|, 0.02)
    gives lambda_min to the largest change of the minibatch, if that is at least 0.02.

    Args: see the top of this file.
    """
    ratio_N, not_chosen_N = exp_clamped(tokens.log_ratio_N), -torch.expm1(tokens.logprob_N)  # 1 - pi, exact near 0
    omega_N = (tokens.advantage_N * ratio_N * not_chosen_N * (tokens.logprob_N + tokens.entropy_N)).abs()
    largest = torch.cat((omega_N, omega_N.new_full((1,), 0.02))).max()
    weight_N = (omega_N * (math.log(part.lambda_min) / largest)).exp().clamp(part.lambda_min, 1.0)
    return BatchStatistics(weight_N, torch.zeros_like(weight_N))


def _count(tokens: MinibatchTokens, share: float) -> int:
    return max(1, math.floor(share * tokens.key_N.numel()))


def _marked(indices: Tensor, like_N: Tensor) -> Tensor:
    marked_N = torch.zeros_like(like_N, dtype=torch.bool)
    marked_N[indices] = True
    return marked_N


# by the `type` of the part
WEIGHTINGS: dict[str, Weighting | None] = {
    "none": None,
    "clip_cov": Weighting(clip_cov),
    "kl_cov": Weighting(kl_cov, constant=True),
    "steer": Weighting(steer),
}
