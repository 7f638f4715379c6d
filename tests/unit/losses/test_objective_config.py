"""Building an objective from a config: replacements, refusals, and what a new method takes."""

import pytest
import torch

from tepo_megatron.config import ObjectiveConfig
from tepo_megatron.errors import ConfigError
from tepo_megatron.losses import OBJECTIVES, build_objective
from tepo_megatron.losses.objective import Objective
from tepo_megatron.losses.surrogate import SURROGATES
from tests.objective_cases import compare, draw, expected, inputs_of, method_of, ours
from tests.reference.methods import CORRECTION_BOUNDS


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({"name": "tpeo"}, "objective.name='tpeo' is unknown"),
        ({"ratio": "sentence"}, "objective.ratio='sentence' is unknown; use one of token, sequence"),
        ({"advantage": "median"}, "objective.advantage='median' is unknown; use one of std, mean, leave_one_out, gpg"),
        ({"weighting": "top"}, "objective.weighting='top' is unknown; use one of none, clip_cov, kl_cov, steer"),
        ({"correction": "cut"}, "objective.correction='cut' is unknown; use one of none, tis, mis, icepop"),
        ({"ref_beta": 0.1, "ref_kl": "k4"}, "objective.ref_kl='k4' is unknown; use one of k1, k2, k3"),
        ({"ref_beta": 0.1, "ref_kl_in": "advantage"}, "objective.ref_kl_in='advantage' is unknown; use one of loss, reward"),
        ({"name": "tepo_no_kl", "beta": 0.1}, "no effect under objective.kl_mask=none"),
        ({"clip_low": 1.5}, "objective.clip_low=1.5 must lie in"),
        ({"correction": "tis", "correction_high": 0.5}, "objective.correction_high=0.5 must be at least 1"),
        ({"dual_clip": 0.5}, "objective.dual_clip=0.5 must be above 1"),
        ({"name": "cispo", "dual_clip": 3.0}, "goes with objective.surrogate=clip, not stop_gradient"),
        ({"ratio": "none"}, "objective.ratio=none leaves objective.surrogate=clip without gradient"),
        ({"weighting": "kl_cov"}, "objective.weighting=kl_cov goes with objective.surrogate=unclipped"),
        ({"name": "clip_cov", "cov_low": 7.0}, "objective.cov_low=7.0 must be below objective.cov_high=5.0"),
        ({"name": "clip_cov", "cov_share": 1.5}, "objective.cov_share=1.5"),
        ({"name": "steer", "steer_lambda_min": 1.0}, "objective.steer_lambda_min=1.0 must lie in"),
        ({"correction": "mis", "correction_low": 1.005}, "set correction_low <= 1 <= correction_high"),
        ({"correction": "icepop", "correction_high": 0.9}, "set correction_low <= 1 <= correction_high"),
    ],
)
def test_contradictions_are_refused(cfg: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_objective(ObjectiveConfig(**cfg))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("tepo_alg1", "clip_low", 0.1),
        ("reinforce", "clip_high", 0.1),
        ("tepo_eq4", "clip_low", 0.1),
        ("grpo", "kl", "k1"),
        ("grpo", "kl_mask", "all"),
        ("gpg", "ratio", "token"),
        ("reinforce", "ratio", "sequence"),
        ("kl_undifferentiated", "kl_entropy_tolerance", 0.1),
        ("grpo", "kl_entropy_tolerance", 0.1),
        ("tepo", "ref_kl", "k1"),
        ("tepo", "ref_kl_in", "reward"),
        ("tepo", "advantage_kappa", 3.0),
        ("tepo", "cov_share", 0.1),
        ("kl_cov", "cov_low", 0.5),
        ("kl_cov", "cov_high", 7.0),
        ("clip_cov", "cov_beta", 0.5),
        ("clip_cov", "steer_lambda_min", 0.5),
        ("grpo", "correction_low", 0.5),
        ("grpo", "correction_high", 2.0),
    ],
)
def test_a_replacement_without_effect_is_refused(name: str, key: str, value: float | str) -> None:
    with pytest.raises(ConfigError, match=f"objective.{key}={value} has no effect on objective {name}"):
        build_objective(ObjectiveConfig(name=name, **{key: value}))


def test_a_lower_bound_is_refused_where_the_correction_has_none() -> None:
    with pytest.raises(ConfigError, match=r"objective\.correction_low=0\.5 has no effect"):
        build_objective(ObjectiveConfig(name="grpo", correction="tis", correction_low=0.5))


@pytest.mark.parametrize("correction", CORRECTION_BOUNDS)
def test_the_bounds_of_a_correction(correction: str) -> None:
    """A correction has its own bounds where the config gives none."""
    objective = build_objective(ObjectiveConfig(name="grpo", correction=correction))
    assert objective.correction_bounds == CORRECTION_BOUNDS[correction]
    if correction != "none":
        low, _ = CORRECTION_BOUNDS[correction]
        objective = build_objective(ObjectiveConfig(name="grpo", correction=correction, correction_high=1.5))
        assert objective.correction_bounds == (low, 1.5)


def test_config_replaces_parts() -> None:
    built = build_objective(ObjectiveConfig(name="tepo", beta=1.0, aggregate="sequence_mean_token_mean"))
    assert built == OBJECTIVES["tepo"].replace(beta=1.0, aggregate="sequence_mean_token_mean")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_row_named_alone_is_that_row(name: str) -> None:
    assert build_objective(ObjectiveConfig(name=name)) == OBJECTIVES[name]


@pytest.mark.parametrize(
    "parts",
    [
        {"name": "tepo", "correction": "mis", "correction_high": 1.2, "ref_beta": 0.1},
        {"name": "gspo", "weighting": "clip_cov", "cov_share": 0.2, "cov_low": 0.2},
        {"name": "kl_cov", "ratio": "prefix", "cov_share": 0.25, "aggregate": "sequence_mean_token_sum"},
        {"name": "entropy_advantage", "advantage_alpha": 0.4, "weighting": "steer", "dual_clip": 3.0},
    ],
    ids=lambda parts: parts["name"],
)
def test_replaced_parts_are_computed(parts: dict) -> None:
    objective = build_objective(ObjectiveConfig(**parts))
    assert all(getattr(objective, k) == v for k, v in parts.items() if k != "name")
    batch = draw(1)
    compare(objective, batch, expected(method_of(objective), batch))


def test_a_new_method_is_a_function_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def squared(ratio_R, logprob_R, advantage_R, bounds):
        return ratio_R.square() * advantage_R, torch.zeros_like(ratio_R, dtype=torch.bool)

    monkeypatch.setitem(SURROGATES, "squared", squared)
    monkeypatch.setitem(OBJECTIVES, "mine", Objective(ratio="token", surrogate="squared"))
    batch = draw(0)
    out, grad, _ = ours(build_objective(ObjectiveConfig(name="mine")), batch)
    inputs = inputs_of(batch)
    torch.testing.assert_close(-grad, 2 * out.ratio_R.square() * inputs.advantage_R / inputs.whole.tokens)
