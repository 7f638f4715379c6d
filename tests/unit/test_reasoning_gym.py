"""reasoning-gym by name: its problems as prompts, its verifiers as a reward, and what is refused."""

import dataclasses
import sys
import types
from typing import Any

import pytest

from tepo_megatron.base.errors import ConfigError, DataError
from tepo_megatron.config import RewardConfig
from tepo_megatron.config.io import validate, validate_as
from tepo_megatron.data.readers import Row
from tepo_megatron.data.sources import DatasetSource
from tepo_megatron.rewards.build import build_reward
from tepo_megatron.rewards.grading import reasoning_gym
from tests.graded import decode, rollout

SUMS = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1&size=300"


def rows(source: str) -> list[Row]:
    place = DatasetSource.of(source)
    reader = place.reader()
    return place.slice([reader.whole(at) for at, _ in reader.rows((), passing_repeats=False)])


def test_items_depend_on_their_parameters_and_place_alone() -> None:
    items = rows(SUMS)
    assert len(items) == 300 and items == rows(SUMS)
    assert items[:10] + items[10:] == rows(f"{SUMS}[:10]") + rows(f"{SUMS}[10:]")
    assert items != rows(f"{SUMS}&seed=1") and len(rows("reasoning_gym:chain_sum")) == 500
    assert all(eval(item["question"].split("?")[-1].split(":")[-1].strip(" =.")) == int(item["answer"]) for item in items)


def test_a_level_sets_the_whole_curriculum_and_parameters_overrule_it() -> None:
    config = reasoning_gym.dataset("reasoning_gym:chain_sum?level=2&min_digits=1&max_digits=1").config
    assert (config.min_terms, config.max_terms, config.min_digits, config.max_digits) == (2, 4, 1, 1)


@pytest.mark.parametrize(
    ("answer", "credit", "texts", "scores"),
    [
        ("tag", "all", ["<answer>{}</answer>", "<answer>0</answer><answer> {} </answer>.", "{}"], [1, 1, 0]),
        ("number", "all", ["12 and {}", "{}", "{} or 99", "none"], [1, 1, 0, 0]),
        ("whole", "all", ["{}", " {}\n", "it is {}", ""], [1, 1, 0, 0]),
        ("whole", "share", ["{}", "not {}"], [1, 0.2]),
    ],
)  # fmt: skip
def test_the_verifier_of_the_prompts_dataset_grades(answer: str, credit: str, texts: list[str], scores: list[float]) -> None:
    item = rows(SUMS)[7]
    term = {"type": "reasoning_gym", "answer": answer, "credit": credit}
    rollouts = [
        dataclasses.replace(rollout(text.format(item["answer"])), row={key: item[key] for key in ("source", "place")})
        for text in texts
    ]
    with build_reward(validate_as(RewardConfig, {"terms": [term], "workers": 1}, "reward"), decode) as reward:
        graded = reward.score(rollouts)
    assert [r.score for r in graded] == pytest.approx(scores)
    assert {r.status for r in graded} <= {"graded", "no_answer"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("chain_sums", "no dataset 'chain_sums'; did you mean chain_sum"),
        ("chain_sum?terms=3", "has no parameter 'terms'; it has level, .*max_terms"),
        ("chain_sum?min_terms=5&max_terms=2", "refuses it .*max_terms must be >= min_terms"),
        ("chain_sum?level=-1", "level=-1 is no number of a level"),
        ("chain_sum?size=many", "refuses it"),
    ],
)
def test_what_it_does_not_know_is_refused(source: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        DatasetSource.of(f"reasoning_gym:{source}").reader()


def test_its_term_grades_nothing_else() -> None:
    tree: dict[str, Any] = {"name": "x", "model": {"path": "m"}, "reward": {"terms": [{"type": "reasoning_gym"}]}}
    with pytest.raises(ConfigError, match=r"type=reasoning_gym grades datasets of reasoning-gym, and data\.eval='e\.jsonl' is"):
        validate(tree | {"data": {"train": SUMS, "eval": "e.jsonl"}})


def test_a_package_that_only_one_dataset_needs_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """pycosat takes a C compiler. Where it is installed, it is used."""
    real = types.ModuleType("pycosat")
    monkeypatch.setitem(sys.modules, "pycosat", real)
    assert rows("reasoning_gym:spell_backward?size=3") and sys.modules["pycosat"] is real
