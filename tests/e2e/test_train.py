"""Whole runs with real servers, real Megatron-Core and real grading."""

import json
import os
import re
import shutil
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tepo_megatron.config.io import load_config
from tepo_megatron.engines import sglang
from tepo_megatron.report.audit.comparison import audit_step
from tepo_megatron.rollout import record
from tepo_megatron.trainer.driver import KEYS, PHASES
from tests.e2e.conftest import settings
from tests.recorded import step_records, steps_taken

pytestmark = [pytest.mark.server, pytest.mark.e2e]

STEPS = 2
MEAN, LARGEST = "rollout/logprob_diff_mean", "rollout/logprob_diff_max"
# metrics that this run lacks, and metrics that some steps lack: the noise floor is not measured in every step
UNUSED = {"reward/ref_kl", "loss/ref_kl", "weighting/affected_share", "correction/weight_mean", "tepo/entropy_noise_floor"}
UNUSED |= {"mfu"}  # of GPUs only
TRUNCATED = {key for key in KEYS if key.startswith("truncation/")}
OF_OPTIONS = TRUNCATED | {key for key in KEYS if key.startswith("sync/")}


@pytest.mark.parametrize("engine", ["vllm", pytest.param("sglang", marks=pytest.mark.full)])
def test_a_run_from_base_model_to_report(tepo, arguments, base: Path, tmp_path: Path, engine: str) -> None:
    settings = {"training__steps": STEPS, "evaluation__every": 1, "optimizer__warmup_steps": 0, "rollout__engine": engine}
    settings |= {"rollout__prompts_per_step": 8, "training__minibatch_prompts": 4, "evaluation__max_problems": 16}
    settings |= {"logging__audit_every": STEPS - 1}
    command = tepo(*arguments(base, name="whole", **settings), "--watch")
    command.until(lambda: "live page until the run ends" in command.output, timeout=120)
    (url,) = re.findall(r"http://127\.0\.0\.1:\d+/\S+/", command.output)
    with urllib.request.urlopen(url + "runs?seen=", timeout=60) as page:
        assert json.load(page)["runs"]["0"]["folder"].endswith("whole")
    assert command.wait(240) == 0, command.output
    command.assert_nothing_left()
    run = tmp_path / "runs" / "whole"
    assert url not in (run / "log.txt").read_text()

    records = step_records(run)
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    expected = {"step", *KEYS, *(f"seconds/{p}" for p in PHASES), "seconds/total", "tokens_per_second"}
    expected |= {f"server/0/{name}" for name in ("up", "queue", "tokens_per_second", "restarts")}
    for r in records:
        assert r.keys() == expected
        assert {k for k, v in r.items() if v is None} <= UNUSED | OF_OPTIONS
        assert r["rollout/logprob_diff_mean"] <= 1e-5 and r["rollout/logprob_diff_max"] <= 1e-3
        assert 0 < r["rollout/kept_groups"] <= 32 and r["actor/grad_norm"] > 0
        assert r["tepo/ratio_p01"] <= r["tepo/ratio_p50"] <= r["tepo/ratio_p99"]

    audit = tepo("audit", run, "--step", str(STEPS))
    assert audit.wait(60) == 0 and "everything agrees" in audit.output, audit.output
    for step in range(1, STEPS + 1):
        assert audit_step(run, step).logged_loss == records[step - 1]["loss/total"]

    summary = json.loads((run / "summary.json").read_text())
    assert summary.keys() == {"accuracy_before", "accuracy_after", "standard_error", "steps", "seconds"}
    assert summary["steps"] == STEPS and 0 <= summary["accuracy_before"] <= 1
    assert command.output.count("accuracy at step") == 3  # 0, 1 and 2
    assert (run / "report.png").read_bytes().startswith(b"\x89PNG")
    assert load_config(run / "config.yaml").training.steps == STEPS

    trained = AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32)
    before = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    moved = [(a - b).abs().max().item() for a, b in zip(trained.parameters(), before.parameters(), strict=True)]
    assert all(0 < m < 0.1 for m in moved)
    assert AutoTokenizer.from_pretrained(run / "hf").encode("9+5-7?\n") == AutoTokenizer.from_pretrained(base).encode(
        "9+5-7?\n"
    )


