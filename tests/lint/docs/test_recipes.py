"""The recipes of the paper's tables: each is the row that it says, and the README tells of all of them."""

import csv
import importlib.util
import re
from pathlib import Path

import pytest
import yaml

from examples.paper.dapo_math import convert
from tepo_megatron.base.errors import DataError
from tepo_megatron.command.start import preflight
from tepo_megatron.config.io import load_config
from tepo_megatron.config.objective import ClipCov, KlCov, Steer
from tepo_megatron.evaluation.benchmarks import check_sources
from tepo_megatron.losses import OBJECTIVES
from tepo_megatron.service.method import resolve

PAPER = Path("examples/paper")
README = (PAPER / "README.md").read_text()
# in the file's name -> the model
MODELS = {
    "qwen2.5-7b": "Qwen2.5-7B", "qwen3-14b": "Qwen3-14B", "r1-llama-8b": "DeepSeek-R1-Distill-Llama-8B",
    "mistral-7b": "Mistral-7B-Instruct-v0.2", "r1-qwen-7b": "DeepSeek-R1-Distill-Qwen-7B",
}  # fmt: skip
WITH_KL = ("tepo", "tepo_kl_rising", "tepo_kl_both")
# objective -> what the paper, or the paper that it cites, says of it
NUMBERS: dict[str, dict[str, object]] = {
    "grpo": {"ratio": "token", "clip_low": 0.2, "clip_high": 0.28, "aggregate": "token_mean"},
    "clip_cov": {"weighting": ClipCov(share=2e-4, low=1, high=5)},
    "kl_cov": {"weighting": KlCov(share=2e-3, beta=1)},
    "entropy_advantage": {"advantage_alpha": 4e-4, "advantage_kappa": 2},
    "gpg": {"ratio": "none", "surrogate": "reinforce", "advantage": "gpg"},
    "gspo": {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "aggregate": "sequence_mean_token_mean"},
    "cispo": {"ratio": "token", "surrogate": "stop_gradient", "clip_low": 1},
    "prefix_is": {"ratio": "prefix"},
    "steer": {"weighting": Steer(lambda_min=0.8)},
    "tepo": {"ratio": "sequence", "aggregate": "token_mean", "kl_mask": "falling_entropy"},
    "tepo_no_kl": {"ratio": "sequence", "aggregate": "token_mean", "kl_mask": "none"},
    "kl_undifferentiated": {"ratio": "sequence", "kl_mask": "all"},
    "tepo_kl_rising": {"ratio": "sequence", "kl_mask": "rising_entropy"},
    "tepo_kl_both": {"ratio": "sequence", "kl_mask": "both"},
    "max_entropy": {"ratio": "sequence", "kl_mask": "none"},
    "min_entropy": {"ratio": "sequence", "kl_mask": "none"},
    "sequence_mean_token_mean": {"ratio": "sequence", "aggregate": "sequence_mean_token_mean"},
    "sequence_mean_token_sum": {"ratio": "sequence", "aggregate": "sequence_mean_token_sum"},
}


def files() -> dict[str, Path]:
    """Every YAML file under examples/paper, by its path without the suffix."""
    return {str(p.relative_to(PAPER).with_suffix("")): p for p in sorted(PAPER.rglob("*.yaml"))}


def published() -> dict[str, dict[str, str]]:
    with (PAPER / "published.csv").open() as file:
        return {row.pop("recipe"): row for row in csv.DictReader(file)}


ROWS = sorted(published())


def row_of(name: str) -> tuple[str, str, float, int, int]:
    """Return model, objective, beta, steps and seed of the row that a file is named after; of all others those are alike."""
    table, _, row = name.partition("/")
    model, objective, steps, seed = "qwen2.5-7b", row, 72, 2
    if table in ("table1", "table2"):
        model, _, objective = row.rpartition("-")
    elif table == "table3":
        objective = re.sub(r"panel_[b-e]_|panel_a_beta_.*", "", row) or "kl_undifferentiated"
    else:
        objective, *numbers = re.fullmatch(r"(\w+)_(\d+)_seed(\d)", row).groups()
        steps, seed = map(int, numbers)
    beta = 1.0 if model == "qwen3-14b" else 0.001
    beta = float(row.rpartition("_")[2]) if "panel_a" in row else beta if objective in WITH_KL else 0.0
    return MODELS[model], objective, beta, steps, seed


