"""The loss of a minibatch in fp64, term by term, with NumPy. It shares no code with `losses`, which it is there to check.

Suffixes: _N response tokens of the minibatch, in the order of sequence and position.

loss = -sum_N share * ( c * weight * surrogate(ratio, A) - penalty * |l - l_old| - beta * M * KL - b * KL_ref + alpha * H )
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tepo_megatron.audit.reading import Array, AuditBatch, AuditUpdate
from tepo_megatron.errors import DataError

_LIMIT = 20.0  # nats; log-ratios are clamped to +- this before exp
_NEAR = 1e-5  # relative distance to a threshold within which fp32 may decide differently
_NEAR_ZERO = 2e-7


@dataclass
class Comparisons:
    """Comparisons of numbers, with the tokens whose number lies so near to the threshold that fp32 may decide differently.

    Attributes:
        near_N: bool, these tokens.
    """

    near_N: Array

    def above(self, a: Any, b: Any) -> Array:
        """Return a > b."""
        a, b = np.broadcast_arrays(np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64))
        with np.errstate(invalid="ignore"):  # inf - inf
            self.near_N |= (a != b) & (np.abs(a - b) <= _NEAR * np.minimum(np.abs(a), np.abs(b)) + _NEAR_ZERO)
        return a > b


class _Evaluation:
    """One minibatch during its evaluation."""

    def __init__(self, batch: AuditBatch, update: AuditUpdate) -> None:
        self.batch, self.update = batch, update
        self.compare = Comparisons(np.zeros(update.sequence_N.size, dtype=bool))
        self.segment_N = np.searchsorted(update.sequences, update.sequence_N)
        self.lengths_N = batch.response_lengths_B[update.sequence_N]

    def over_sequence(self, x_N: Array) -> Array:
        """Return the sum of x over the token's sequence."""
        sums = np.bincount(self.segment_N, weights=x_N, minlength=len(self.update.sequences))
        return sums[self.segment_N]


def evaluate(batch: AuditBatch, update: AuditUpdate) -> tuple[dict[str, Array], Array]:
    """Return the terms of the loss by the names under which training records them, and the tokens near to a threshold.

    Raises:
        DataError: An input that the objective needs was not recorded.
    """
    e, o, given = _Evaluation(batch, update), update.objective, update.inputs
    try:
        x_N = given["logprob"] - given["old_logprob"]
        advantage_N = _advantage(e, given["group_advantage"], given["entropy"])
        ratio_N, value_N, clipped_N = _policy(e, given["logprob"], x_N, advantage_N)
        found: dict[str, Array] = {"advantage": advantage_N, "ratio": ratio_N, "clipped": clipped_N}
        if o.correction.type != "none":
            found["correction"] = _correction(e, given["old_logprob"] - given["rollout_logprob"])
            value_N = value_N * found["correction"]
        if o.weighting.type != "none":
            found["weight"], found["penalty"] = _weighting(e)
            value_N = value_N * found["weight"] - found["penalty"] * np.abs(x_N)
        found["entropy_change"] = given["entropy"] - given["old_entropy"]
        found["kl_mask"] = _kl_mask(e, advantage_N, found["entropy_change"])
        found["kl"] = np.where(found["kl_mask"], _divergence(o.kl, x_N, x_N), 0.0)
        value_N = value_N - o.beta * found["kl"]
        if o.ref_kl is not None and o.ref_kl.where == "loss":
            if o.ref_kl.estimator == "full":
                found["ref_kl"] = given["teacher_kl"]
            else:
                found["ref_kl"] = _divergence(o.ref_kl.estimator, given["logprob"] - given["ref_logprob"], x_N)
            value_N = value_N - o.ref_kl.beta * found["ref_kl"]
        value_N = value_N + o.entropy_coefficient * given["entropy"]
        found["share"] = 1.0 / _denominator(e)
    except KeyError as error:
        raise DataError(
            f"update {update.number}: {error} was not recorded, or is a part that the audit does not know yet: add it to "
            f"tepo_megatron/audit/evaluator.py"
        ) from None
    found["loss"] = -found["share"] * value_N
    return {name: x_N.astype(np.float64) for name, x_N in found.items()}, e.compare.near_N


