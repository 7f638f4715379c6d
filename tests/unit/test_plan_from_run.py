"""`tepo plan --from RUN`: the plan repeats the run's seconds, and says what to change."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tepo_megatron.cli import main
from tepo_megatron.config.io import load_config, to_yaml
from tepo_megatron.plan.advice import changed_keys
from tepo_megatron.plan.calibration import MEASURED, checkpoint_interval, read_run
from tepo_megatron.plan.command import PlanRequest, predictor_of
from tepo_megatron.plan.search import LayoutCandidate, search

RECIPE = "examples/recipes/qwen3-14b-16gpu-apart.yaml"
SECONDS = {"rollout": 210.0, "old_stats": 31.0, "update": 140.0, "sync": 9.0, "total": 402.0}
PROMPT, RESPONSE, GROUPS, KEPT = 180, 2500, 80, 64


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of the recipe whose later steps took SECONDS; its first ones took longer."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(load_config(RECIPE, [])))
    samples = load_config(RECIPE, []).rollout.samples_per_prompt
    rows = []
    for step in range(1, 11):
        seconds = {name: value * (3 if step < 4 else 1) for name, value in SECONDS.items()}
        row = {"step": step, "rollout/kept_groups": KEPT, "rollout/sampled_groups": GROUPS, "rollout/stale_groups": 0}
        row |= {"rollout/response_tokens_mean": RESPONSE} | {f"seconds/{name}": value for name, value in seconds.items()}
        row["tokens_per_second"] = KEPT * samples * (PROMPT + RESPONSE) / seconds["total"]
        rows.append(json.dumps(row))
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    waits = "".join(f"12:00:00 checkpoint of step {s}: 9 MiB complete after 40.0 s, of which training waited {w} s\n"
                    for s, w in ((5, 10.0), (10, 14.0)))  # fmt: skip
    (folder / "log.txt").write_text(waits)
    return folder


def test_a_run_is_read_from_its_later_half(run: Path) -> None:
    found = read_run(run, load_config(RECIPE, []).rollout.samples_per_prompt)
    assert (found.steps, found.prompt, found.response, found.dropped) == ((6, 10), PROMPT, RESPONSE, 1 - KEPT / GROUPS)
    assert found.seconds == SECONDS and found.blocked == (10.0, 14.0)


@pytest.mark.parametrize(
    ("recipe", "ahead"), [(RECIPE, 0), (RECIPE, 1), ("examples/recipes/qwen3-14b-16gpu-colocated.yaml", 0)]
)
def test_the_plan_of_the_runs_own_config_has_the_runs_seconds(run: Path, recipe: str, ahead: int) -> None:
    words = ["--rollout.max_staleness", str(ahead)]
    (run / "config.yaml").write_text(to_yaml(load_config(recipe, words)))
    cfg = load_config(str(run / "config.yaml"), [])
    step = predictor_of(cfg, PlanRequest(run=run)).step()
    assert step.seconds == pytest.approx(SECONDS["total"], rel=1e-9)
    for name, phases in MEASURED.items():
        assert sum(step.phases[phase] for phase in phases) == pytest.approx(SECONDS[name], rel=1e-9), name
    assert step.tokens == pytest.approx(KEPT * cfg.rollout.samples_per_prompt * (PROMPT + RESPONSE), rel=0.01)


def test_longer_responses_than_recorded_take_longer(run: Path) -> None:
    cfg = load_config(RECIPE, [])
    seconds = [predictor_of(cfg, PlanRequest(run=run, response=n)).step().seconds for n in (RESPONSE, 2 * RESPONSE)]
    assert seconds[0] == pytest.approx(SECONDS["total"]) and seconds[1] > 1.5 * seconds[0]


def test_the_command_names_the_next_best_layout_as_keys(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = ["--parallel.tp", "8", "--parallel.dp", "1", "--parallel.cp", "1"]
    file = run / "plan.json"
    assert main(["plan", "--from", str(run), "--json", str(file), *slow]) == 0
    text = capsys.readouterr().out
    assert "recorded: prompts of 180 tokens, responses of 2500 on average" in text and "recorded: 20% of the groups" in text
    assert "steps 6 to 10" in text and "as recorded" in text
    line = next(line for line in text.splitlines() if line.startswith("  --parallel"))
    best = search(predictor_of(load_config(RECIPE, slow), PlanRequest(run=run)), 16).best[0]
    changed = load_config(RECIPE, [*slow, *line.split()])
    assert changed.parallel == best.cfg.parallel and changed.rollout.server.tp == best.cfg.rollout.server.tp
    assert changed_keys(LayoutCandidate(changed), best) == []
    assert json.loads(file.read_text())["calibration"]["factors"].keys() >= {"sample", "optimizer"}


def test_the_interval_of_checkpoints_loses_the_least(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = checkpoint_interval(12.0, SECONDS["total"], 5, 16, 50_000.0)
    others = [checkpoint_interval(12.0, SECONDS["total"], steps, 16, 50_000.0).lost_now for steps in range(1, 200)]
    assert found.lost == min(other for other in others if other is not None) and others.index(found.lost) + 1 == found.steps
    assert main(["plan", "--from", str(run), "--gpu-hours-per-failure", "50000"]) == 0
    text = capsys.readouterr().out
    assert "training waits 12.00 s for one (the mean of 2 recorded ones); a failure is expected every 3125 h" in text
    assert f"--checkpoint.every {found.steps} loses the least time" in text


def test_what_is_no_run_is_refused(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--from", str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().err
    rows = [{**json.loads(line), "rollout/kept_groups": 0} for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["plan", RECIPE, "--from", str(run)]) == 1
    assert "none of its later steps learned from a group" in capsys.readouterr().err
    for words in (["--from", str(run), "--gpu-hours-per-failure", "0"], ["--gpu-hours-per-failure", "5"]):
        assert main(["plan", RECIPE, *words]) == 1
        assert "--gpu-hours-per-failure" in capsys.readouterr().err


def test_no_torch_is_imported(run: Path) -> None:
    code = (
        "import sys; from tepo_megatron.cli import main; status = main(['plan', '--from', sys.argv[1]]);"
        "assert not {'torch', 'transformers', 'megatron'} & set(sys.modules); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