def test_there_is_one_file_for_each_row() -> None:
    assert [name for name in files() if name.startswith("table")] == ROWS and len(ROWS) == 48


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_what_the_paper_says(name: str) -> None:
    model, objective_name, beta, steps, seed = row_of(name)
    cfg = load_config(PAPER / f"{name}.yaml")
    objective = resolve(cfg).objective
    assert (cfg.model.path, cfg.objective.name, objective.beta) == (f"models/{model}", objective_name, beta)
    assert (cfg.training.steps, cfg.seed, cfg.name) == (steps, seed, name.replace("/", "-"))
    assert {part: getattr(objective, part) for part in NUMBERS[objective_name]} == NUMBERS[objective_name]
    assert cfg.objective.kl == ("k3_importance_weighted" if beta else None)
    # Section 4.1: the same in every row
    assert (cfg.optimizer.lr, cfg.rollout.temperature, cfg.rollout.filter_uniform_groups) == (5e-7, 1.0, True)
    assert (cfg.rollout.prompts_per_step, cfg.rollout.samples_per_prompt, cfg.training.minibatch_prompts) == (64, 8, 16)
    assert (cfg.data.max_prompt_tokens, cfg.rollout.max_response_tokens) == (2048, 8192)
    assert 64 // 16 * cfg.training.epochs == 8  # "updated 8 times"
    assert (cfg.platform, cfg.model.precision, cfg.parallel.world_size) == ("cuda", "bf16", 8)
    assert resolve(cfg).max_generation_rounds == 10 and resolve(cfg).overlong is None


@pytest.mark.parametrize("kl", ["k1", "k3", "abs"])
@pytest.mark.parametrize("name", [name for name in ROWS if name.startswith("table3/panel_") and row_of(name)[2]])
def test_panels_a_and_e_with_another_estimator(name: str, kl: str) -> None:
    row = load_config(PAPER / f"{name}.yaml")
    other = load_config(PAPER / f"{name.replace('table3', 'estimators')}_{kl}.yaml")
    assert resolve(other).objective == resolve(row).objective.replace(kl=kl)
    assert other.training == row.training and other.rollout == row.rollout


@pytest.mark.parametrize("name", ["tepo_eq4", "tepo_alg1"])
def test_the_other_readings_of_the_paper(name: str) -> None:
    cfg, row = load_config(PAPER / f"readings/{name}.yaml"), load_config(PAPER / "table1/qwen2.5-7b-tepo.yaml")
    assert resolve(cfg).objective == OBJECTIVES[name]
    assert cfg.training == row.training and cfg.rollout == row.rollout


def test_entropy_rows_differ_in_sign_alone() -> None:
    high, low = (load_config(PAPER / f"table3/panel_b_{x}_entropy.yaml").objective for x in ("max", "min"))
    assert high.entropy_coefficient is not None and low.entropy_coefficient is not None
    assert high.entropy_coefficient == -low.entropy_coefficient > 0


def test_published_figures() -> None:
    in_readme = re.findall(r"\| `([\w./-]+)\.yaml`(?: = `[^`]+`)? \| ([\d.]+) \|", README)
    assert in_readme == [(name, row["average"]) for name, row in published().items()]


@pytest.mark.parametrize("path", sorted({*Path("examples").rglob("*.yaml")} - {*PAPER.rglob("*.yaml")}), ids=str)
def test_the_other_examples_have_a_method(path: Path) -> None:
    if "runs" not in yaml.safe_load(path.read_text()):  # an ablation is no training config
        assert resolve(load_config(path)).objective


def test_benchmarks_that_cannot_be_had_are_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    path = PAPER / "table1/qwen3-14b-tepo.yaml"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"aime24: the package datasets, .* is not installed; .* aime24\.jsonl, .*folder"):
        preflight(load_config(path))
    check_sources(load_config(path, ["--evaluation.benchmark_folder", "tests/problems"]).evaluation)
    check_sources(load_config(path, ["--evaluation.benchmarks", "null"]).evaluation)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    check_sources(load_config(path).evaluation)


def record(problem: str, answer: str) -> dict[str, object]:
    asks = "The last line of your response should be of the form Answer: $Answer (without quotes) where $Answer is the answer"
    content = (
        f"Solve the following math problem step by step. {asks} to the problem.\n\n{problem}\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    )
    return {"prompt": [{"role": "user", "content": content}], "reward_model": {"ground_truth": answer}}


def test_dapo_math_becomes_rows() -> None:
    problem = "Find $n$.\n\nIt is even."
    rows = list(convert([record(problem, "34"), record("What is $1+1$?", "2"), record(problem, "34")]))
    assert [row["answer"] for row in rows] == ["34", "2"]
    (message,) = rows[0]["prompt"]
    assert message["role"] == "user" and message["content"].startswith(problem) and "\\boxed{}" in message["content"]
    assert "Answer:" not in message["content"]
    with pytest.raises(ValueError, match="record 0: not worded as"):
        list(convert([{"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2"}}]))