def group_advantages(batch: AuditBatch, kind: str) -> Array:
    """Return the advantage of each sequence from the rewards of its group."""
    groups = [batch.group(int(np.flatnonzero(batch.prompt_ids_B == prompt)[0])) for prompt in dict.fromkeys(batch.prompt_ids_B)]
    found = np.zeros(len(batch))
    for group in groups:
        rewards = batch.rewards_B[group]
        n, centred = len(group), rewards - rewards.mean()
        if kind == "std":
            found[group] = centred / (math.sqrt((centred**2).sum() / (n - 1)) + 1e-6) if n > 1 else 0.0
        elif kind == "leave_one_out":
            found[group] = [r - np.delete(rewards, i).mean() for i, r in enumerate(rewards)] if n > 1 else 0.0
        elif kind in ("mean", "gpg"):
            found[group] = centred
        elif kind == "none":
            found[group] = 0.0
        elif kind == "gdpo":
            found[group] = _sum_of_normalized_terms(batch, group)
        else:
            raise DataError(f"objective.advantage={kind} is unknown to the audit; update tepo_megatron/audit")
    if kind == "gpg":
        silent = sum(len(group) for group in groups if np.ptp(batch.rewards_B[group]) == 0)
        found *= len(batch) / max(1, len(batch) - silent)
    if kind == "gdpo":
        spread = found.std(ddof=1) if len(found) > 1 else math.inf
        found = (found - found.mean()) / (spread + 1e-6)
    return found


def _sum_of_normalized_terms(batch: AuditBatch, group: Array) -> Array:
    """Return the weighted sum over terms of (r - mean) / (std + 1e-6) in one group. Shaping is one more term of weight 1."""
    total, values = np.zeros(len(group)), [np.array(batch.terms[i]).reshape(-1, 2) for i in group]
    columns = [(values[0][k, 0], np.array([of_one[k, 1] for of_one in values])) for k in range(len(values[0]))]
    rest = batch.rewards_B[group] - np.array([of_one[:, 0] @ of_one[:, 1] for of_one in values])
    for weight, rewards in [*columns, (1.0, rest)]:
        spread = rewards.std(ddof=1) if len(rewards) > 1 else 0.0
        total += weight * (rewards - rewards.mean()) / (spread + 1e-6)
    return total


def _advantage(e: _Evaluation, group_N: Array, entropy_N: Array) -> Array:
    alpha, kappa = e.update.objective.advantage_alpha, e.update.objective.advantage_kappa
    return group_N + np.minimum(alpha * entropy_N, np.abs(group_N) / kappa) if alpha else group_N


def _policy(e: _Evaluation, logprob_N: Array, x_N: Array, advantage_N: Array) -> tuple[Array, Array, Array]:
    """Return ratio, surrogate and clipped tokens for the log-ratios `x_N`."""
    o, above = e.update.objective, e.compare.above
    positive_N, negative_N = advantage_N > 0, advantage_N < 0
    held_N = np.zeros(x_N.shape, dtype=bool)
    if o.surrogate == "clip_tokens":
        high, low = math.log(1 + o.clip_high), math.log(1 - o.clip_low) if o.clip_low < 1 else -math.inf
        over_N, under_N = positive_N & above(x_N, high), negative_N & above(low, x_N)
        x_N, held_N = np.where(over_N, high, np.where(under_N, low, x_N)), over_N | under_N
    ratio_N = np.exp(np.clip(_log_ratio(e, x_N), -_LIMIT, _LIMIT))
    high, low = 1 + o.clip_high, 1 - o.clip_low
    bounded_N = np.minimum(np.maximum(ratio_N, low), high)
    none_N = np.zeros(x_N.shape, dtype=bool)
    a_N = advantage_N
    surrogates: dict[str, Callable[[], tuple[Array, Array]]] = {
        "clip": lambda: _clip(e, ratio_N, bounded_N, a_N),
        "clip_eq4": lambda: (np.minimum(ratio_N, bounded_N) * a_N, above(ratio_N, high)),
        "unclipped": lambda: (ratio_N * a_N, none_N),
        "clip_tokens": lambda: (ratio_N * a_N, held_N),
        "stop_gradient": lambda: (bounded_N * a_N * logprob_N, above(ratio_N, high) | _under(e, ratio_N)),
        "reinforce": lambda: (a_N * logprob_N, none_N),
        "soft_gate": lambda: (_soft_gate(e, ratio_N, a_N), none_N),
        "trust_region_tv": lambda: _trust_region(e, logprob_N, x_N, ratio_N, a_N),
        "trust_region_kl": lambda: _trust_region(e, logprob_N, x_N, ratio_N, a_N),
    }
    return ratio_N, *surrogates[o.surrogate]()


