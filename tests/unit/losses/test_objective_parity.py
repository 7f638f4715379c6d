"""Random combinations of parts on random ragged minibatches: value and gradients against the fp64 reference."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tepo_megatron.losses import Objective
from tepo_megatron.losses.objective import AGGREGATES
from tests import objective_cases as cases
from tests.objective_cases import MARGIN, compare, draw, expected, fair_cases, method_of, objective_of
from tests.pairwise import pairwise
from tests.reference.minibatches import shares as shares_of

WITH_RATIO = st.sampled_from(["token", "sequence", "prefix"])
BOUNDED = st.sampled_from(["none", "clip_cov", "steer"])
SURROGATES = (
    st.fixed_dictionaries({
        "ratio": WITH_RATIO,
        "surrogate": st.just("clip"),
        "dual_clip": st.sampled_from([None, 1.3, 3.0]),
        "weighting": BOUNDED,
    })
    | st.fixed_dictionaries({
        "ratio": WITH_RATIO,
        "surrogate": st.sampled_from(["clip_eq4", "stop_gradient"]),
        "weighting": BOUNDED,
    })
    | st.fixed_dictionaries({
        "ratio": WITH_RATIO,
        "surrogate": st.just("unclipped"),
        "weighting": st.sampled_from(["none", "clip_cov", "kl_cov", "steer"]),
    })
    | st.fixed_dictionaries({
        "ratio": WITH_RATIO,
        "surrogate": st.sampled_from(["clip_tokens", "soft_gate"]),
        "tau_positive": st.sampled_from([0.5, 1.0]),
        "tau_negative": st.sampled_from([1.05, 3.0]),
        "weighting": BOUNDED,
    })
    | st.fixed_dictionaries({
        "ratio": st.just("token"),
        "surrogate": st.sampled_from(["trust_region_tv", "trust_region_kl"]),
        "max_divergence": st.sampled_from([0.02, 0.1]),
        "weighting": BOUNDED,
    })
    | st.fixed_dictionaries({
        "ratio": st.sampled_from(["none", "token", "sequence"]),
        "surrogate": st.just("reinforce"),
        "weighting": BOUNDED,
    })
)  # fmt: skip
CORRECTIONS = (
    st.just({})
    | st.fixed_dictionaries({
        "correction": st.sampled_from(["tis", "sequence_mis"]),
        "correction_high": st.sampled_from([None, 1.1]),
    })
    | st.fixed_dictionaries({
        "correction": st.sampled_from(["geometric_mask", "icepop"]),
        "correction_low": st.sampled_from([None, 0.8]),
        "correction_high": st.sampled_from([None, 1.3]),
    })
)  # fmt: skip
KL = (
    st.just({})
    | st.fixed_dictionaries({
        "kl_mask": st.sampled_from(["all", "falling_entropy", "rising_entropy", "both"]),
        "kl": st.sampled_from(["k1", "k2", "k3", "k3_importance_weighted", "abs"]),
        "kl_entropy_tolerance": st.sampled_from([0.0, 0.2]),
        "beta": st.sampled_from([0.01, 1.0]),
    })
)  # fmt: skip
REFERENCE_KL = (
    st.just({})
    | st.fixed_dictionaries({
        "ref_kl": st.sampled_from(["k1", "k2", "k3", "k3_importance_weighted", "abs"]),
        "ref_beta": st.sampled_from([0.01, 1.0]),
        "ref_kl_in": st.sampled_from(["loss", "loss", "reward"]),
    })
)  # fmt: skip
OBJECTIVE = st.builds(
    lambda choice, correction, kl, ref, **parts: objective_of(**choice, **correction, **kl, **ref, **parts),
    choice=SURROGATES,
    correction=CORRECTIONS,
    kl=KL,
    ref=REFERENCE_KL,
    aggregate=st.sampled_from(list(AGGREGATES)),
    clip_low=st.sampled_from([0.1, 0.2, 1.0]),
    clip_high=st.sampled_from([0.2, 0.28]),
    entropy_coefficient=st.sampled_from([0.0, 0.1, -0.1]),
    advantage_alpha=st.sampled_from([0.0, 0.4]),
    advantage_kappa=st.sampled_from([0.5, 2.0, 5.0]),
    cov_share=st.sampled_from([2e-4, 0.125, 0.27]),
    cov_low=st.sampled_from([0.2, 1.0]),
    cov_beta=st.sampled_from([0.5, 1.0]),
    steer_lambda_min=st.sampled_from([0.5, 0.8]),
)
LENGTHS = st.just(list(cases.LENGTHS)) | st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(any)


def check(objective: Objective, seed: int, lengths: list[int], extreme: bool) -> None:
    batch = draw(seed, tuple(lengths), extreme=extreme)
    theirs = expected(method_of(objective), batch)
    assume(theirs[0].margin >= MARGIN)
    compare(objective, batch, theirs)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(objective=OBJECTIVE, seed=st.integers(0, 2**32), lengths=LENGTHS)
def test_some_combinations_of_parts(objective: Objective, seed: int, lengths: list[int]) -> None:
    check(objective, seed, lengths, extreme=False)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(objective=OBJECTIVE, seed=st.integers(0, 2**32), lengths=LENGTHS)
@pytest.mark.slow
def test_extreme_log_ratios_are_clamped_alike(objective: Objective, seed: int, lengths: list[int]) -> None:
    """+-60 nats between any two of the policies."""
    check(objective, seed, lengths, extreme=True)


COMBINATIONS = pairwise(
    list(AGGREGATES),
    ["token", "sequence", "prefix"],
    ["none", "clip_cov", "kl_cov", "steer"],
    ["none", "tis", "sequence_mis", "geometric_mask", "icepop"],
)


@pytest.mark.parametrize(("aggregate", "ratio", "weighting", "correction"), COMBINATIONS)
def test_ratio_weighting_correction_and_aggregation_combine(
    aggregate: str, ratio: str, weighting: str, correction: str
) -> None:
    """Each pair of parts, next to a KL to the old and one to the reference policy. More parts at once are drawn above."""
    objective = objective_of(
        ratio=ratio,
        surrogate="unclipped" if weighting == "kl_cov" else "clip",
        aggregate=aggregate,
        weighting=weighting,
        cov_share=0.2,
        cov_low=0.3,
        correction=correction,
        kl_mask="falling_entropy",
        beta=0.5,
        ref_beta=0.3,
    )
    for batch, theirs in fair_cases(method_of(objective), 1, draw):
        compare(objective, batch, theirs)


@pytest.mark.parametrize("surrogate", ["clip", "unclipped"])
def test_entropy_in_the_advantage_reaches_the_gradient_of_a_sequence_ratio(surrogate: str) -> None:
    """The entropy term differs from token to token, so no token may carry the ratio's gradient alone."""
    objective = Objective(ratio="sequence", surrogate=surrogate, advantage_alpha=0.4)
    for batch, theirs in fair_cases(method_of(objective), 3, draw):
        compare(objective, batch, theirs)


