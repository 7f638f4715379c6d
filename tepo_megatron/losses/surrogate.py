"""Surrogates of the policy objective, to be maximised, per response row (_R).

A surrogate is a function (ratio_R, logprob_R, old_logprob_R, advantage_R, bounds) -> (value_R, clipped_R), a
`SurrogateFunction`:
    ratio_R: importance ratio r (ratio.py)
    logprob_R: current log-prob l of the response token, in nats
    old_logprob_R: old log-prob l_old of the response token, in nats
    advantage_R: advantage A
    bounds: the clip range and the other numbers that surrogates take
    value_R: the surrogate
    clipped_R: bool, the rows on which the bounds act: they remove the gradient or, for `stop_gradient`, limit the weight
A surrogate in `LOG_RATIO_BOUNDS` also bounds the log-ratio of each token before it becomes a ratio.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_TINY = 1e-20  # smallest probability of all other tokens in the binary KL


@dataclass(frozen=True)
class ClipBounds:
    """The numbers that surrogates take."""

    low: float  # the ratio is clipped from below at 1 - low
    high: float  # the ratio is clipped from above at 1 + high
    # Dual-clip constant above 1: where A < 0, the value does not fall below dual * A. None: no such floor.
    dual: float | None = None
    # tau_positive, tau_negative: temperatures of `soft_gate` where A > 0, and elsewhere
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    # Limit of the divergence of a token in `trust_region_tv` (of probabilities) and `trust_region_kl` (nats)
    max_divergence: float = 0.15

    def clip(self, ratio_R: Tensor) -> Tensor:
        """Return the ratio clamped to [1 - low, 1 + high]."""
        return ratio_R.clamp(1 - self.low, 1 + self.high)


SurrogateFunction = Callable[[Tensor, Tensor, Tensor, Tensor, ClipBounds], tuple[Tensor, Tensor]]


def clip(
    ratio_R: Tensor, logprob_R: Tensor, old_logprob_R: Tensor, advantage_R: Tensor, bounds: ClipBounds
) -> tuple[Tensor, Tensor]:
    """Return min(r A, clip(r) A), PPO's pessimistic bound (arXiv 1707.06347, Eq. 7).

    With `bounds.dual` and A < 0 it is max(min(r A, clip(r) A), dual A), dual-clip PPO (arXiv 1912.09729).
    """
    value_R = torch.minimum(ratio_R * advantage_R, bounds.clip(ratio_R) * advantage_R)
    positive, negative = advantage_R > 0, advantage_R < 0
    clipped_R = (positive & (ratio_R > 1 + bounds.high)) | (negative & (ratio_R < 1 - bounds.low))
    if bounds.dual is not None:
        clipped_R = clipped_R | (negative & (ratio_R > bounds.dual))
        value_R = torch.where(negative, torch.maximum(value_R, bounds.dual * advantage_R), value_R)
    return value_R, clipped_R


def clip_eq4(
    ratio_R: Tensor, logprob_R: Tensor, old_logprob_R: Tensor, advantage_R: Tensor, bounds: ClipBounds
) -> tuple[Tensor, Tensor]:
    """Return min(r, clip(r)) A, the surrogate of TEPO's Eq. 4 as printed.

    Eq. 4 takes the minimum before it multiplies by A, which makes it min(r, 1 + high) A. The ratio is never clipped from below,
    and above 1 + high there is no gradient whatever the sign of A: a wrong answer that became likelier is not pushed down.
    """
    return torch.minimum(ratio_R, bounds.clip(ratio_R)) * advantage_R, ratio_R > 1 + bounds.high


def unclipped(
    ratio_R: Tensor, logprob_R: Tensor, old_logprob_R: Tensor, advantage_R: Tensor, bounds: ClipBounds
) -> tuple[Tensor, Tensor]:
    """Return r A, without clipping (Algorithm 1, line 15)."""
    return ratio_R * advantage_R, torch.zeros_like(ratio_R, dtype=torch.bool)


def stop_gradient(
    ratio_R: Tensor, logprob_R: Tensor, old_logprob_R: Tensor, advantage_R: Tensor, bounds: ClipBounds
) -> tuple[Tensor, Tensor]:
    """Return sg[clip(r)] A l (CISPO, arXiv 2506.13585).

    The clipped ratio is a detached weight: a clipped token still has a gradient.
    """
    weight_R = bounds.clip(ratio_R).detach()
    return weight_R * advantage_R * logprob_R, weight_R != ratio_R


def reinforce(
    ratio_R: Tensor, logprob_R: Tensor, old_logprob_R: Tensor, advantage_R: Tensor, bounds: ClipBounds
) -> tuple[Tensor, Tensor]:
    """Return A l, REINFORCE (Williams, 1992). The ratio has no effect."""
    return advantage_R * logprob_R, torch.zeros_like(ratio_R, dtype=torch.bool)


def clip_tokens(
    ratio_R: Tensor, logprob_R: Tensor, old_logprob_R: Tensor, advantage_R: Tensor, bounds: ClipBounds
) -> tuple[Tensor, Tensor]:
    """Return r A, where r is formed from token ratios that `bounded_log_ratio` has clipped (GMPO, arXiv 2507.20673).

    With the sequence ratio it is the geometric mean of the clipped token ratios times A: a clipped token has no gradient, the
    others keep theirs.
    """
    return unclipped(ratio_R, logprob_R, old_logprob_R, advantage_R, bounds)


def soft_gate(
    ratio_R: Tensor, logprob_R: Tensor, old_logprob_R: Tensor, advantage_R: Tensor, bounds: ClipBounds
) -> tuple[Tensor, Tensor]:
    """Return (4 / tau) sigmoid(tau (r - 1)) A, a smooth gate in the place of clipping (SAPO, arXiv 2511.20347).

    The gradient with respect to r is A at r = 1 and falls to 0 on both sides. tau is tau_positive where A > 0, else
    tau_negative. No row counts as clipped.
    """
    tau_R = torch.full_like(advantage_R, bounds.tau_negative).masked_fill(advantage_R > 0, bounds.tau_positive)
    value_R = 4 / tau_R * torch.sigmoid(tau_R * (ratio_R - 1)) * advantage_R
    return value_R, torch.zeros_like(ratio_R, dtype=torch.bool)


def trust_region_tv(
    ratio_R: Tensor, logprob_R: Tensor, old_logprob_R: Tensor, advantage_R: Tensor, bounds: ClipBounds
) -> tuple[Tensor, Tensor]:
    """Return r A on the tokens inside the trust region, 0 on the others (DPPO-Binary-TV, arXiv 2602.04879, Eq. 12 and 13).

    A token is outside if |pi - pi_old| > max_divergence and the update would move it further: A > 0 and r > 1, or A < 0 and
    r < 1. The mask is detached.
    """
    apart_R = (logprob_R.detach().exp() - old_logprob_R.exp()).abs()
    return _inside(apart_R > bounds.max_divergence, ratio_R, advantage_R)


def trust_region_kl(
    ratio_R: Tensor, logprob_R: Tensor, old_logprob_R: Tensor, advantage_R: Tensor, bounds: ClipBounds
) -> tuple[Tensor, Tensor]:
    """Return `trust_region_tv` with the binary KL(pi_old || pi) for the distance (DPPO-Binary-KL, arXiv 2602.04879, Eq. 14).

    It is the KL between the token and all others: mu ln(mu / pi) + (1 - mu) ln((1 - mu) / (1 - pi)) with mu = pi_old.
    """
    logprob_R = logprob_R.detach()
    others_R, old_others_R = (-torch.expm1(x).clamp(max=-_TINY) for x in (logprob_R, old_logprob_R))
    kl_R = old_logprob_R.exp() * (old_logprob_R - logprob_R) + old_others_R * (old_others_R / others_R).log()
    return _inside(kl_R > bounds.max_divergence, ratio_R, advantage_R)


def _inside(far_R: Tensor, ratio_R: Tensor, advantage_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return r A where a token is not both far and moving away, else 0, and the rows that are."""
    outside_R = far_R & (advantage_R * (ratio_R.detach() - 1) > 0)
    return torch.where(outside_R, 0.0, ratio_R * advantage_R), outside_R


