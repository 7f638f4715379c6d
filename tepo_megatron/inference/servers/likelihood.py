"""The test that tells from a server's log-probs of the canaries which version of the weights it serves. All in fp64.

Let e be the server's log-probs of the N targets, and a_v those of the actor under version v. Both are rounded, so e - a_v is
noise even where the server serves v. Two questions are asked:

1. Does another known version u explain e better than v? With Laplace noise of scale s the log-likelihood ratio of u and v is
   sum_n x_n / s, where x_n = |e_n - a_v,n| - |e_n - a_u,n|. Divided by the root of its sum of squares it is

       t_u = sum_n x_n / sqrt(sum_n x_n^2),

   in which s cancels. If the server serves v, x_n is negative or, where the versions do not differ by more than the noise,
   symmetric about 0. For independent symmetric x_n, P(t_u > z) <= exp(-z^2 / 2), whatever their sizes and the shape of the
   noise (Efron 1969). Above MOST_RATIO the server does not serve v. The bound is 2e-11 for one check of one version.
2. Does v explain e at all? The mean of |e - a_v| has to be within `Noise.limit`. This finds states that are no known version:
   one stale layer, one stale shard, a wrong scale.

Neither question finds a difference that is smaller than the noise; then the answer counts as right.
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
NOISE_FACTOR = 8.0  # largest mean difference of a right answer, as a multiple of the largest one of recent right answers
LEAST_LIMIT = 1e-5  # nats; the limit on the mean difference is never lower: fp32 noise of any model is
MOST_VERSIONS = 8  # newest versions whose log-probs are kept, next to the first
RECENT = 32  # right answers that are remembered
DISTINCT = 1.0  # versions whose log-probs differ by this multiple of the noise, in the mean, are told apart


@dataclass(frozen=True)
class CanaryVerdict:
    """The result of one test.

    Attributes:
        right: The server may serve the expected version; the test has no evidence against it.
        expected: The version that the server should serve.
        found: The known version that it serves instead. None: none of the known ones, or `right`.
        diff: Mean |server - actor| under `expected`, nats; nan if a log-prob is not a number.
        limit: Largest mean that a right answer may have, nats.
        ratio: Largest t of another known version; 0 if there is none.
        found_diff: Mean |server - actor| under the known version that is nearest, nats.
        cached: The test is of log-probs after a cached prefix, by a server whose weights are right.
        by_canary: Mean |server - actor| under `expected` of each canary, nats. Empty if `right` or `cached`.
    """

    right: bool
    expected: int
    found: int | None
    diff: float
    limit: float
    ratio: float
    found_diff: float
    cached: bool = False
    by_canary: tuple[float, ...] = ()

    def __str__(self) -> str:
        subject = "its prefix cache was computed with" if self.cached else "it serves"
        numbers = f"{self.diff:.2e} nats from version {self.expected} in the mean, limit {self.limit:.2e}"
        ratio = f"likelihood ratio {self.ratio:.1f} standard deviations, limit {MOST_RATIO:g}"
        if self.right:
            return f"{subject} the weights of version {self.expected} ({numbers})"
        if self.by_canary:
            ratio += f"; by canary: {', '.join(f'{mean:.1e}' for mean in self.by_canary)}"
        if self.found is not None:
            at = f"{self.found_diff:.2e} nats from version {self.found}"
            return f"{subject} the weights of version {self.found} instead of {self.expected} ({numbers}; {at}; {ratio})"
        return (
            f"{subject} weights that are neither those of version {self.expected} nor of another known version, so a part of "
            f"them is stale or wrong ({numbers}; {ratio})"
        )


class CanaryJudge:
    """Judges the answers of all servers of a run.

    Args:
        canaries: The canaries.
        allowed: See `Noise`.

    Attributes:
        noise: The noise of the log-probs that are computed without the prefix cache.
    """

    def __init__(self, canaries: Canaries, allowed: Callable[[int], float]) -> None:
        self._canaries = canaries
        self.noise, self._cached_noise = Noise(allowed), Noise(allowed)
        self._scores: dict[int, Values] = {}  # version -> the actor's log-probs

    def expect(self, version: int, logprobs: Sequence[float]) -> None:
        """See `CanaryChecked.expect_scores`. The first version is kept, too: restarted servers begin with it."""
        self._scores[version] = np.array(logprobs, np.float64)
        first, *later = sorted(self._scores)
        self._scores = {v: self._scores[v] for v in (first, *later[-MOST_VERSIONS:])}

    def knows(self, version: int) -> bool:
        """Return whether the scores of a version are known."""
        return version in self._scores

    def examine(self, answer: CanaryAnswer, version: int) -> CanaryVerdict:
        """Judge an answer, and learn the noise from it if it is right.

        Args:
            answer: The server's log-probs.
            version: The version that it should serve.
        """
        limit = self.noise.limit(answer.logprobs_N.size)
        verdict = judge(answer.logprobs_N, self._scores, version, limit)
        if not verdict.right:
            sequence_N, away_N = self._canaries.sequence_N, np.abs(answer.logprobs_N - self._scores[version])
            means = np.bincount(sequence_N, away_N) / np.bincount(sequence_N)
            return replace(verdict, by_canary=tuple(means.tolist()))
        of_targets = {v: logprobs_N[answer.targets_M] for v, logprobs_N in self._scores.items()}
        cached = judge(answer.cached_M, of_targets, version, self._cached_noise.limit(answer.cached_M.size))
        if not cached.right:
            return replace(cached, cached=True)
        self.noise.add(verdict.diff)
        self._cached_noise.add(cached.diff)
        return verdict

    @property
    def separation(self) -> float | None:
        """Return how far the newest version's scores are from those of the version before it, as a multiple of the noise.

        It is the mean |difference| over `noise.level`. From DISTINCT on the two are told apart. None: one of them is not known.
        """
        if len(self._scores) < 2 or not self.noise.level:
            return None
        before, newest = sorted(self._scores)[-2:]
        return float(np.abs(self._scores[newest] - self._scores[before]).mean()) / self.noise.level


class Noise:
    """The difference between server and actor where the weights are the same, measured from recent right answers.

    Args:
        allowed: Number of targets -> largest mean difference in nats that is ever allowed (`SyncConfig.allowed_difference`).
    """

    def __init__(self, allowed: Callable[[int], float]) -> None:
        self._allowed = allowed
        self._recent: deque[float] = deque(maxlen=RECENT)

    @property
    def level(self) -> float | None:
        """Return the largest mean |server - actor| of recent right answers, nats; None before the first."""
        return max(self._recent, default=None)

    def add(self, diff: float) -> None:
        """Remember the mean of a right answer."""
        self._recent.append(diff)

    def limit(self, count: int) -> float:
        """Return the largest mean |server - actor| of a right answer, nats.

        Args:
            count: Number of targets.
        """
        most = self._allowed(count)
        return most if self.level is None else min(most, max(LEAST_LIMIT, NOISE_FACTOR * self.level))


def judge(answer_N: Values, scores: Mapping[int, Values], expected: int, limit: float) -> CanaryVerdict:
    """Test whether an answer is of the expected version.

    Args:
        answer_N: The server's log-probs of N targets, nats.
        scores: Version -> the actor's log-probs of the same targets. It has `expected`.
        expected: The version that the server should serve.
        limit: Largest mean difference of a right answer, nats.
    """
    away_N = np.abs(answer_N - scores[expected])
    diffs = {version: float(np.abs(answer_N - its_N).mean()) for version, its_N in scores.items()}
    ratios = {v: likelihood_ratio(away_N, np.abs(answer_N - its_N)) for v, its_N in scores.items() if v != expected}
    diff, ratio = diffs[expected], max(ratios.values(), default=0.0)
    nearest = min(diffs, key=lambda version: (math.inf if math.isnan(diffs[version]) else diffs[version], version != expected))
    right = ratio <= MOST_RATIO and diff <= limit  # a comparison with nan is False
    named = not right and nearest != expected and diffs[nearest] <= limit
    return CanaryVerdict(right, expected, nearest if named else None, diff, limit, ratio, diffs[nearest])


def likelihood_ratio(away_N: Values, other_N: Values) -> float:
    """Return t of another version: see the module. 0 if both versions explain every target equally well; nan stays nan.

    Args:
        away_N: |server - actor| of each target under the expected version.
        other_N: The same under the other version.
    """
    gain_N = away_N - other_N
    size = float(np.sqrt(np.square(gain_N).sum()))
    return float(gain_N.sum()) / size if size != 0.0 else 0.0
