"""The nulls of a config take the values that its objective asks for; contradictions are refused with the fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.config.io import load_config, to_yaml, validate
from tepo_megatron.controller.method import Method, resolve
from tepo_megatron.errors import ConfigError
from tepo_megatron.launcher.start import preflight
from tepo_megatron.rewards.overlong import OverlongShaping

DYNAMIC = {"name": "grpo", "dynamic_sampling": True}
SHAPED = {"name": "grpo", "overlong_shaping": True}


def tree(**sections: Any) -> dict[str, Any]:
    return {"name": "run", "model": {"path": "nowhere"}, "data": {"train": "train.jsonl"}, **sections}


def method(**sections: Any) -> Method:
    return resolve(validate(tree(**sections)))


def test_a_method_without_requirements_keeps_the_defaults() -> None:
    plain = method(objective={"name": "tepo"})
    assert plain.objective.ratio == "sequence"
    assert (plain.max_generation_rounds, plain.overlong) == (1, None)


def test_dapo_refills_and_shapes() -> None:
    dapo = method(
        objective={"name": "dapo"},
        rollout={"max_response_tokens": 20480},
        training={"max_tokens_per_microbatch": 22528},
    )
    assert dapo.max_generation_rounds == 10
    assert dapo.overlong == OverlongShaping(max_tokens=20480, buffer_tokens=4096, penalty=0.5)


def test_each_part_alone() -> None:
    assert (method(objective=DYNAMIC).max_generation_rounds, method(objective=DYNAMIC).overlong) == (10, None)
    assert method(objective=SHAPED).max_generation_rounds == 1
    assert method(objective=SHAPED, rollout={"max_response_tokens": 1023}).overlong == OverlongShaping(1023, 204, 0.5)
    assert method(objective=SHAPED, rollout={"max_response_tokens": 3}).overlong == OverlongShaping(3, 1, 0.5)


def test_numbers_in_the_config_hold_for_every_objective() -> None:
    given = {"rollout": {"max_generation_rounds": 3}, "reward": {"overlong_buffer_tokens": 512}}
    for objective in ({"name": "tepo"}, DYNAMIC | SHAPED):
        resolved = method(objective=objective, **given)
        assert (resolved.max_generation_rounds, resolved.overlong) == (3, OverlongShaping(8192, 512, 0.5))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"objective": DYNAMIC, "rollout": {"filter_uniform_groups": False}},
            r"rollout\.filter_uniform_groups=false keeps; set that to true, or objective\.dynamic_sampling=false",
        ),
        (
            {"objective": DYNAMIC, "rollout": {"max_generation_rounds": 1}},
            r"rollout\.max_generation_rounds=1 forbids; .* or set objective\.dynamic_sampling=false",
        ),
        (
            {"objective": SHAPED, "reward": {"overlong_buffer_tokens": 0}},
            r"reward\.overlong_buffer_tokens=0 forbids; .* or set objective\.overlong_shaping=false",
        ),
        (
            {"reward": {"overlong_buffer_tokens": 8192}},
            r"overlong_buffer_tokens=8192 must be below rollout\.max_response_tokens=8192",
        ),
        ({"objective": SHAPED, "rollout": {"max_response_tokens": 1}}, r"overlong_buffer_tokens=1 must be below"),
        (
            {"training": {"old_logprobs": "rollout"}},
            r"old_logprobs=rollout knows no old entropies, which objective\.kl_mask=falling_entropy compares with",
        ),
        (
            {"training": {"old_logprobs": "rollout"}, "objective": {"name": "grpo", "correction": "tis"}},
            r"old_logprobs=rollout leaves objective\.correction=tis nothing to correct",
        ),
        (
            {"rollout": {"max_generation_rounds": 3, "filter_uniform_groups": False}},
            r"rollout\.max_generation_rounds=3 has no effect with rollout\.filter_uniform_groups=false",
        ),
        (
            {"objective": {"name": "dapo", "overlong_shaping": False}, "reward": {"overlong_buffer_tokens": 9}},
            r"reward\.overlong_buffer_tokens=9 shapes the reward, which objective\.overlong_shaping=false forbids",
        ),
        (
            {
                "objective": {"name": "grpo", "ref_beta": 0.1, "ref_kl_in": "reward"},
                "rollout": {"filter_uniform_groups": False},
            },
            r"makes full-size advantages of it; use objective\.advantage=mean, or filter those groups",
        ),
        ({"objective": {"name": "tapo"}}, r"objective\.name='tapo' is unknown"),
    ],
)
def test_contradictions_are_refused_before_the_model_is_looked_for(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        preflight(validate(tree(**sections)))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rollout": {"max_generation_rounds": 0}}, r"rollout\.max_generation_rounds: .*greater than or equal to 1"),
        ({"reward": {"overlong_buffer_tokens": -1}}, r"reward\.overlong_buffer_tokens: .*greater than or equal to 0"),
    ],
)
def test_values_out_of_range(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(tree(**sections))


def test_nulls_survive_the_resolved_config(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(validate(tree(objective=DYNAMIC | SHAPED))))
    assert resolve(load_config(path)) == method(objective=DYNAMIC | SHAPED)


ABLATIONS = {"ablation.yaml", "precision.yaml"}  # these hold several runs
TRAINING = sorted({p.name for p in Path("examples").glob("*.yaml")} - ABLATIONS)


@pytest.mark.parametrize("name", TRAINING)
def test_examples_contradict_nothing(name: str) -> None:
    cfg = load_config(Path("examples") / name)
    assert resolve(cfg).max_generation_rounds == cfg.rollout.max_generation_rounds
