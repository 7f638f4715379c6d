"""The test of the answers to canaries, against its formulas in fp64 and against noise that nothing explains."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

from tepo_megatron.config import SyncConfig
from tepo_megatron.inference.servers.likelihood import (
    DISTINCT,
    MOST_RATIO,
    MOST_VERSIONS,
    NOISE_FACTOR,
    RECENT,
    CanaryJudge,
    Noise,
    likelihood_ratio,
)
from tepo_megatron.types import Canaries, CanaryAnswer
from tepo_megatron.weight_sync.mismatch import allowed_difference

CANARIES = Canaries(sequences=((1, *range(2, 62)), (3, *range(4, 104))), cached_from=(50, 90))
N = CANARIES.num_tokens
TARGETS = np.array([*range(49, 60), *range(60 + 89, 160)])
ALLOWED = partial(allowed_difference, cfg=SyncConfig(max_logprob_diff=0.05))


def reference_ratio(e: list[float], a: list[float], b: list[float]) -> float:
    """The ratio of the module's docstring, term by term."""
    away = sorted([abs(x - y) for x, y in zip(e, a, strict=True)] + [abs(x - y) for x, y in zip(e, b, strict=True)])
    s = (away[len(away) // 2 - 1] + away[len(away) // 2]) / 2
    terms = [math.log(1 + ((x - y) / s) ** 2) - math.log(1 + ((x - z) / s) ** 2) for x, y, z in zip(e, a, b, strict=True)]
    return math.fsum(terms) / math.sqrt(math.fsum(term * term for term in terms))


def answer(logprobs_N: np.ndarray, cached_M: np.ndarray | None = None) -> CanaryAnswer:
    return CanaryAnswer(logprobs_N, logprobs_N[TARGETS] if cached_M is None else cached_M, TARGETS)


def judge(*versions: np.ndarray, same_precision: bool = True) -> CanaryJudge:
    made = CanaryJudge(CANARIES, ALLOWED, same_precision)
    for version, scores_N in enumerate(versions):
        made.expect(version, scores_N.tolist())
    return made


def scores(seed: int, around: np.ndarray | None = None, size: float = 1.0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return -4.0 + random.standard_normal(N) if around is None else around + size * random.standard_normal(N)


def test_the_ratio_is_its_formula_in_fp64() -> None:
    for seed in range(20):
        e, a, b = (scores(3 * seed + k) for k in range(3))
        assert likelihood_ratio(e, a, b) == pytest.approx(reference_ratio(e.tolist(), a.tolist(), b.tolist()), rel=1e-12)
        assert likelihood_ratio(e, a, b) == pytest.approx(-likelihood_ratio(e, b, a), rel=1e-12)


def test_the_ratio_of_equal_versions_is_0_and_that_of_a_copy_is_large() -> None:
    a, b = scores(0), scores(1)
    assert likelihood_ratio(scores(2), a, a) == 0.0
    assert likelihood_ratio(b, a, b) > MOST_RATIO
    assert math.isnan(likelihood_ratio(np.full(N, math.nan), a, b))


@pytest.mark.parametrize("kind", ["normal", "heavy", "unequal"])
def test_noise_alone_is_no_evidence_however_it_is_distributed(kind: str) -> None:
    """The scores of two equal versions and the answer differ by noise alone: the bound on the ratio holds."""
    random, sizes = np.random.default_rng(7), np.exp(3 * np.random.default_rng(8).standard_normal(N))

    def noise() -> np.ndarray:
        if kind == "heavy":
            return random.standard_cauchy(N)
        return random.standard_normal(N) * (sizes if kind == "unequal" else 1.0)

    ratios = np.array([likelihood_ratio(noise(), noise(), noise()) for _ in range(4000)])
    for z in (2.0, 3.0):
        assert (ratios > z).mean() <= 1.2 * math.exp(-z * z / 2)
    assert ratios.max() < MOST_RATIO


def test_a_thousand_right_answers_raise_no_alarm() -> None:
    made, a = judge(scores(0)), scores(0)
    for version in range(1, 1001):
        a = scores(version, a, size=[0.0, 1e-9, 1e-4, 1e-2][version % 4])
        made.expect(version, scores(9 * version, a, 1e-3).tolist())
        verdict = made.examine("server", answer(scores(9 * version + 1, a, 1e-3)), version)
        assert verdict.right, verdict


def test_a_stale_version_is_named_where_versions_differ_by_more_than_the_noise() -> None:
    a = [scores(0)]
    for version in range(1, 5):
        a.append(scores(version, a[-1], 0.3))
    for same_precision in (True, False):
        made = judge(*a, same_precision=same_precision)
        for served in range(4):
            verdict = made.examine("server", answer(scores(50, a[served], 1e-3)), 4)
            assert not verdict.right and verdict.found == served
            assert f"the weights of version {served} instead of 4" in str(verdict)
        assert made.examine("server", answer(scores(51, a[4], 1e-3)), 4).right


def test_an_answer_that_did_not_change_is_stale_though_the_change_is_within_the_noise() -> None:
    """Both sides round differently under new weights. The versions differ by 0.6 times the noise, which no ratio finds."""
    noise, first = 0.01, scores(0)
    for same_precision in (True, False):
        made = judge(first, same_precision=same_precision)
        given = scores(1, first, noise)
        assert made.examine("server", answer(given), 0).right
        second = scores(2, first, 0.75 * noise)
        made.expect(1, second.tolist())
        assert DISTINCT < made.distance(1, 0) / (made.noise.level or 0) < 1
        verdict = made.examine("server", answer(given), 1)
        assert verdict.right != same_precision and verdict.found == (0 if same_precision else None)
        assert verdict.ratio < MOST_RATIO and verdict.diff < verdict.limit
        other = made.examine("another server", answer(given), 1)
        assert other.right, "each server is compared with its own answers"


@pytest.mark.parametrize(("change", "jitter", "right"), [(0.75, 0.0, False), (0.75, 0.3, True), (0.4, 0.0, True)])
def test_a_change_that_may_be_jitter_or_is_small_is_not_compared(change: float, jitter: float, right: bool) -> None:
    """Sizes are multiples of the noise. Nothing but the comparison with the former answer could find the stale version."""
    noise, first = 0.01, scores(0)
    made = judge(first)
    if jitter:  # scored again: the actor's own log-probs differ
        made.expect(0, scores(2, first, jitter * noise).tolist())
        made.expect(0, first.tolist())
    given = scores(3, first, noise)
    assert made.examine("server", answer(given), 0).right
    made.expect(1, scores(1, first, change * noise).tolist())
    assert made.examine("server", answer(given), 1).right == right


def test_weights_of_no_known_version_are_called_so_above_a_multiple_of_the_noise() -> None:
    a, b = scores(0), scores(1, scores(0), 0.05)
    for size, right in ((0.5 * NOISE_FACTOR, True), (1.5 * NOISE_FACTOR, False)):
        made = judge(a)
        assert made.examine("server", answer(scores(2, a, 1e-4)), 0).right
        made.expect(1, b.tolist())
        level = made.noise.level or 0.0
        off = size * level * np.where(np.arange(N) % 2, 1.0, -1.0)
        verdict = made.examine("server", answer(b + off), 1)
        assert verdict.right == right and verdict.found is None
        assert len(verdict.by_canary) == (0 if right else 2)
    assert "neither those of version 1 nor of another known version" in str(verdict)


def test_before_any_right_answer_the_limit_is_that_of_the_gate() -> None:
    noise = Noise(ALLOWED)
    assert noise.level is None and noise.limit(N) == ALLOWED(N)
    noise.add(1e-3)
    assert noise.limit(N) == NOISE_FACTOR * 1e-3
    noise.add(1.0)
    assert noise.limit(N) == ALLOWED(N), "never more than the gate allows"
    for _ in range(RECENT):
        noise.add(1e-9)
    assert noise.limit(N) == 1e-5, "nor less than the noise of fp32"


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_log_prob_that_is_no_number_is_wrong(bad: float) -> None:
    given = scores(0)
    given[5] = bad
    for made in (judge(scores(0)), judge(scores(1), scores(0))):
        verdict = made.examine("server", answer(given), max(made.versions))
        assert not verdict.right and verdict.found is None


def test_a_stale_prefix_cache_is_found_by_the_same_server_without_the_cache() -> None:
    a = scores(0)
    made = judge(a)
    assert made.examine("server", answer(scores(1, a, 0.01)), 0).right
    given = scores(2, a, 0.01)
    cached = given[TARGETS].copy()
    assert made.examine("server", answer(given, cached + 5e-6), 0).right
    verdict = made.examine("server", answer(given, cached + 1e-3), 0)
    assert not verdict.right and verdict.cached and verdict.found is None
    assert "its prefix cache holds what other weights computed" in str(verdict)


def test_the_first_version_and_the_newest_are_remembered() -> None:
    made = judge(*(scores(version) for version in range(20)))
    assert made.versions == [0, *range(20 - MOST_VERSIONS, 20)]
    assert made.separation is None, "the noise is not known"
    assert made.examine("server", answer(scores(19)), 19).right
    assert made.separation is None or made.separation > 0


def test_targets_are_numbered_sequence_after_sequence() -> None:
    assert N == 60 + 100 and CANARIES.target(0, 1) == 0 and CANARIES.target(1, 1) == 60 and CANARIES.target(1, 100) == N - 1
    assert CANARIES.sequence_N.tolist() == [0] * 60 + [1] * 100
    with pytest.raises(ValueError, match="2 log-probs of 1 targets"):
        CanaryAnswer(np.zeros(N), np.zeros(2), np.zeros(1, np.int64))
