"""Every objective in fp64, term by term: the reference of `tepo audit`, of the tests and of `tests/conformance`.

It is written from the papers' formulas, shares no code with `losses`, which it is there to check, and needs torch alone.

Suffixes: _N response tokens of the minibatch, in the order of sequence and position; _B its sequences.

loss = -sum_N share * (c * weight * surrogate(ratio, A) - penalty * |l - l_old| - beta * M * KL - ref_beta * KL_ref + alpha * H)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

NEAR = 1e-5  # relative distance to a threshold within which fp32 may decide differently
NEAR_ZERO = 2e-7
# a field of Formula -> part and field of an objective, as the config has them
FIELDS = {
    "weighting": ("weighting", "type"), "cov_share": ("weighting", "share"), "cov_low": ("weighting", "low"),
    "cov_high": ("weighting", "high"), "cov_beta": ("weighting", "beta"), "steer_lambda_min": ("weighting", "lambda_min"),
    "correction": ("correction", "type"), "correction_low": ("correction", "low"), "correction_high": ("correction", "high"),
    "ref_beta": ("ref_kl", "beta"), "ref_kl": ("ref_kl", "estimator"), "ref_kl_in": ("ref_kl", "where"),
}  # fmt: skip


@dataclass(frozen=True)
class Formula:
    """The parts of an objective. Only `sequence_mean_token_sum_norm` divides by `max_response_tokens`."""

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
    correction_low: float = 0.0  # 0: no lower bound
    correction_high: float = math.inf
    mask_truncated: bool = False
    dynamic_sampling: bool = False
    overlong_shaping: bool = False
    max_response_tokens: int = 40
    log_ratio_limit: float = 20.0  # nats; log-ratios are clamped to +- this before exp

    @classmethod
    def of(cls, objective: Mapping[str, Any], **parts: Any) -> Formula:
        """Return an objective, as nested mappings, as a method. `parts` replace its own."""
        flat = dict(objective)
        nested = {part: flat.pop(part) or {} for part in ("weighting", "correction", "ref_kl")}
        flat |= {name: nested[part][field] for name, (part, field) in FIELDS.items() if field in nested[part]}
        return cls(**flat | parts)


@dataclass(frozen=True)
class ReferenceBatch:
    """The response tokens of a minibatch."""

    lengths_B: Tensor  # int64, response tokens of each sequence; may be 0
    prompts_B: Tensor  # int64, number of the prompt of each sequence
    inputs: Mapping[str, Tensor]  # inputs of the loss, _N, under the names under which `actor/recorder.py` records them

    @cached_property
    def sequence_N(self) -> Tensor:
        """Return the sequence of each token."""
        return torch.repeat_interleave(self.lengths_B)

    @cached_property
    def length_N(self) -> Tensor:
        """Return |y| of the sequence of each token."""
        return self.lengths_B[self.sequence_N]

    def sum_of_sequence(self, x_N: Tensor) -> Tensor:
        """Return the sum of x over the sequence of each token."""
        return x_N.new_zeros(len(self.lengths_B)).index_add(0, self.sequence_N, x_N)[self.sequence_N]

    def mean_of_prefix(self, x_N: Tensor) -> Tensor:
        """Return the mean of x over each token and those before it in its sequence."""
        place_N = torch.arange(x_N.numel())
        count_N = place_N - (self.lengths_B.cumsum(0) - self.lengths_B)[self.sequence_N] + 1
        sums = torch.cat((x_N.new_zeros(1), x_N.cumsum(0)))
        return (sums[place_N + 1] - sums[place_N + 1 - count_N]) / count_N


class Comparisons:
    """Comparisons with thresholds, and how near to one the compared numbers were. Equal numbers are equal in fp32 too.

    Attributes:
        margin: Least distance of a number to its threshold.
        near_N: bool, tokens with a number so near to its threshold that fp32 may decide differently.
    """

    def __init__(self, tokens: int, log_ratio_limit: float) -> None:
        self.margin, self.near_N, self.limit = math.inf, torch.zeros(tokens, dtype=torch.bool), log_ratio_limit

    def above(self, a: Tensor | float, b: Tensor | float, where: Tensor | bool = True) -> Tensor:
        """Return `a > b`, of the tokens `where` it decides anything; False of the others."""
        a, b = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (a, b))
        apart_N = self._apart((a - b).abs(), (a != b) & torch.as_tensor(where))
        self.near_N |= apart_N <= NEAR * torch.minimum(a.abs(), b.abs()) + NEAR_ZERO
        return (a > b) & where

    def clamp(self, x_N: Tensor) -> Tensor:
        """Return log-ratios within the limit; a constant beyond it."""
        apart_N = (x_N.detach().abs() - self.limit).abs()
        self._apart(apart_N, apart_N != 0)
        return torch.where(x_N.abs() > self.limit, torch.full_like(x_N, self.limit).copysign(x_N.detach()), x_N)

    def _apart(self, apart_N: Tensor, where_N: Tensor) -> Tensor:
        apart_N = torch.where(where_N, apart_N, math.inf)
        self.margin = min(self.margin, float(apart_N.min())) if apart_N.numel() else self.margin
        return apart_N


@dataclass(frozen=True)
class Outcome:
    """The loss of a minibatch."""

    # Terms of the loss, _N, by the names under which `actor/recorder.py` records them; `loss` has the graph
    terms: dict[str, Tensor]
    magnitude: float  # sum of the absolute values that the loss adds up
    # margin, near_N: see Comparisons
    margin: float
    near_N: Tensor

    @property
    def loss(self) -> Tensor:
        """Return the loss of the minibatch."""
        return self.terms["loss"].sum()


def evaluate(m: Formula, batch: ReferenceBatch) -> Outcome:
    """Return the loss of a minibatch, differentiable with respect to the inputs `logprob`, `entropy` and `teacher_kl`. Raises
    KeyError if an input that the method needs is missing, or one of its parts is unknown.
    """
    inputs = batch.inputs
    logprob_N, entropy_N = inputs["logprob"], inputs["entropy"]
    compare = Comparisons(logprob_N.numel(), m.log_ratio_limit)
    x_N = logprob_N - inputs["old_logprob"]
    advantage_N = _advantage(m, inputs["group_advantage"], entropy_N)
    ratio_N, surrogate_N, clipped_N = _policy(m, batch, compare, logprob_N, x_N, advantage_N)
    terms = {"advantage": advantage_N, "ratio": ratio_N, "clipped": clipped_N}
    parts: list[Tensor] = []
    if m.correction != "none":
        terms["correction"] = _correction(m, batch, compare, inputs["old_logprob"] - inputs["rollout_logprob"])
        surrogate_N = surrogate_N * terms["correction"]
    if m.weighting != "none":
        terms["weight"], terms["penalty"] = _weighting(m, batch, compare)
        surrogate_N = surrogate_N * terms["weight"]
        parts.append(-terms["penalty"] * x_N.abs())
    terms["entropy_change"] = entropy_N.detach() - inputs["old_entropy"]
    terms["kl_mask"] = _kl_mask(m, compare, advantage_N, terms["entropy_change"])
    terms["kl"] = torch.where(terms["kl_mask"], divergence(m.kl, compare, x_N, x_N), 0.0)
    parts += [surrogate_N, -m.beta * terms["kl"], m.entropy_coefficient * entropy_N]
    if m.ref_beta and m.ref_kl_in == "loss":
        if m.ref_kl == "full":
            terms["ref_kl"] = inputs["teacher_kl"]
        else:
            terms["ref_kl"] = divergence(m.ref_kl, compare, logprob_N - inputs["ref_logprob"], x_N)
        parts.append(-m.ref_beta * terms["ref_kl"])
    terms["share"] = 1 / _denominator(m, batch)
    parts_N = terms["share"] * torch.stack(parts)
    terms["loss"] = -parts_N.sum(0)
    return Outcome(terms, float(parts_N.detach().abs().sum()), compare.margin, compare.near_N)


def _advantage(m: Formula, group_N: Tensor, entropy_N: Tensor) -> Tensor:
    if not m.advantage_alpha:
        return group_N
    return group_N + torch.minimum(m.advantage_alpha * entropy_N.detach(), group_N.abs() / m.advantage_kappa)


def _policy(
    m: Formula, batch: ReferenceBatch, compare: Comparisons, logprob_N: Tensor, x_N: Tensor, a_N: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ratio, surrogate, and the tokens whose ratio a bound replaced."""
    low, high = 1 - m.clip_low if m.clip_low < 1 else -math.inf, 1 + m.clip_high  # ratios are above 0
    held_N = torch.zeros(x_N.shape, dtype=torch.bool)
    if m.surrogate == "clip_tokens":  # GMPO clips before the mean
        log_low = math.log(low) if low > 0 else low
        x_N, over_N, under_N = _bounded(compare, x_N, log_low, math.log(high), a_N > 0, a_N < 0)
        held_N = over_N | under_N
    mean_N = batch.sum_of_sequence(x_N) / batch.length_N
    log_ratios = {"token": x_N, "none": 0 * x_N.detach(), "sequence": mean_N, "prefix": batch.mean_of_prefix(x_N)}
    r_N = compare.clamp(log_ratios[m.ratio]).exp()
    if m.surrogate == "clip":
        bounded_N, over_N, under_N = _bounded(compare, r_N, low, high, a_N > 0, a_N < 0)
        value_N, clipped_N = bounded_N * a_N, over_N | under_N
        if m.dual_clip is not None:
            floored_N = compare.above(r_N, m.dual_clip, a_N < 0)
            value_N, clipped_N = torch.where(floored_N, m.dual_clip * a_N, value_N), clipped_N | floored_N
    elif m.surrogate == "clip_eq4":  # min(r, clip(r)) A
        bounded_N, clipped_N, _ = _bounded(compare, r_N, low, high, under=False)
        value_N = bounded_N * a_N
    elif m.surrogate == "stop_gradient":
        bounded_N, over_N, under_N = _bounded(compare, r_N, low, high)
        value_N, clipped_N = bounded_N.detach() * a_N * logprob_N, over_N | under_N
    elif m.surrogate in ("trust_region_tv", "trust_region_kl"):
        clipped_N = _leaves_trust_region(m, compare, logprob_N.detach(), x_N.detach(), a_N)
        value_N = torch.where(clipped_N, 0.0, r_N * a_N)
    else:
        tau_N = torch.where(a_N > 0, torch.full_like(a_N, m.tau_positive), m.tau_negative)
        gated_N = 4 * a_N / (tau_N * (1 + (-tau_N * (r_N - 1)).exp()))
        values = {"unclipped": r_N * a_N, "clip_tokens": r_N * a_N, "reinforce": a_N * logprob_N, "soft_gate": gated_N}
        value_N, clipped_N = values[m.surrogate], held_N
    return r_N, value_N, clipped_N