ACTIVE = {  # objective -> the condition, the share of the tokens that it acts on at least
    "clip": (Objective(ratio="token", clip_low=0.1), "clipped", 0.15),
    "clip, sequence": (Objective(ratio="sequence", clip_low=0.1), "clipped", 0.15),
    "clip, prefix": (Objective(ratio="prefix", clip_low=0.1), "clipped", 0.15),
    "clip_eq4": (Objective(ratio="token", surrogate="clip_eq4"), "clipped", 0.1),
    "clip_tokens": (Objective(ratio="sequence", surrogate="clip_tokens"), "clipped", 0.1),
    "trust_region_tv": (Objective(ratio="token", surrogate="trust_region_tv", max_divergence=0.1), "clipped", 0.05),
    "trust_region_kl": (Objective(ratio="token", surrogate="trust_region_kl", max_divergence=0.02), "clipped", 0.05),
    "stop_gradient": (Objective(ratio="token", surrogate="stop_gradient"), "clipped", 0.2),
    "falling": (Objective(ratio="token", kl_mask="falling_entropy", beta=1.0), "masked", 0.1),
    "rising": (Objective(ratio="token", kl_mask="rising_entropy", beta=1.0), "masked", 0.1),
    "both": (Objective(ratio="token", kl_mask="both", beta=1.0, kl_entropy_tolerance=0.2), "masked", 0.1),
    "clip_cov": (objective_of(ratio="token", weighting="clip_cov", cov_share=0.27, cov_low=0.2), "weighted", 0.1),
    "kl_cov": (objective_of(ratio="token", surrogate="unclipped", weighting="kl_cov", cov_share=0.27), "weighted", 0.2),
    "steer": (objective_of(ratio="token", weighting="steer", steer_lambda_min=0.5), "weighted", 0.2),
    "tis": (objective_of(ratio="token", correction="tis"), "corrected", 0.2),
    "geometric_mask": (objective_of(ratio="token", correction="geometric_mask", correction_low=0.8), "corrected", 0.2),
    "sequence_mis": (objective_of(ratio="token", correction="sequence_mis"), "corrected", 0.2),
    "icepop": (objective_of(ratio="token", correction="icepop"), "corrected", 0.2),
}


@pytest.mark.parametrize("name", ACTIVE)
def test_the_cases_test_something(name: str) -> None:
    """Each condition affects at least its stated share of the tokens of these tests, and spares at least a twentieth."""
    objective, condition, least = ACTIVE[name]
    shares = []
    for seed in range(10):
        batch = draw(seed, (3, 0, 12, 7, 1, 9))
        outcome, _, _ = expected(method_of(objective), batch)
        shares.append(shares_of(outcome)[condition])
    assert least <= sum(shares) / len(shares) <= 0.95


def test_equal_covariances_are_ranked_by_key() -> None:
    """All advantages are equal, so every covariance is 0: the share falls to the smallest keys."""
    batch = draw(0)
    for r in batch.responses:
        object.__setattr__(r, "advantage", 0.0)
    objective = objective_of(ratio="token", surrogate="unclipped", weighting="kl_cov", cov_share=0.2, kl_mask="all", beta=0.1)
    theirs = expected(method_of(objective), batch)
    assert shares_of(theirs[0])["weighted"] == pytest.approx(0.2, abs=0.02)
    compare(objective, batch, theirs)
