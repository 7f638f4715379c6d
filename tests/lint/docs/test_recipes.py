"""The recipes of the paper's tables: each is the row that it says, and the README tells of all of them."""

import csv
import importlib.util
import re
from pathlib import Path

import pytest
import yaml

from examples.paper.dapo_math import convert
from tepo_megatron.config.io import load_config
from tepo_megatron.config.objective import ClipCov, KlCov, Steer
from tepo_megatron.controller.method import resolve
from tepo_megatron.errors import ConfigError, DataError
from tepo_megatron.evaluation.problems import check_sources
from tepo_megatron.launcher.preflight import preflight
from tepo_megatron.losses import OBJECTIVES

PAPER = Path("examples/paper")
README = (PAPER / "README.md").read_text()
QWEN, LARGE = "Qwen2.5-7B", "Qwen3-14B"
LLAMA, MISTRAL, DISTILLED = "DeepSeek-R1-Distill-Llama-8B", "Mistral-7B-Instruct-v0.2", "DeepSeek-R1-Distill-Qwen-7B"

# file -> model, objective, beta, steps, seed, published average
ROWS: dict[str, tuple[str, str, float, int, int, str]] = {
    "table1/qwen2.5-7b-grpo": (QWEN, "grpo", 0, 72, 2, "30.85"),
    "table1/qwen2.5-7b-clip_cov": (QWEN, "clip_cov", 0, 72, 2, "31.64"),
    "table1/qwen2.5-7b-kl_cov": (QWEN, "kl_cov", 0, 72, 2, "31.60"),
    "table1/qwen2.5-7b-entropy_advantage": (QWEN, "entropy_advantage", 0, 72, 2, "31.62"),
    "table1/qwen2.5-7b-gpg": (QWEN, "gpg", 0, 72, 2, "31.91"),
    "table1/qwen2.5-7b-gspo": (QWEN, "gspo", 0, 72, 2, "31.33"),
    "table1/qwen2.5-7b-tepo": (QWEN, "tepo", 0.001, 72, 2, "32.59"),
    "table1/qwen3-14b-grpo": (LARGE, "grpo", 0, 72, 2, "41.51"),
    "table1/qwen3-14b-clip_cov": (LARGE, "clip_cov", 0, 72, 2, "41.29"),
    "table1/qwen3-14b-kl_cov": (LARGE, "kl_cov", 0, 72, 2, "41.85"),
    "table1/qwen3-14b-entropy_advantage": (LARGE, "entropy_advantage", 0, 72, 2, "41.56"),
    "table1/qwen3-14b-gpg": (LARGE, "gpg", 0, 72, 2, "42.16"),
    "table1/qwen3-14b-gspo": (LARGE, "gspo", 0, 72, 2, "42.28"),
    "table1/qwen3-14b-tepo": (LARGE, "tepo", 1.0, 72, 2, "44.02"),
    "table2/r1-llama-8b-grpo": (LLAMA, "grpo", 0, 72, 2, "42.23"),
    "table2/r1-llama-8b-tepo": (LLAMA, "tepo", 0.001, 72, 2, "42.76"),
    "table2/mistral-7b-grpo": (MISTRAL, "grpo", 0, 72, 2, "3.37"),
    "table2/mistral-7b-tepo": (MISTRAL, "tepo", 0.001, 72, 2, "3.65"),
    "table2/r1-qwen-7b-grpo": (DISTILLED, "grpo", 0, 72, 2, "45.99"),
    "table2/r1-qwen-7b-tepo": (DISTILLED, "tepo", 0.001, 72, 2, "48.60"),
    "table3/tepo_no_kl": (QWEN, "tepo_no_kl", 0, 72, 2, "32.21"),
    "table3/panel_a_beta_1": (QWEN, "kl_undifferentiated", 1.0, 72, 2, "0.00"),
    "table3/panel_a_beta_0.1": (QWEN, "kl_undifferentiated", 0.1, 72, 2, "26.25"),
    "table3/panel_a_beta_0.01": (QWEN, "kl_undifferentiated", 0.01, 72, 2, "31.64"),
    "table3/panel_a_beta_0.001": (QWEN, "kl_undifferentiated", 0.001, 72, 2, "31.81"),
    "table3/panel_a_beta_0.0001": (QWEN, "kl_undifferentiated", 0.0001, 72, 2, "31.61"),
    "table3/panel_b_max_entropy": (QWEN, "max_entropy", 0, 72, 2, "31.65"),
    "table3/panel_b_min_entropy": (QWEN, "min_entropy", 0, 72, 2, "30.68"),
    "table3/panel_b_steer": (QWEN, "steer", 0, 72, 2, "31.30"),
    "table3/panel_b_clip_cov": (QWEN, "clip_cov", 0, 72, 2, "31.64"),
    "table3/panel_b_kl_cov": (QWEN, "kl_cov", 0, 72, 2, "31.60"),
    "table3/panel_b_entropy_advantage": (QWEN, "entropy_advantage", 0, 72, 2, "31.62"),
    "table3/panel_c_grpo": (QWEN, "grpo", 0, 72, 2, "30.85"),
    "table3/panel_c_gpg": (QWEN, "gpg", 0, 72, 2, "31.91"),
    "table3/panel_c_cispo": (QWEN, "cispo", 0, 72, 2, "31.58"),
    "table3/panel_c_prefix_is": (QWEN, "prefix_is", 0, 72, 2, "30.95"),
    "table3/panel_d_sequence_mean_token_mean": (QWEN, "sequence_mean_token_mean", 0, 72, 2, "31.33"),
    "table3/panel_d_sequence_mean_token_sum": (QWEN, "sequence_mean_token_sum", 0, 72, 2, "31.80"),
    "table3/panel_e_tepo_no_kl": (QWEN, "tepo_no_kl", 0, 72, 2, "32.21"),
    "table3/panel_e_tepo_kl_rising": (QWEN, "tepo_kl_rising", 0.001, 72, 2, "31.47"),
    "table3/panel_e_tepo_kl_both": (QWEN, "tepo_kl_both", 0.001, 72, 2, "32.03"),
    "table3/panel_e_tepo": (QWEN, "tepo", 0.001, 72, 2, "32.59"),
    "table4/grpo_72_seed1": (QWEN, "grpo", 0, 72, 1, "30.30"),
    "table4/grpo_72_seed2": (QWEN, "grpo", 0, 72, 2, "30.85"),
    "table4/grpo_132_seed1": (QWEN, "grpo", 0, 132, 1, "31.73"),
    "table4/grpo_132_seed2": (QWEN, "grpo", 0, 132, 2, "31.69"),
    "table4/tepo_72_seed1": (QWEN, "tepo", 0.001, 72, 1, "32.62"),
    "table4/tepo_72_seed2": (QWEN, "tepo", 0.001, 72, 2, "32.59"),
}
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