def _bounded(
    compare: Comparisons, x_N: Tensor, low: float, high: float, over: Tensor | bool = True, under: Tensor | bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x with its bounds in place of it where it is beyond them, and the tokens above and below."""
    over_N, under_N = compare.above(x_N, high, over), compare.above(low, x_N, under)
    return torch.where(over_N, high, torch.where(under_N, low, x_N)), over_N, under_N


def _leaves_trust_region(m: Formula, compare: Comparisons, logprob_N: Tensor, x_N: Tensor, a_N: Tensor) -> Tensor:
    """Return the tokens that DPPO drops: too far from the old policy, and their update would move them further."""
    old_N = logprob_N - x_N
    pi_N, mu_N = logprob_N.exp(), old_N.exp()
    distance_N = (pi_N - mu_N).abs()
    if m.surrogate == "trust_region_kl":
        other_pi_N, other_mu_N = ((-l_N.expm1()).clamp(min=1e-20) for l_N in (logprob_N, old_N))
        distance_N = mu_N * -x_N + other_mu_N * (other_mu_N / other_pi_N).log()
    return compare.above(distance_N, m.max_divergence, a_N * x_N.sign() > 0)


def _correction(m: Formula, batch: ReferenceBatch, compare: Comparisons, mismatch_N: Tensor) -> Tensor:
    """Return c, the factor that the mismatch l_old - l_rollout puts on the surrogate."""
    if m.correction in ("sequence_mis", "geometric_mask"):
        mismatch_N = batch.sum_of_sequence(mismatch_N)
    if m.correction == "geometric_mask":
        mismatch_N = mismatch_N / batch.length_N
    rho_N = compare.clamp(mismatch_N).exp()
    kept_N = {"tis": rho_N, "icepop": rho_N, "sequence_mis": rho_N, "geometric_mask": torch.ones_like(rho_N)}[m.correction]
    if m.correction == "tis":
        return kept_N.clamp(max=m.correction_high)
    outside_N = compare.above(rho_N, m.correction_high) | compare.above(m.correction_low, rho_N, m.correction_low > 0)
    return torch.where(outside_N, 0.0, kept_N)


def _weighting(m: Formula, batch: ReferenceBatch, compare: Comparisons) -> tuple[Tensor, Tensor]:
    """Return weight and penalty of each token, from the statistics of the pass that the weighting used."""
    l_N, h_N, x_N, key_N = (batch.inputs[f"weighting_{name}"] for name in ("logprob", "entropy", "log_ratio", "key"))
    a_N, n = _advantage(m, batch.inputs["group_advantage"], h_N), l_N.numel()
    one_N, chosen_N = torch.ones_like(l_N), torch.zeros(n, dtype=torch.bool)
    if m.weighting == "steer":
        change_N = (a_N * compare.clamp(x_N).exp() * l_N.expm1() * (l_N + h_N)).abs()
        most = change_N.max().clamp(min=0.02) if n else 1.0
        return (math.log(m.steer_lambda_min) * change_N / most).exp(), torch.zeros_like(l_N)
    covariance_N = (a_N - a_N.mean()) * (l_N - l_N.mean())
    picks = max(1, math.floor(m.cov_share * n))
    if m.weighting == "kl_cov":
        by_key = key_N.argsort()
        order = by_key[covariance_N[by_key].argsort(descending=True, stable=True)]
        chosen_N[order[:picks]] = True
        if n > picks:  # a token next to the last one that is chosen, or the first one that is not
            compare.above(covariance_N, covariance_N[order[picks]], chosen_N)
            compare.above(covariance_N, covariance_N[order[picks - 1]], ~chosen_N)
        return one_N, m.cov_beta * chosen_N.double()
    if m.weighting != "clip_cov":
        raise KeyError(m.weighting)
    own = Comparisons(n, m.log_ratio_limit)
    _, _, clipped_N = _policy(m, batch, own, l_N, x_N, a_N)
    candidate_N = own.above(covariance_N, m.cov_low, ~clipped_N) & own.above(m.cov_high, covariance_N, ~clipped_N)
    candidates = candidate_N.nonzero()[:, 0]
    chosen_N[candidates[key_N[candidates].argsort()][:picks]] = True
    compare.margin = min(compare.margin, own.margin)
    compare.near_N |= own.near_N.any()  # one candidate more or less changes who is drawn
    return torch.where(chosen_N, 0.0, one_N), torch.zeros_like(l_N)


def _kl_mask(m: Formula, compare: Comparisons, a_N: Tensor, change_N: Tensor) -> Tensor:
    """Return M."""
    if m.kl_mask in ("none", "all"):
        return torch.full(a_N.shape, m.kl_mask == "all")
    falling, rising = {"falling_entropy": (True, False), "rising_entropy": (False, True), "both": (True, True)}[m.kl_mask]
    falls_N = compare.above(-m.kl_entropy_tolerance, change_N, (a_N > 0) & falling)
    return falls_N | compare.above(change_N, m.kl_entropy_tolerance, (a_N < 0) & rising)


def divergence(kind: str, compare: Comparisons, x_N: Tensor, log_ratio_N: Tensor) -> Tensor:
    """Return the estimator of KL(pi || other) from x = l - l_other and the log-ratio l - l_old."""
    y_N, r_N = compare.clamp(x_N), compare.clamp(log_ratio_N).exp()
    q_N = (-y_N).expm1()  # other / pi - 1
    weighted_N = r_N * (q_N + y_N)
    return {"k1": x_N, "k2": x_N**2 / 2, "k3": q_N + x_N, "k3_importance_weighted": weighted_N, "abs": x_N.abs()}[kind]


def _denominator(m: Formula, batch: ReferenceBatch) -> Tensor:
    """Return D of each token."""
    one_N, sequences = torch.ones(batch.length_N.shape, dtype=torch.float64), len(batch.lengths_B)
    prompts, prompt_of_B = batch.prompts_B.unique(return_inverse=True)
    tokens = torch.zeros(len(prompts), dtype=torch.int64).index_add(0, prompt_of_B, batch.lengths_B)
    return {
        "token_mean": one_N * one_N.numel(),
        "sequence_mean_token_mean": one_N * sequences * batch.length_N,
        "sequence_mean_token_sum": one_N * sequences,
        "sequence_mean_token_sum_norm": one_N * sequences * m.max_response_tokens,
        "prompt_mean_token_mean": one_N * len(prompts) * tokens[prompt_of_B][batch.sequence_N],
    }[m.aggregate]