@pytest.mark.full
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_truncated_sampling_is_trained_on_the_same_distribution(
    tepo, arguments, base: Path, tmp_path: Path, engine: str
) -> None:
    settings = {"training__steps": 3, "optimizer__warmup_steps": 0, "rollout__engine": engine, "rollout__record": True}
    settings |= {"rollout__prompts_per_step": 8, "training__minibatch_prompts": 4, "evaluation__max_problems": 4}
    settings |= {"rollout__top_k": 50, "rollout__top_p": 0.9, "rollout__temperature": 2.0, "objective__ref_kl__beta": 0.01}
    settings |= {"logging__audit_every": 1}
    command = tepo(*arguments(base, name="truncated", **settings))
    assert command.wait(240) == 0, command.output
    records = step_records(tmp_path / "runs" / "truncated")
    assert len(records) == 3
    for r in records:
        print(f"{engine}, step {r['step']}: " + ", ".join(f"{k} {r[k]:.1e}" for k in (*sorted(TRUNCATED), MEAN, LARGEST)))
        assert r[MEAN] <= 1e-5 and r["gate/logprob_diff_worst"] <= 1e-5
        assert r["truncation/recomputed"] == 0 and r["truncation/cut"] == 0
        assert r["truncation/differs"] <= 1e-3 and r["truncation/outside"] <= 1e-3
        assert 1 < r["truncation/kept_mean"] < 50 and r["actor/grad_norm"] > 0
        assert audit_step(tmp_path / "runs" / "truncated", r["step"]).agrees

    command = tepo("replay", tmp_path / "runs" / "truncated")
    assert command.wait(240) == 0 and "every number of the steps 1 to 3 is equal" in command.output, command.output
    for r, again in zip(records, step_records(tmp_path / "runs" / "truncated-replay"), strict=True):
        assert again["truncation/kept_mean"] == r["truncation/kept_mean"] and again["truncation/recomputed"] == 0


@pytest.mark.full
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_masks_of_older_weights_stay_with_their_tokens(tepo, arguments, base: Path, tmp_path: Path, engine: str) -> None:
    """Responses are one step old, and some are of two versions. The gate compares each token under its own weights."""
    settings = {"training__steps": 5, "optimizer__warmup_steps": 0, "rollout__engine": engine, "evaluation__max_problems": 4}
    settings |= {"rollout__prompts_per_step": 8, "training__minibatch_prompts": 4, "rollout__max_staleness": 1}
    settings |= {"rollout__top_k": 50, "rollout__top_p": 0.9, "rollout__temperature": 2.0}
    settings |= {"rollout__on_weight_update": "continue", "logging__audit_every": 1}
    command = tepo(*arguments(base, name="older", **settings))
    assert command.wait(240) == 0, command.output
    records = step_records(tmp_path / "runs" / "older")
    names = ("gate/logprob_diff_worst", "rollout/staleness", "rollout/mixed_versions", "truncation/differs", MEAN)
    for r in records:
        print(f"{engine}, step {r['step']}: " + ", ".join(f"{k} {r[k]:.1e}" for k in names))
        assert r["gate/logprob_diff_worst"] <= 1e-5 and r["gate/compared_share"] == 1 and r["truncation/recomputed"] == 0
        assert audit_step(tmp_path / "runs" / "older", r["step"]).agrees
    assert max(r["rollout/staleness"] for r in records) == 1
    assert max(r[MEAN] for r in records) > 1e-5, "newer weights have other log-probs"


@pytest.mark.full
def test_a_run_on_masks_that_the_actor_recomputes(tepo, arguments, base: Path, tmp_path: Path) -> None:
    """Without top-k vLLM returns no masks."""
    settings = {"training__steps": 2, "optimizer__warmup_steps": 0, "rollout__top_p": 0.9, "rollout__prompts_per_step": 8}
    command = tepo(*arguments(base, name="recomputed", **settings, evaluation__max_problems=4))
    assert command.wait(240) == 0, command.output
    for r in step_records(tmp_path / "runs" / "recomputed"):
        print(f"recomputed, step {r['step']}: " + ", ".join(f"{k} {r[k]}" for k in (*sorted(TRUNCATED), MEAN, LARGEST)))
        assert r["truncation/recomputed"] == 1 and r["truncation/cut"] == 0 and r["truncation/outside"] <= 1e-3
        assert r["truncation/differs"] is None and r[MEAN] <= 1e-4


@pytest.mark.full
def test_a_server_killed_in_mid_run_on_three_stages(tepo, arguments, base: Path, tmp_path: Path) -> None:
    """Weights of every pipeline stage reach the server; its death ends every rank with one error and leaves whole lines."""
    settings = {"parallel__tp": 1, "parallel__pp": 3, "training__steps": 500, "rollout__server__restarts": 0}
    command = tepo(*arguments(base, name="killed", **settings))
    run = tmp_path / "runs" / "killed"
    command.until(lambda: steps_taken(run) >= 3, timeout=180)
    server = next(line for line in command.left_over() if "-m vllm.entrypoints" in line and "guard" not in line)
    os.kill(int(server.split()[0]), signal.SIGKILL)
    assert command.wait(120) == 1
    assert command.output.count("tepo: error: rank 0:") == 1 and "SIGKILL" in command.output, command.output
    assert "Traceback" not in command.output
    command.assert_nothing_left()
    records = step_records(run)  # every line parses
    assert len(records) >= 3 and all(r["rollout/logprob_diff_mean"] <= 1e-5 for r in records)
    assert all(r["rollout/logprob_diff_max"] <= 1e-3 for r in records)
    assert not (run / "hf").exists() and not (run / "summary.json").exists()


