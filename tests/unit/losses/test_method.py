"""The nulls of a config take the values that its objective asks for; contradictions are refused with the fix."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.base.types import Rollout
from tepo_megatron.command.start import preflight
from tepo_megatron.config.io import validate
from tepo_megatron.monitor.metrics import Metrics
from tepo_megatron.rewards.terms import OverlongShaping
from tepo_megatron.rollout import record
from tepo_megatron.service.method import Method, resolve
from tepo_megatron.service.opening import method_lines, open_driver
from tests.tiny import char_tokenizer

DAPO = {"name": "dapo"}  # it samples dynamically and shapes the reward of long responses


def tree(**sections: Any) -> dict[str, Any]:
    return {"name": "run", "model": {"path": "nowhere"}, "data": {"train": "train.jsonl"}, **sections}


def method(**sections: Any) -> Method:
    return resolve(validate(tree(**sections)))


def test_dapo_refills_and_shapes() -> None:
    dapo = method(
        objective={"name": "dapo"}, rollout={"max_response_tokens": 20480}, training={"max_tokens_per_microbatch": 22528}
    )
    assert dapo.max_generation_rounds == 10
    assert dapo.overlong == OverlongShaping(max_tokens=20480, buffer_tokens=4096, penalty=0.5)


def test_each_part_alone() -> None:
    """A number in the config switches one of them off."""
    sampled = method(objective=DAPO, reward={"overlong_buffer_tokens": 0})
    assert (sampled.max_generation_rounds, sampled.overlong) == (10, None)
    for tokens, buffer in ((1023, 204), (3, 1)):
        shaped = method(objective=DAPO, rollout={"max_response_tokens": tokens, "max_generation_rounds": 1})
        assert (shaped.max_generation_rounds, shaped.overlong) == (1, OverlongShaping(tokens, buffer, 0.5))
    unfiltered = {"max_generation_rounds": 1, "filter_uniform_groups": False}
    assert method(objective=DAPO, rollout=unfiltered).max_generation_rounds == 1


def test_numbers_in_the_config_hold_for_every_objective() -> None:
    given = {"rollout": {"max_generation_rounds": 3}, "reward": {"overlong_buffer_tokens": 512}}
    for objective in ({"name": "tepo"}, DAPO):
        resolved = method(objective=objective, **given)
        assert (resolved.max_generation_rounds, resolved.overlong) == (3, OverlongShaping(8192, 512, 0.5))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"objective": DAPO, "rollout": {"filter_uniform_groups": False}},
            r"rollout\.filter_uniform_groups=false keeps; set that to true, or rollout\.max_generation_rounds=1",
        ),
        (
            {"reward": {"overlong_buffer_tokens": 8192}},
            r"overlong_buffer_tokens=8192 must be below rollout\.max_response_tokens=8192",
        ),
        ({"objective": DAPO, "rollout": {"max_response_tokens": 1}}, r"overlong_buffer_tokens=1 must be below"),
        (
            {"training": {"old_logprobs": "rollout"}},
            r"old_logprobs=rollout knows no old entropies, which objective\.kl_mask=falling_entropy compares with",
        ),
        (
            {"training": {"old_logprobs": "rollout"}, "objective": {"name": "grpo", "correction": "tis"}},
            r"old_logprobs=rollout leaves objective\.correction\.type=tis nothing to correct",
        ),
        (
            {"rollout": {"max_generation_rounds": 3, "filter_uniform_groups": False}},
            r"rollout\.max_generation_rounds=3 has no effect with rollout\.filter_uniform_groups=false",
        ),
        (
            {
                "objective": {"name": "grpo", "ref_kl": {"beta": 0.1, "where": "reward"}},
                "rollout": {"filter_uniform_groups": False},
            },
            r"makes full-size advantages of it; use objective\.advantage=mean, or filter those groups",
        ),
        ({"objective": {"name": "distill"}}, r"is model\.path itself; set objective\.ref_kl\.path to the teacher's directory"),
        (
            {"objective": {"name": "distill", "ref_kl": {"beta": 1.0, "path": "teacher"}}},
            r"drops groups of equal scores.*set filter_uniform_groups to false",
        ),
        ({"objective": {"name": "grpo", "advantage": "none"}}, r"advantage=none leaves nothing to learn"),
        ({"objective": {"name": "tapo"}}, r"objective\.name='tapo' is unknown"),
    ],
)
def test_contradictions_are_refused_before_the_model_is_looked_for(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        preflight(validate(tree(**sections)))


@pytest.mark.parametrize(
    ("sections", "warns"),
    [
        ({}, True),
        ({"objective": {"correction": "tis"}}, False),
        ({"objective": {"name": "tepo_no_kl"}, "training": {"old_logprobs": "rollout"}}, False),
        ({"rollout": {"max_staleness": 0}}, False),
    ],
)
def test_stale_responses_without_correction_are_reported(sections: dict[str, Any], warns: bool) -> None:
    disaggregated = {"max_staleness": 1, "colocate": False} | sections.get("rollout", {})
    cfg = validate(tree(**sections | {"rollout": disaggregated}))
    lines = method_lines(resolve(cfg), cfg.training, cfg.rollout)
    assert any("max_staleness=1 trains on responses of older weights" in line for line in lines) == warns


LOG_OF_ALL, LOG_OF_ONE = "one update per rollout batch: ", "has one update, because "


@pytest.mark.parametrize(
    ("sections", "groups", "expected"),
    [
        ({}, (8, 4, 3, 8, 2), [f"warning: step 2 {LOG_OF_ONE}4 of rollout.prompts_per_step=8 groups"]),
        ({"training": {"stream": "arrival"}}, (8, 4, 3), [f"warning: step 2 {LOG_OF_ONE}4"]),
        ({}, (8, 5, 0), []),
        ({"training": {"epochs": 2}}, (8, 1), []),
        ({"objective": {"name": "reinforce"}}, (8, 1), []),
        ({"objective": {"name": "grpo"}, "training": {"old_logprobs": "rollout"}}, (8, 1), []),
        ({"training": {"minibatch_prompts": 8}}, (8, 4), [LOG_OF_ALL]),
    ],
)
def test_a_batch_of_one_update_is_reported_once(
    sections: dict[str, Any], groups: tuple[int, ...], expected: list[str], tmp_path: Path
) -> None:
    """A ratio of 1 and a dH of 0 leave nothing to clip or to mask. The rollouts are recordings, graded and filtered."""
    char_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    for step, count in enumerate(groups, start=1):
        ids, mask = torch.arange(6), torch.arange(6) >= 3
        rollouts = [
            Rollout(p, ids, mask, -1.0 * mask, 0, "stop", "1", float(s), float(s), "equal")
            for p in range(count)
            for s in (0, 1)
        ]
        record.write(tmp_path / "rollouts", step, rollouts, Metrics())
    cfg = validate(
        tree(
            output=str(tmp_path),
            platform="cpu",
            model={"path": str(tmp_path / "model"), "precision": "fp32"},
            objective=sections.get("objective", {}),
            rollout={"prompts_per_step": 8, "samples_per_prompt": 2, "replay": str(tmp_path / "rollouts")},
            training={"epochs": 1, "minibatch_prompts": 4} | sections.get("training", {}),
        )
    )
    cfg.run_dir.mkdir()
    with open_driver(cfg) as driver:
        for step in range(1, len(groups) + 1):
            driver.collect(step, lambda header: None)
    lines = (cfg.run_dir / "log.txt").read_text().splitlines()
    reports = [line for line in lines if LOG_OF_ALL in line or LOG_OF_ONE in line]
    assert [line[: len(start)] for line, start in zip(reports, expected, strict=True)] == expected
    assert all("lower training.minibatch_prompts=" in line for line in reports)
