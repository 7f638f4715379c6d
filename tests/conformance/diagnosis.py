"""Name the usual mistake behind a wrong answer: the reference makes each of many mistakes until one reproduces the answer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from tepo_megatron.report.audit.reference import Formula
from tests.conformance.answers import Answer, right_answer
from tests.conformance.cases import Case
from tests.reference.minibatches import Batch, Response

ALIKE = 1e-5  # relative distance below which a mistake explains an answer


@dataclass(frozen=True)
class Suspect:
    """A candidate mistake.

    Attributes:
        can_be_made: Whether the mistake is possible here; exchanging equal bounds, for example, is not.
    """

    words: str
    answer: Callable[[], Answer]
    can_be_made: bool = True


def usually(method: Formula, batch: Batch, case: Case, got: Answer, right: Answer) -> str:
    """Return the mistake that gives this answer, or a description of the differences."""
    if not got.finite:
        return case.usually if case.name != "whole" else "exp overflows, or 0 / 0"
    if (factor := _factor(got, right)) is not None:
        return _name_of_factor(factor, batch, case)
    for suspect in suspects(method, batch, case):
        if _alike(got, suspect.answer()):
            return f"{suspect.words} (reproduced)"
    if abs(got.loss - right.loss) <= ALIKE * max(1.0, abs(right.loss)):
        return f"the value is right and the gradient is not: something is detached, or not detached; or {case.usually}"
    if float((got.gradient - right.gradient).norm()) <= ALIKE * float(right.gradient.norm()):
        return f"the gradient is right and the value is not: a constant, or a detached part, is wrong; or {case.usually}"
    return _profile(batch, got, right) or case.usually


def suspects(method: Formula, batch: Batch, case: Case) -> Iterator[Suspect]:
    """Return the mistakes to try, the most common ones first."""
    return (suspect for suspect in _all_suspects(method, batch, case) if suspect.can_be_made)


def _all_suspects(method: Formula, batch: Batch, case: Case) -> Iterator[Suspect]:
    def of(words: str, changed: Formula = method, minibatch: Batch = batch) -> Suspect:
        return Suspect(words, lambda: right_answer(changed, minibatch)[0], changed != method or minibatch is not batch)

    yield from _of_parts(method, batch, case)
    yield of("the old log-probs are those of the engine", minibatch=_each(batch, lambda r: replace(r, old=r.rollout)))
    swapped = _each(batch, lambda r: replace(r, old=r.rollout, rollout=r.old))
    yield of("old and rollout log-probs are exchanged", minibatch=swapped)
    yield of("advantages have the other sign", minibatch=_each(batch, lambda r: replace(r, advantage=-r.advantage)))
    for aggregate in ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"):
        if aggregate != method.aggregate:
            yield of(f"the aggregation is {aggregate}", replace(method, aggregate=aggregate))
    for ratio in ("token", "sequence", "prefix"):
        if ratio != method.ratio and method.surrogate != "reinforce":
            yield of(f"the ratio is that of {ratio}", replace(method, ratio=ratio))
    if method.surrogate == "clip":
        yield of("nothing is clipped", replace(method, surrogate="unclipped", dual_clip=None))
        eq4 = replace(method, surrogate="clip_eq4", dual_clip=None)
        yield of("the minimum is taken before the advantage is multiplied", eq4)
        yield of("the clip bounds are exchanged", replace(method, clip_low=method.clip_high, clip_high=method.clip_low))
        yield of("there is no dual clip", replace(method, dual_clip=None))
        yield of("there is a dual clip at 3", replace(method, dual_clip=3.0))
    for bound in (method.clip_low, method.clip_high):
        yield of(f"both clip bounds are {bound}", replace(method, clip_low=bound, clip_high=bound))
    for limit in (10.0, 20.0, float("inf")):
        if limit != method.log_ratio_limit:
            yield of(f"log-ratios are clamped at {limit} nats", replace(method, log_ratio_limit=limit))
    yield from _of_penalties(method, of)


def _of_penalties(method: Formula, of: Callable[..., Suspect]) -> Iterator[Suspect]:
    if method.beta:
        yield of("the KL to the old policy has the other sign", replace(method, beta=-method.beta))
        yield of("the KL to the old policy is missing", replace(method, beta=0.0))
        for mask in ("all", "falling_entropy", "rising_entropy", "both"):
            if mask != method.kl_mask:
                yield of(f"the KL acts on the tokens of {mask}", replace(method, kl_mask=mask))
    if method.ref_beta:
        yield of("the KL to the reference has the other sign", replace(method, ref_beta=-method.ref_beta))
        yield of("the KL to the reference is missing", replace(method, ref_beta=0.0))
    for key, coefficient in (("kl", method.beta), ("ref_kl", method.ref_beta)):
        for estimator in ("k1", "k2", "k3", "k3_importance_weighted", "abs"):
            if coefficient and estimator != getattr(method, key):
                other: dict[str, Any] = {key: estimator}
                yield of(f"the KL estimator is {estimator}", replace(method, **other))
    if method.entropy_coefficient:
        yield of("the entropy has the other sign", replace(method, entropy_coefficient=-method.entropy_coefficient))
        yield of("the entropy is missing, or detached", replace(method, entropy_coefficient=0.0))
    if method.correction != "none":
        yield of("the correction of the mismatch is missing", replace(method, correction="none"))
    if method.weighting != "none":
        yield of("the weighting is missing", replace(method, weighting="none"))


def _of_parts(method: Formula, batch: Batch, case: Case) -> Iterator[Suspect]:
    """Each part of the layout as if it were the whole."""
    parts = [list(rows) for rank in case.layout.rows for rows in rank]
    if len(parts) == 1:
        return

    lengths = [len(r.old) for r in batch.responses]

    def alone(shares: list[float]) -> Answer:
        loss, x_grads, h_grads = 0.0, *([x.clone() for x in torch.zeros(sum(lengths)).double().split(lengths)] for _ in "xh")
        for rows, share in zip(parts, shares, strict=True):
            x, h = ([values.split(lengths)[i] for i in rows] for values in (batch.logprob, batch.entropy))
            one, _ = right_answer(method, Batch([batch.responses[i] for i in rows], torch.cat(x), torch.cat(h)))
            loss += share * one.loss
            for grads, values in ((x_grads, one.logprob_N), (h_grads, one.entropy_N)):
                for i, grad in zip(rows, values.split([lengths[i] for i in rows]), strict=True):
                    grads[i] += share * grad
        return Answer(loss, torch.cat(x_grads), torch.cat(h_grads))

    average, added = [1 / len(parts)] * len(parts), [1.0] * len(parts)
    yield Suspect("each microbatch is a mean of its own, and the means are averaged", lambda: alone(average))
    yield Suspect("each microbatch is a mean of its own, and the means are added", lambda: alone(added))
    if method.weighting != "none":
        sizes = [sum(lengths[i] for i in rows) if method.aggregate == "token_mean" else len(rows) for rows in parts]
        own = [size / sum(sizes) for size in sizes]
        yield Suspect("what is chosen from the whole minibatch is chosen from each microbatch", lambda: alone(own))


def _each(batch: Batch, change: Callable[[Response], Response]) -> Batch:
    return replace(batch, responses=[change(r) for r in batch.responses])


def _alike(got: Answer, other: Answer) -> bool:
    norm = float(other.gradient.norm()) or 1.0
    near = float((got.gradient - other.gradient).norm()) <= ALIKE * norm
    return near and abs(got.loss - other.loss) <= ALIKE * max(1.0, abs(other.loss))


def _factor(got: Answer, right: Answer) -> float | None:
    """Return the number by which the whole answer is off; None if there is none."""
    square = float(right.gradient @ right.gradient)
    if square == 0:
        return None
    factor = float(got.gradient @ right.gradient) / square
    scaled = Answer(factor * right.loss, factor * right.logprob_N, factor * right.entropy_N)
    return factor if factor and abs(factor - 1) > ALIKE and _alike(got, scaled) else None


def _name_of_factor(factor: float, batch: Batch, case: Case) -> str:
    lengths = [len(r.old) for r in batch.responses]
    tokens, sequences = sum(lengths), len(lengths)
    with_tokens, width = sum(n > 0 for n in lengths), max(1, *lengths)
    ranks = len(case.layout.rows) * case.layout.halves
    microbatches = len(case.layout.rows[0])
    names = {
        "the sign is wrong: this is J, not the loss": -1.0,
        "the average over ranks is not undone (divide by ranks)": float(ranks),
        "it is divided by ranks once too often": 1 / ranks,
        "the average over microbatches is not undone (divide by microbatches)": float(microbatches),
        "it is divided by microbatches once too often": 1 / microbatches,
        "the number of sequences is one too small": sequences / (sequences - 1),
        "the number of sequences is one too large": sequences / (sequences + 1),
        "sequences without tokens are left out of the denominator": sequences / max(1, with_tokens),
        "the number of tokens is one too small": tokens / max(1, tokens - 1),
        "the number of tokens is one too large": tokens / (tokens + 1),
        "padding is counted as tokens": tokens / (sequences * width),
        "it is divided by sequences instead of tokens": tokens / sequences,
        "it is divided by tokens instead of sequences": sequences / max(1, tokens),
        "it is divided by the padded length": 1 / width,
        "it is a sum over tokens, not a mean": float(tokens),
        "it is a sum over sequences, not a mean": float(sequences),
    }
    found = [words for words, number in names.items() if abs(factor / number - 1) <= ALIKE and number != 1]
    return f"{' or '.join(found) or 'a wrong denominator'} (all of it is off by the factor {factor:.6g})"


def _profile(batch: Batch, got: Answer, right: Answer) -> str | None:
    """Describe the factors of the gradients of single responses, ordered by response length."""
    lengths = [len(r.old) for r in batch.responses]
    seen = []
    for n, a, b in zip(lengths, got.logprob_N.split(lengths), right.logprob_N.split(lengths), strict=True):
        square = float(b @ b)
        if square:
            factor = float(a @ b) / square
            if float((a - factor * b).norm()) > ALIKE * float(b.norm()):
                return None
            seen.append((n, factor))
    for offset, words in ((1, "one too large"), (-1, "one too small")):
        if seen and all(n + offset and abs(factor * (n + offset) / n - 1) <= ALIKE for n, factor in seen):
            return f"|y|, which a response's sum is divided by, is {words}"
    wrong = sorted(n for n, factor in seen if abs(factor - 1) > ALIKE)
    if wrong:
        return f"whole responses are weighed wrongly, those of {', '.join(map(str, wrong))} tokens; the others are right"
    return None