@pytest.mark.full
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_servers_killed_and_frozen_in_mid_run_cost_no_sample(tepo, arguments, base: Path, tmp_path: Path, engine: str) -> None:
    """16 steps on two servers, of which one is killed and then one frozen: every prompt is learned from exactly once."""
    settings = {"training__steps": 16, "rollout__engine": engine, "rollout__servers": 2, "rollout__record": "true"}
    settings |= {"rollout__server__heartbeat_timeout": 5, "rollout__filter_uniform_groups": "false", "data__shuffle": "false"}
    settings |= {"rollout__prompts_per_step": 8, "training__minibatch_prompts": 4, "rollout__server__restarts": 9}
    command = tepo(*arguments(base, name="chaos", **settings))
    run = tmp_path / "runs" / "chaos"

    def first_process() -> int:
        return command.oldest_server({"vllm": "-m vllm.entrypoints", "sglang": f"-m {sglang.SERVER}"}[engine])

    with command.stopped_when(lambda: steps_taken(run) >= 2, timeout=240):
        os.kill(first_process(), signal.SIGKILL)
    command.until(lambda: "is started again (restart 1)" in command.output, timeout=240)
    seen = steps_taken(run)
    command.until(lambda: steps_taken(run) >= seen + 2, timeout=240)
    os.kill(first_process(), signal.SIGSTOP)
    assert command.wait(400) == 0, command.output
    command.assert_nothing_left()
    assert command.output.count("is started again") >= 2, command.output
    prompts = []
    for step in range(1, 17):
        rollouts, _ = record.read(run / record.FOLDER, step)
        assert len(rollouts) == 64 and {r.policy_version for r in rollouts} == {step - 1}
        prompts += [r.prompt_id for r in rollouts[::8]]
    assert len(prompts) == 128 and len(set(prompts)) == 128, "a prompt was lost, or used twice"
    assert all(r["rollout/logprob_diff_mean"] <= 1e-5 for r in step_records(run))


@pytest.mark.full
def test_a_hybrid_trains_and_the_engine_serves_what_the_actor_has(tepo, arguments, hybrid_base: Path, tmp_path: Path) -> None:
    """`make demo MODEL=qwen3_5` in a small form."""
    keys = {"training__steps": 3, "evaluation__every": 3, "optimizer__warmup_steps": 0, "evaluation__max_problems": 16}
    keys |= {"rollout__prompts_per_step": 8, "training__minibatch_prompts": 4, "sync__delta": "layers", "sync__verify_every": 1}
    command = tepo(*arguments(hybrid_base, name="hybrid", **keys))
    assert command.wait(240) == 0, command.output
    command.assert_nothing_left()
    run = tmp_path / "runs" / "hybrid"
    records = step_records(run)
    assert [r["step"] for r in records] == list(range(1, 4))
    for r in records:
        assert r["rollout/logprob_diff_mean"] <= 1e-5 and r["rollout/logprob_diff_max"] <= 1e-3
        assert r["rollout/kept_groups"] > 0 and r["actor/grad_norm"] > 0
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (hybrid_base, run / "hf"))
    assert before.keys() == after.keys()
    assert {n for n in before if torch.equal(before[n], after[n])} == set(), "every tensor was trained"


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["calculator", "game", "python_tool"])
def test_a_recipe_trains_on_the_turns_that_were_sampled(tepo: Any, base: Path, tmp_path: Path, recipe: str) -> None:
    """The recipes of examples/agents: every turn is of the served weights, and no sample is lost."""
    if recipe == "python_tool" and shutil.which("bwrap") is None:
        pytest.skip("no bwrap (Debian: apt-get install bubblewrap)")
    keys = {
        "output": tmp_path / "runs", "name": recipe, "training__steps": 3, "rollout__prompts_per_step": 16,
        "training__minibatch_prompts": 8, "evaluation__max_problems": 16, "rollout__filter_uniform_groups": "false",
    }  # fmt: skip
    command = tepo("train", f"examples/agents/{recipe}.yaml", *settings(base, **keys))
    assert command.wait(240) == 0, command.output
    command.assert_nothing_left()
    records = step_records(tmp_path / "runs" / recipe)
    assert [r["step"] for r in records] == list(range(1, 4))
    for r in records:
        assert r["rollout/logprob_diff_mean"] <= 1e-5 and r["actor/grad_norm"] > 0
        lost = [r[f"rollout/samples_{kind}"] for kind in ("raised", "timed_out", "over_limit")]
        assert lost == [0, 0, 0], command.output