def _log_ratio(e: _Evaluation, x_N: Array) -> Array:
    kind = e.update.objective.ratio
    if kind == "sequence":
        return e.over_sequence(x_N) / np.maximum(e.lengths_N, 1)
    if kind == "prefix":
        sums = np.concatenate(([0.0], np.cumsum(x_N)))
        ends = np.arange(1, x_N.size + 1)
        count_N = e.update.position_N + 1
        return (sums[ends] - sums[ends - count_N]) / count_N
    return {"token": x_N, "none": np.zeros_like(x_N)}[kind]


def _clip(e: _Evaluation, ratio_N: Array, bounded_N: Array, a_N: Array) -> tuple[Array, Array]:
    o, above = e.update.objective, e.compare.above
    value_N = np.where(a_N >= 0, np.minimum(ratio_N, bounded_N), np.maximum(ratio_N, bounded_N)) * a_N
    clipped_N = np.where(a_N > 0, above(ratio_N, 1 + o.clip_high), (a_N < 0) & _under(e, ratio_N))
    if o.dual_clip is not None:
        floored_N = (a_N < 0) & above(ratio_N, o.dual_clip)
        value_N, clipped_N = np.where(floored_N, o.dual_clip * a_N, value_N), clipped_N | floored_N
    return value_N, clipped_N


def _under(e: _Evaluation, ratio_N: Array) -> Array:
    """Return the tokens below the clip range, which has no lower end if clip_low is 1."""
    low = 1 - e.update.objective.clip_low
    return e.compare.above(low, ratio_N) if low > 0 else np.zeros(ratio_N.shape, dtype=bool)


def _soft_gate(e: _Evaluation, ratio_N: Array, a_N: Array) -> Array:
    tau_N = np.where(a_N > 0, e.update.objective.tau_positive, e.update.objective.tau_negative)
    with np.errstate(over="ignore"):
        return 4 * a_N / (tau_N * (1 + np.exp(-tau_N * (ratio_N - 1))))


def _trust_region(e: _Evaluation, logprob_N: Array, x_N: Array, ratio_N: Array, a_N: Array) -> tuple[Array, Array]:
    o, old_N = e.update.objective, logprob_N - x_N
    pi_N, mu_N = np.exp(logprob_N), np.exp(old_N)
    distance_N = np.abs(pi_N - mu_N)
    if o.surrogate == "trust_region_kl":
        others_N, old_others_N = (np.maximum(-np.expm1(l_N), 1e-20) for l_N in (logprob_N, old_N))
        distance_N = mu_N * -x_N + old_others_N * np.log(old_others_N / others_N)
    away_N = ((a_N > 0) & (x_N > 0)) | ((a_N < 0) & (x_N < 0))
    near_N = e.compare.near_N.copy()
    far_N = e.compare.above(distance_N, o.max_divergence)
    e.compare.near_N[~away_N] = near_N[~away_N]
    return np.where(far_N & away_N, 0.0, ratio_N * a_N), far_N & away_N


def _correction(e: _Evaluation, mismatch_N: Array) -> Array:
    c: Any = e.update.objective.correction
    above = e.compare.above
    if c.type == "sequence_mis":
        mismatch_N = e.over_sequence(mismatch_N)
    elif c.type == "geometric_mask":
        mismatch_N = e.over_sequence(mismatch_N) / np.maximum(e.lengths_N, 1)
    rho_N = np.exp(np.clip(mismatch_N, -_LIMIT, _LIMIT))
    if c.type == "tis":
        return np.minimum(rho_N, c.high)
    dropped_N = above(rho_N, c.high) | (above(c.low, rho_N) if c.type != "sequence_mis" else False)
    return np.where(dropped_N, 0.0, 1.0 if c.type == "geometric_mask" else rho_N)