def test_there_is_one_file_for_each_row() -> None:
    assert {name for name in files() if name.startswith("table")} == set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_what_the_paper_says(name: str) -> None:
    model, objective_name, beta, steps, seed, _ = ROWS[name]
    cfg = load_config(PAPER / f"{name}.yaml")
    objective = resolve(cfg).objective
    assert (cfg.model.path, cfg.objective.name, objective.beta) == (f"models/{model}", objective_name, beta)
    assert (cfg.training.steps, cfg.seed, cfg.name) == (steps, seed, name.replace("/", "-"))
    assert {part: getattr(objective, part) for part in NUMBERS[objective_name]} == NUMBERS[objective_name]


@pytest.mark.parametrize("name", ROWS)
def test_a_row_with_a_kl_names_its_estimator(name: str) -> None:
    cfg = load_config(PAPER / f"{name}.yaml")
    assert cfg.objective.kl == ("k3_importance_weighted" if ROWS[name][2] else None)


@pytest.mark.parametrize("kl", ["k1", "k3", "abs"])
@pytest.mark.parametrize("name", [name for name in ROWS if name.startswith("table3/panel_") and ROWS[name][2]])
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


@pytest.mark.parametrize("name", ROWS)
def test_what_section_4_1_fixes_holds_in_every_row(name: str) -> None:
    cfg = load_config(PAPER / f"{name}.yaml")
    assert (cfg.optimizer.lr, cfg.rollout.temperature, cfg.rollout.filter_uniform_groups) == (5e-7, 1.0, True)
    assert (cfg.rollout.prompts_per_step, cfg.rollout.samples_per_prompt, cfg.training.minibatch_prompts) == (64, 8, 16)
    assert (cfg.data.max_prompt_tokens, cfg.rollout.max_response_tokens) == (2048, 8192)
    assert 64 // 16 * cfg.training.epochs == 8  # "updated 8 times"
    assert (cfg.platform, cfg.model.precision, cfg.parallel.world_size) == ("cuda", "bf16", 8)
    assert resolve(cfg).max_generation_rounds == 10 and resolve(cfg).overlong is None


def test_entropy_rows_differ_in_sign_alone() -> None:
    high, low = (load_config(PAPER / f"table3/panel_b_{x}_entropy.yaml").objective for x in ("max", "min"))
    assert high.entropy_coefficient is not None and low.entropy_coefficient is not None
    assert high.entropy_coefficient == -low.entropy_coefficient > 0


def test_published_figures() -> None:
    assert {name: row["average"] for name, row in published().items()} == {name: row[-1] for name, row in ROWS.items()}
    in_readme = re.findall(r"\| `([\w./-]+)\.yaml`(?: = `[^`]+`)? \| ([\d.]+) \|", README)
    assert in_readme == [(name, row[-1]) for name, row in ROWS.items()]


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


@pytest.mark.parametrize(
    ("value", "message"),
    [("[aime26]", r"evaluation\.benchmarks\.0: .*'aime24'"), ("[amc, amc]", r"benchmarks=.* names one twice")],
)
def test_benchmarks_that_are_none(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(PAPER / "table1/qwen3-14b-tepo.yaml", ["--evaluation.benchmarks", value])


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
