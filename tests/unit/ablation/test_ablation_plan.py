"""The file of an ablation: what it means, and what it refuses before any run starts."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.config import Config
from tepo_megatron.report.ablation.plan import AblationPlan, read_plan
from tepo_megatron.service.method import resolve

ROOT = Path(__file__).parents[3]
BASE = {
    "name": "base", "platform": "cpu", "model": {"path": "m"}, "data": {"train": "t.jsonl", "eval": "e.jsonl"},
    "objective": {"name": "tepo", "beta": 0.01}, "training": {"steps": 9},
}  # fmt: skip
FILE = {"name": "ab", "base": "base.yaml", "runs": ["tepo", "grpo"]}


def check(cfg: Config) -> None:
    resolve(cfg)


def plan_of(folder: Path, words: tuple[str, ...] = (), **change: Any) -> AblationPlan:
    (folder / "base.yaml").write_text(yaml.safe_dump(BASE))
    (folder / "ab.yaml").write_text(yaml.safe_dump(FILE | change, sort_keys=False))
    return read_plan(folder / "ab.yaml", list(words), check)


def test_a_list_of_objectives_is_short_for_runs(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    assert [(name, list(by_seed)) for name, by_seed in plan.runs.items()] == [("tepo", [0, 1]), ("grpo", [0, 1])]
    cfg = plan.runs["grpo"][1]
    assert (cfg.seed, cfg.run_dir, cfg.objective.name) == (1, Path("runs/ab/grpo-seed1"), "grpo")
    assert plan.baseline == "tepo" and plan.folder == Path("runs/ab")
    assert cfg.training.steps == 9


def test_a_named_objective_leaves_the_parts_of_the_one_before(tmp_path: Path) -> None:
    """beta=0.01 of the base belongs to its tepo; grpo has no KL to weigh."""
    plan = plan_of(tmp_path, runs={"grpo": None, "warmer": {"objective": {"clip_low": 0.1}}})
    assert plan.runs["grpo"][0].objective.beta is None
    warmer = plan.runs["warmer"][0].objective
    assert (warmer.name, warmer.beta, warmer.clip_low) == ("tepo", 0.01, 0.1)


def test_overrides_reach_the_runs_that_name_an_objective(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, ("--overrides.objective.clip_high", "0.3"))
    assert [by_seed[0].objective.clip_high for by_seed in plan.runs.values()] == [0.3, 0.3]
    assert [by_seed[0].objective.name for by_seed in plan.runs.values()] == ["tepo", "grpo"]


def test_later_layers_win_and_words_reach_every_run(tmp_path: Path) -> None:
    plan = plan_of(
        tmp_path,
        ("--optimizer.lr", "1e-3", "--seeds", "[4]", "--name=other", "--baseline", "b"),
        overrides={"training": {"steps": 3, "epochs": 1}, "optimizer": {"lr": 1e-5, "warmup_steps": 5}},
        runs={"a": {"objective": {"name": "grpo"}, "training": {"steps": 5}}, "b": {"objective": {"name": "gspo"}}},
    )
    a, b = plan.runs["a"][4], plan.runs["b"][4]
    assert (a.training.steps, b.training.steps, a.training.epochs) == (5, 3, 1)
    assert {(c.optimizer.lr, c.optimizer.warmup_steps) for c in (a, b)} == {(1e-3, 5)}
    assert plan.file.seeds == [4] and plan.file.name == "other" and plan.baseline == "b" and b.name == "b-seed4"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"overides": {}}, r"overides: unknown key; did you mean overrides\?"),
        ({"runs": {}}, "runs: .*at least 1"),
        ({"runs": ["a", "a"]}, "a name is listed twice"),
        ({"runs": ["tpeo"]}, "runs.tpeo: objective.name='tpeo' is unknown"),
        ({"runs": {"a": {"rolout": {}}}}, r"runs.a: rolout: unknown key; did you mean rollout\?"),
        ({"runs": {"a/b": {}}}, "runs.a/b: .*must be a plain folder name"),
        ({"runs": {"grpo": {"seed": 3}}}, "runs.grpo.seed: the runner sets this key; use `seeds`"),
        ({"runs": {"grpo": 3}}, "runs.grpo: .*valid dictionary"),
        ({"overrides": {"optimizer": {"lr": -1}}}, "overrides: optimizer.lr: .*greater than 0"),
        ({"overrides": {"output": "x"}}, "overrides.output: the runner sets this key; use `output`"),
        ({"seeds": [0, 0]}, "a seed is listed twice"),
        ({"seeds": []}, "seeds: .*at least 1"),
        ({"baseline": "gspo"}, "baseline='gspo' is none of the runs; use one of tepo, grpo"),
        ({"name": "../ab"}, "must be a plain folder name"),
        ({"base": "nowhere.yaml"}, "nowhere.yaml: cannot read"),
        (
            {"runs": {"tepo": None, "b": {"data": {"eval": "other.jsonl"}}}},
            r"runs.b: data.eval=other.jsonl is not that of tepo \(e.jsonl\)",
        ),
        ({"overrides": {"data": {"eval": None}}}, "data.eval is missing"),
    ],
)
def test_refused_before_any_run(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(tmp_path, **change)


def test_the_seed_of_a_run_is_no_word(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="use --seeds"):
        plan_of(tmp_path, ("--seed", "3"))


def test_the_example_of_precisions_is_valid() -> None:
    """Nothing but the precision differs; what the engine may differ from the trainer is that of bf16."""
    plan = read_plan(ROOT / "examples" / "precision.yaml", [], check)
    assert plan.baseline == "fp32" and plan.file.seeds == [0, 1, 2]
    for name, by_seed in plan.runs.items():
        assert {(cfg.model.precision, cfg.sync.max_logprob_diff) for cfg in by_seed.values()} == {(name, 0.05)}