def bounded_log_ratio(log_ratio_R: Tensor, advantage_R: Tensor, bounds: ClipBounds) -> tuple[Tensor, Tensor]:
    """Return the log of PPO's pessimistic token ratio, and the rows that it clips (bool).

    It is min(x, ln(1 + high)) where A > 0, max(x, ln(1 - low)) where A < 0, else x. A clipped row has no gradient.

    Args:
        log_ratio_R: x = l - l_old in nats.
        advantage_R: Advantage A.
    """
    high, low = math.log1p(bounds.high), math.log1p(-bounds.low) if bounds.low < 1 else -math.inf
    bounded_R = torch.where(advantage_R > 0, log_ratio_R.clamp(max=high), log_ratio_R)
    bounded_R = torch.where(advantage_R < 0, log_ratio_R.clamp(min=low), bounded_R)
    return bounded_R, ((advantage_R > 0) & (log_ratio_R > high)) | ((advantage_R < 0) & (log_ratio_R < low))


_SURROGATES = (
    clip, clip_eq4, unclipped, stop_gradient, reinforce, clip_tokens, soft_gate, trust_region_tv, trust_region_kl,
)  # fmt: skip
SURROGATES: dict[str, SurrogateFunction] = {surrogate.__name__: surrogate for surrogate in _SURROGATES}
LOG_RATIO_BOUNDS: dict[str, Callable[[Tensor, Tensor, ClipBounds], tuple[Tensor, Tensor]]] = {"clip_tokens": bounded_log_ratio}
