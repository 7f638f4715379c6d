"""The test that tells from a server's log-probs of the canaries which version of the weights it serves. All in fp64.

Let e be the server's log-probs of the N targets, and a_v those of the actor under version v. Both are rounded, so d_v = e - a_v
is noise even where the server serves v. A right answer passes three questions:

1. Does another known version u explain e better than v? With Cauchy noise, whose heavy tails are those of rounded log-probs,
   the log-likelihood ratio of u and v is the sum of x_n = log(1 + (d_v,n / s)^2) - log(1 + (d_u,n / s)^2), where s is the
   median of all |d_v,n| and |d_u,n|. It is divided by the root of its sum of squares:

       t_u = sum_n x_n / sqrt(sum_n x_n^2)

   If the server serves v, x_n is negative or, where the versions do not differ by more than the noise, symmetric about 0. For
   independent symmetric x_n, P(t_u > z) <= exp(-z^2 / 2), whatever their sizes (Efron 1969). So t_u must not exceed MOST_RATIO,
   for which the bound is 2e-11.
2. Has e changed since the same server's answer under u, as a_v has since a_u? Rounding is repeated by the same weights, so
   a server that still has u gives nearly the same answer again. This needs servers in the actor's precision: a coarser one
   may not see a small change. Versions that differ by less than DISTINCT times the noise are not compared.
3. Does v explain e at all? The mean |d_v| must be within `Noise.limit`. This finds weights of no known version: one stale
   layer, one stale shard, a wrong scale.

Log-probs after a cached prefix are compared with those that the same server computes without the prefix cache, by question 3.

A difference that is smaller than the noise is not found; such an answer counts as right.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tepo_megatron.types import Canaries, CanaryAnswer

Values = NDArray[np.float64]

MOST_RATIO = 7.0  # largest t of another version that a right answer may have
UNMOVED = 0.2  # share of the actor's change that a right answer has changed by at least
DISTINCT = 0.5  # mean difference of two versions, as a multiple of the noise, from which on question 2 is asked
DISTINCT_BY_RATIO = 4.0  # the same for question 1, from which on it finds a stale version; it is always asked
NOISE_FACTOR = 8.0  # largest mean difference of a right answer, as a multiple of the largest one of recent right answers
LEAST_LIMIT = 1e-5  # nats; the limit on the mean difference is never lower, above the noise of fp32
JITTER_FACTOR = 4.0  # changes of the actor's log-probs below this multiple of the actor's own jitter are none
MOST_VERSIONS = 8  # newest versions whose log-probs are kept, next to the first
RECENT = 32  # right answers that the noise is measured from


@dataclass(frozen=True)
class CanaryVerdict:
    """The result of one test.

    Attributes:
        right: The server may serve the expected version; the test has no evidence against it.
        expected: The version that the server should serve.
        found: The known version that it serves instead. None: none of the known ones, or `right`.
        diff: Mean |server - actor| under `expected`, nats; with `cached`, mean |after a cached prefix - without one|.
        limit: Largest mean that a right answer may have, nats.
        ratio: Largest t of another known version; 0 if there is none.
        cached: The weights are right, and the log-probs after a cached prefix are not.
        by_canary: Mean |server - actor| under `expected` of each canary, nats. Empty if `right` or `cached`.
    """

    right: bool
    expected: int
    found: int | None
    diff: float
    limit: float
    ratio: float
    cached: bool = False
    by_canary: tuple[float, ...] = ()

    def __str__(self) -> str:
        numbers = f"mean difference {self.diff:.2e} nats, limit {self.limit:.2e}"
        if self.cached:
            return (
                f"it serves the weights of version {self.expected}, but its prefix cache holds what other weights computed "
                f"({numbers} between log-probs with and without the cache)"
            )
        numbers += f"; likelihood ratio of the nearest other version {self.ratio:.1f} standard deviations, limit {MOST_RATIO:g}"
        if self.right:
            return f"it serves the weights of version {self.expected} ({numbers})"
        numbers += f"; by canary: {', '.join(f'{mean:.1e}' for mean in self.by_canary)}"
        if self.found is not None:
            return f"it serves the weights of version {self.found} instead of {self.expected} ({numbers})"
        return (
            f"it serves weights that are neither those of version {self.expected} nor of another known version, so a part of "
            f"them is stale or wrong ({numbers})"
        )


class CanaryJudge:
    """Judges the answers of all servers of a run.

    Attributes:
        noise: |server - actor| without the prefix cache.
        cached_noise: |with the prefix cache - without| by the same server.
    """

    def __init__(self, canaries: Canaries, allowed: Callable[[int], float], same_precision: bool) -> None:
        self._canaries, self._same_precision = canaries, same_precision
        self.noise, self.cached_noise = Noise(allowed), Noise(allowed)
        self._scores: dict[int, Values] = {}  # version -> the actor's log-probs
        self._answers: dict[str, dict[int, Values]] = {}  # server -> version -> its last right answer
        self._jitter = 0.0  # mean difference of two scores of the same weights by the actor, nats

    def expect(self, version: int, logprobs: Sequence[float]) -> None:
        """See `CanaryChecked.expect_scores`.

        Scores that come twice for a version show how far the actor's log-probs differ for the same weights. The first version
        is kept, too, because servers that took no update have it.
        """
        scores_N = np.array(logprobs, np.float64)
        if version in self._scores:
            self._jitter = max(self._jitter, float(np.abs(scores_N - self._scores[version]).mean()))
        self._scores[version] = scores_N
        first, *later = self.versions
        kept = {first, *later[-MOST_VERSIONS:]}
        self._scores = {v: its_N for v, its_N in self._scores.items() if v in kept}
        self._answers = {name: {v: e for v, e in its.items() if v in kept} for name, its in self._answers.items()}

    @property
    def versions(self) -> list[int]:
        """Return the versions whose scores are known, ascending."""
        return sorted(self._scores)

    def examine(self, server: str, answer: CanaryAnswer, version: int) -> CanaryVerdict:
        """Judge an answer, and learn from it if it is right."""
        answer_N, scores_N = answer.logprobs_N, self._scores[version]
        diffs = {v: float(np.abs(answer_N - its_N).mean()) for v, its_N in self._scores.items()}
        ratios = {v: likelihood_ratio(answer_N, scores_N, its_N) for v, its_N in self._scores.items() if v != version}
        diff, limit, ratio = diffs[version], self.noise.limit(answer_N.size), max(ratios.values(), default=0.0)
        kept = self._unmoved(server, answer_N, version)
        right = kept is None and ratio <= MOST_RATIO and diff <= limit  # comparisons with nan are False
        if not right:
            nearest = kept if kept is not None else _smallest(diffs)
            found = nearest if nearest != version and (nearest == kept or diffs[nearest] <= limit) else None
            sequence_N = self._canaries.sequence_N
            means = np.bincount(sequence_N, np.abs(answer_N - scores_N)) / np.bincount(sequence_N)
            return CanaryVerdict(False, version, found, diff, limit, ratio, by_canary=tuple(means.tolist()))
        verdict = CanaryVerdict(True, version, None, diff, limit, ratio)
        cached, cached_limit = self._cached_diff(answer), self.cached_noise.limit(answer.cached_M.size)
        if not cached <= cached_limit:
            return replace(verdict, right=False, diff=cached, limit=cached_limit, cached=True)
        self.noise.add(diff)
        self.cached_noise.add(cached)
        self._answers.setdefault(server, {})[version] = answer_N
        return verdict

    def _unmoved(self, server: str, answer_N: Values, version: int) -> int | None:
        """Return the version under which the server gave nearly the same answer, though the actor's has changed since."""
        if not self._same_precision:
            return None
        for before, its_N in sorted(self._answers.get(server, {}).items(), reverse=True):
            change = self.distance(version, before)
            own = float(np.abs(answer_N - its_N).mean())
            least = max(DISTINCT * (self.noise.level or math.inf), JITTER_FACTOR * self._jitter)
            if before != version and change > 0 and change >= least and own <= UNMOVED * change:
                return before
        return None

    def _cached_diff(self, answer: CanaryAnswer) -> float:
        return float(np.abs(answer.cached_M - answer.logprobs_N[answer.targets_M]).mean()) if answer.cached_M.size else 0.0

    @property
    def separation(self) -> float | None:
        """Return the mean |difference| of the newest version's scores and those of the version before, over `noise.level`.

        None: one of them is not known.
        """
        if len(self._scores) < 2 or not self.noise.level:
            return None
        return self.distance(*self.versions[-2:]) / self.noise.level

    def distance(self, version: int, other: int) -> float:
        """Return the mean |difference| of the actor's log-probs under two versions, nats."""
        return float(np.abs(self._scores[version] - self._scores[other]).mean())

    @property
    def distinct(self) -> float:
        """Return the `separation` from which on a server that still has the former version is found for certain."""
        return DISTINCT if self._same_precision else DISTINCT_BY_RATIO