def _weighting(e: _Evaluation) -> tuple[Array, Array]:
    """Return weight and penalty of each token, from the statistics of the pass that the weighting used."""
    given = e.update.inputs
    part: Any = e.update.objective.weighting
    l_N, h_N, x_N, key_N = (given[f"weighting_{name}"] for name in ("logprob", "entropy", "log_ratio", "key"))
    advantage_N = _advantage(e, given["group_advantage"], h_N)
    one_N, zero_N, n = np.ones_like(l_N), np.zeros_like(l_N), l_N.size
    covariance_N = (advantage_N - advantage_N.mean()) * (l_N - l_N.mean()) if n else zero_N
    if part.type == "steer":
        change_N = np.abs(advantage_N * np.exp(np.clip(x_N, -_LIMIT, _LIMIT)) * -np.expm1(l_N) * (l_N + h_N))
        exponent_N = math.log(part.lambda_min) * change_N / max(change_N.max(initial=0.0), 0.02)
        return np.clip(np.exp(exponent_N), part.lambda_min, 1.0), zero_N
    picks, marked_N = max(1, math.floor(part.share * n)), np.zeros(n, dtype=bool)
    if part.type not in ("kl_cov", "clip_cov"):
        raise DataError(f"objective.weighting.type={part.type} is unknown to the audit; update tepo_megatron/audit")
    if part.type == "kl_cov":
        order = np.lexsort((key_N, -covariance_N))
        marked_N[order[:picks]] = True
        if n > picks:  # a covariance next to the last one that is picked
            e.compare.above(covariance_N, covariance_N[order[picks - 1]])
            e.compare.above(covariance_N, covariance_N[order[picks]])
        return one_N, np.where(marked_N, part.beta, 0.0)
    before_N, (_, _, clipped_N) = e.compare.near_N.copy(), _policy(e, l_N, x_N, advantage_N)
    e.compare.near_N[:] = False
    candidate_N = ~clipped_N & e.compare.above(covariance_N, part.low) & e.compare.above(part.high, covariance_N)
    e.compare.near_N[:] = before_N | e.compare.near_N.any()  # one candidate more or less changes who is drawn
    candidates = np.flatnonzero(candidate_N)
    marked_N[candidates[np.argsort(key_N[candidates])][:picks]] = True
    return np.where(marked_N, 0.0, 1.0), zero_N


def _kl_mask(e: _Evaluation, advantage_N: Array, change_N: Array) -> Array:
    o, above = e.update.objective, e.compare.above
    if o.kl_mask in ("none", "all"):
        return np.full(change_N.shape, o.kl_mask == "all")
    falls_N = (advantage_N > 0) & above(-o.kl_entropy_tolerance, change_N)
    rises_N = (advantage_N < 0) & above(change_N, o.kl_entropy_tolerance)
    return {"falling_entropy": falls_N, "rising_entropy": rises_N, "both": falls_N | rises_N}[o.kl_mask]


def _divergence(kind: str, x_N: Array, log_ratio_N: Array) -> Array:
    """Return the estimate of KL(pi || other) from x = l - l_other; `log_ratio_N` is l - l_old."""
    y_N = np.clip(x_N, -_LIMIT, _LIMIT)
    q_N = np.expm1(-y_N)  # other / pi - 1
    weighted_N = np.exp(np.clip(log_ratio_N, -_LIMIT, _LIMIT)) * (q_N + y_N)
    estimates = {"k1": x_N, "k2": x_N**2 / 2, "k3": q_N + x_N, "k3_importance_weighted": weighted_N, "abs": np.abs(x_N)}
    return estimates[kind]


def _denominator(e: _Evaluation) -> Array:
    kind, batch, sequences = e.update.objective.aggregate, e.batch, e.update.sequences
    tokens, count = float(e.update.sequence_N.size), float(len(sequences))
    like_N = np.ones(e.update.sequence_N.size)
    if kind == "prompt_mean_token_mean":
        prompts, prompt_of = np.unique(batch.prompt_ids_B[sequences], return_inverse=True)
        of_prompt = np.bincount(prompt_of, weights=batch.response_lengths_B[sequences])
        return len(prompts) * of_prompt[prompt_of][e.segment_N]
    return {
        "token_mean": tokens * like_N,
        "sequence_mean_token_mean": count * e.lengths_N,
        "sequence_mean_token_sum": count * like_N,
        "sequence_mean_token_sum_norm": count * e.update.max_response_tokens * like_N,
    }[kind]
