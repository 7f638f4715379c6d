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
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

MOST_RATIO = 7.0  # largest t of another version that a right answer may have
NOISE_FACTOR = 8.0  # largest mean difference of a right answer, as a multiple of the largest one of recent right answers
LEAST_LIMIT = 1e-5  # nats; the limit on the mean difference is never lower: fp32 noise of any model is
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
    """

    right: bool
    expected: int
    found: int | None
    diff: float
    limit: float
    ratio: float
    found_diff: float

    def __str__(self) -> str:
        numbers = f"{self.diff:.2e} nats from version {self.expected} in the mean, limit {self.limit:.2e}"
        if self.right:
            return f"the weights of version {self.expected} ({numbers})"
        if self.found is not None:
            return (
                f"the weights of version {self.found} instead of {self.expected} ({numbers}; {self.found_diff:.2e} nats from "
                f"version {self.found}, likelihood ratio {self.ratio:.1f} standard deviations, limit {MOST_RATIO:g})"
            )
        return (
            f"weights that are neither version {self.expected} nor another known one ({numbers}; likelihood ratio of the "
            f"nearest {self.ratio:.1f} standard deviations, limit {MOST_RATIO:g}): a part of them is stale or wrong"
        )


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


def separation(scores: Mapping[int, Values], version: int, noise: float | None) -> float | None:
    """Return how far the log-probs of a version are from those of the version before it, as a multiple of the noise.

    From DISTINCT on the two are told apart. None: no version before it is known, or the noise is not.

    Args:
        scores: Version -> the actor's log-probs.
        version: The version.
        noise: Mean |server - actor| of right answers, nats.
    """
    before = [v for v in scores if v < version]
    if not before or not noise:
        return None
    return float(np.abs(scores[version] - scores[max(before)]).mean()) / noise