class Noise:
    """The difference between two ways to compute the same log-probs, measured from recent right answers.

    Args:
        allowed: Number of targets -> largest mean difference in nats that is ever allowed (`allowed_difference`).
    """

    def __init__(self, allowed: Callable[[int], float]) -> None:
        self._allowed = allowed
        self._recent: deque[float] = deque(maxlen=RECENT)

    @property
    def level(self) -> float | None:
        """Return the largest mean |difference| of recent right answers, nats; None before the first."""
        return max(self._recent, default=None)

    def add(self, diff: float) -> None:
        """Remember the mean of a right answer."""
        self._recent.append(diff)

    def limit(self, count: int) -> float:
        """Return the largest mean |difference| of a right answer, nats."""
        most = self._allowed(max(1, count))
        return most if self.level is None else min(most, max(LEAST_LIMIT, NOISE_FACTOR * self.level))


def likelihood_ratio(answer_N: Values, expected_N: Values, other_N: Values) -> float:
    """Return t of another version: see the module. 0 if both versions explain every target equally well; nan stays nan.

    Args:
        answer_N: The server's log-probs.
        expected_N: The actor's under the expected version.
        other_N: The actor's under the other version.
    """
    away_N, other_away_N = np.abs(answer_N - expected_N), np.abs(answer_N - other_N)
    scale = float(np.median(np.concatenate((away_N, other_away_N))))
    if scale == 0.0:  # more than half of all differences are exactly 0
        scale = float(np.finfo(np.float32).eps)
    with np.errstate(invalid="ignore"):  # a difference of infinities is nan
        gain_N = np.log1p(np.square(away_N / scale)) - np.log1p(np.square(other_away_N / scale))
    size = float(np.sqrt(np.square(gain_N).sum()))
    return float(gain_N.sum()) / size if size != 0.0 else 0.0


def _smallest(diffs: Mapping[int, float]) -> int:
    """Return the version with the smallest difference; nan counts as infinite."""
    return min(diffs, key=lambda version: math.inf if math.isnan(diffs[version]) else diffs[version])
