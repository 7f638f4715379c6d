"""Building an objective from a config: replacements, refusals, and what a new method takes."""

from typing import Any

import pytest

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.config import ObjectiveConfig
from tepo_megatron.config.io import validate_as
from tepo_megatron.config.objective import ClipCov, GeometricMask, KlCov, ReferenceKl, Steer
from tepo_megatron.losses import build_objective
from tepo_megatron.losses.advantages import ADVANTAGES
from tepo_megatron.losses.kl import ESTIMATORS
from tepo_megatron.losses.objective import AGGREGATES, Objective
from tests.objective_cases import compare, draw, expected, method_of
from tests.reference.methods import CORRECTION_BOUNDS


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({"ratio": "sentence"}, "objective.ratio='sentence' is unknown; use one of token, sequence"),
        ({"advantage": "median"}, "objective.advantage='median' is unknown; use one of std, mean, leave_one_out, gpg, none"),
        ({"weighting": "top"}, "weighting: type='top' is unknown; use one of none, clip_cov, kl_cov, steer"),
        (
            {"correction": "cut"},
            "correction: type='cut' is unknown; use one of none, tis, sequence_mis, geometric_mask, icepop",
        ),
        ({"ref_kl": {"beta": 0.1, "estimator": "k4"}}, "objective.ref_kl.estimator='k4' is unknown; use one of k1, k2, k3"),
        ({"ref_kl": {"beta": 0.1, "where": "advantage"}}, "ref_kl.where: .* 'loss' or 'reward' .got 'advantage'"),
        ({"name": "tepo_no_kl", "beta": 0.1}, "no effect under objective.kl_mask=none"),
        ({"clip_low": 1.5}, "objective.clip_low=1.5 must lie in"),
        ({"correction": {"type": "tis", "high": 0.5}}, "correction: high=0.5 must be at least 1"),
        ({"dual_clip": 0.5}, "objective.dual_clip=0.5 must be above 1"),
        ({"name": "cispo", "dual_clip": 3.0}, "goes with objective.surrogate=clip, not stop_gradient"),
        ({"ratio": "none"}, "objective.ratio=none leaves objective.surrogate=clip without gradient"),
        ({"weighting": "kl_cov"}, "objective.weighting.type=kl_cov goes with objective.surrogate=unclipped"),
        ({"name": "clip_cov", "weighting": {"low": 7.0}}, "objective.weighting: low=7.0 must be below high=5.0"),
        ({"name": "clip_cov", "weighting": {"share": 1.5}}, "weighting.share: .* less than or equal to 1 .got 1.5"),
        ({"name": "steer", "weighting": {"lambda_min": 1.0}}, "weighting.lambda_min: .* less than 1 .got 1.0"),
        ({"correction": {"type": "geometric_mask", "low": 1.005}}, "set low <= 1 <= high"),
        ({"correction": {"type": "icepop", "high": 0.9}}, "set low <= 1 <= high"),
    ],
)
def test_contradictions_are_refused(cfg: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_objective(validate_as(ObjectiveConfig, cfg, "objective"))


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
        ("tepo", "advantage_kappa", 3.0),
    ],
)
def test_a_replacement_without_effect_is_refused(name: str, key: str, value: float | str) -> None:
    with pytest.raises(ConfigError, match=f"objective.{key}={value} has no effect on objective {name}"):
        build_objective(ObjectiveConfig(name=name, **{key: value}))


@pytest.mark.parametrize(
    ("name", "part", "field", "value"),
    [
        ("tepo", "weighting", "share", 0.1),
        ("kl_cov", "weighting", "low", 0.5),
        ("kl_cov", "weighting", "high", 7.0),
        ("clip_cov", "weighting", "beta", 0.5),
        ("clip_cov", "weighting", "lambda_min", 0.5),
        ("grpo", "correction", "low", 0.5),
        ("grpo", "correction", "high", 2.0),
    ],
)
def test_a_field_that_the_row_lacks_is_refused(name: str, part: str, field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"objective {name}: objective\.{part}: {field} has no effect: {part} \w+ has no"):
        build_objective(ObjectiveConfig(name=name, **{part: {field: value}}))


@pytest.mark.parametrize("correction", CORRECTION_BOUNDS)
def test_the_bounds_of_a_correction(correction: str) -> None:
    """A correction has its own bounds where the config gives none."""
    objective = build_objective(ObjectiveConfig(name="grpo", correction=correction))
    found = method_of(objective)
    assert (found.correction_low, found.correction_high) == CORRECTION_BOUNDS[correction]
    if correction != "none":
        low, _ = CORRECTION_BOUNDS[correction]
        found = method_of(build_objective(ObjectiveConfig(name="grpo", correction={"type": correction, "high": 1.5})))
        assert (found.correction_low, found.correction_high) == (low, 1.5)


@pytest.mark.parametrize(
    "parts",
    [
        {"name": "tepo", "correction": GeometricMask(high=1.2), "ref_kl": ReferenceKl(beta=0.1)},
        {"name": "gspo", "weighting": ClipCov(share=0.2, low=0.2)},
        {"name": "kl_cov", "ratio": "prefix", "weighting": KlCov(share=0.25), "aggregate": "sequence_mean_token_sum"},
        {"name": "entropy_advantage", "advantage_alpha": 0.4, "weighting": Steer(), "dual_clip": 3.0},
    ],
    ids=lambda parts: parts["name"],
)
def test_replaced_parts_are_computed(parts: dict) -> None:
    objective = build_objective(ObjectiveConfig(**parts))
    assert all(getattr(objective, k) == v for k, v in parts.items() if k != "name")
    batch = draw(1)
    compare(objective, batch, expected(method_of(objective), batch))


@pytest.mark.parametrize(
    ("table", "parts"),
    [
        (ESTIMATORS, {"kl": "own", "kl_mask": "all", "beta": 0.1}),
        (ESTIMATORS, {"ref_kl": ReferenceKl(beta=0.1, estimator="own")}),
        (ADVANTAGES, {"advantage": "own"}),
        (AGGREGATES, {"aggregate": "own"}),
    ],
)
def test_a_file_may_add_to_every_table(table: dict[str, Any], parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {"ratio": "token", "surrogate": "clip", "aggregate": "token_mean"} | parts
    with pytest.raises(ConfigError, match="='own' is unknown"):
        Objective(**whole)
    monkeypatch.setitem(table, "own", next(iter(table.values())))
    assert Objective(**whole) is not None
