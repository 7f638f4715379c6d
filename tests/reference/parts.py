"""Types of the reference's objectives: methods, responses, tokens, and comparisons that remember their closest margin."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

LIMIT = 20.0  # bound on a log-ratio, before exp
MAX_RESPONSE_TOKENS = 40  # limit of the length of a response


@dataclass(frozen=True)
class Method:
    """The parts of a method. Bounds of a correction have no default here."""

    ratio: str
    surrogate: str = "clip"
    clip_low: float = 0.0
    clip_high: float = 0.0
    dual_clip: float | None = None
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    max_divergence: float = 0.0
    aggregate: str = "token_mean"
    advantage: str = "std"
    kl: str = "k3"
    kl_mask: str = "none"
    kl_entropy_tolerance: float = 0.0
    beta: float = 0.0
    ref_kl: str = "k3"
    ref_beta: float = 0.0
    ref_kl_in: str = "loss"
    entropy_coefficient: float = 0.0
    advantage_alpha: float = 0.0
    advantage_kappa: float = 1.0
    weighting: str = "none"
    cov_share: float = 0.0
    cov_low: float = 0.0
    cov_high: float = 0.0
    cov_beta: float = 0.0
    steer_lambda_min: float = 1.0
    correction: str = "none"
    correction_low: float = 0.0
    correction_high: float = math.inf
    mask_truncated: bool = False
    dynamic_sampling: bool = False
    overlong_shaping: bool = False
    max_response_tokens: int = MAX_RESPONSE_TOKENS
    log_ratio_limit: float = LIMIT  # nats; infinite where an implementation has none


@dataclass(frozen=True)
class Response:
    """One sampled response of |y| >= 0 tokens: advantage, prompt, and of each token nats under the other policies and a key."""

    advantage: float
    old: list[float]
    old_entropy: list[float]
    rollout: list[float]
    ref: list[float]
    keys: list[int]
    prompt: int = 0


@dataclass
class Conditions:
    """Strict comparisons, and the closest of them so far. Exactly equal numbers are exactly equal in fp32 too."""

    margin: float = math.inf
    limit: float = LIMIT

    def above(self, a: float, b: float) -> bool:
        """Return whether a > b, and record the distance."""
        if a != b:
            self.margin = min(self.margin, abs(a - b))
        return a > b


@dataclass
class Token:
    """A response token during the evaluation.

    Attributes:
        a: Advantage with its entropy term.
        x: l - l_old.
        y: Log of the ratio, clamped.
    """

    a: float
    logprob: Tensor
    entropy: Tensor
    x: Tensor
    y: Tensor
    old_entropy: float
    ref: float
    key: int
    correction: float
    share: float  # its aggregation weight
    surrogate: Tensor = field(default_factory=lambda: number(0.0))
    clipped: bool = False


def number(value: float) -> Tensor:
    """Return a constant as a tensor."""
    return torch.tensor(value, dtype=torch.float64)


def clamped(x: Tensor, conditions: Conditions) -> Tensor:
    """Return x within the limit; beyond it a constant."""
    if conditions.above(abs(x.item()), conditions.limit):
        return number(math.copysign(conditions.limit, x.item()))
    return x
