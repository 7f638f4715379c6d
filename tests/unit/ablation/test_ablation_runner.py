"""The runner of an ablation makes missing runs, keeps finished ones, reports failures, and writes a table.

The runs here are replaced by the files that a run leaves; the end-to-end test makes real ones.
"""

import json
import signal
from pathlib import Path

import pytest
import yaml

from tepo_megatron.base.errors import ConfigError, RolloutError
from tepo_megatron.config import Config
from tepo_megatron.evaluation import Accuracy, write_evaluation
from tepo_megatron.evaluation.statistics import over_problems, paired_difference
from tepo_megatron.monitor import run_dir
from tepo_megatron.report.ablation.ablate import MethodRow, ablate, cells, to_json, verdict
from tepo_megatron.report.ablation.plan import read_plan
from tepo_megatron.service.method import resolve

BASE = {"name": "b", "platform": "cpu", "model": {"path": "m"}, "data": {"train": "t.jsonl", "eval": "e.jsonl"}}
PROBLEMS = 4
LIFT = {"tepo": 1, "grpo": 0}  # problems that a run solves beyond its seed's


def check(cfg: Config) -> None:
    resolve(cfg)


def accuracy(solved: int) -> Accuracy:
    scores = {p: float(p < solved) for p in range(PROBLEMS)}
    return Accuracy(solved / PROBLEMS, 0.1, PROBLEMS, 1, scores)


class Trainer:
    """Leaves the files of a run; `fails`: names of runs and what they raise."""

    def __init__(self, **fails: BaseException) -> None:
        self.started: list[str] = []
        self._fails = fails

    def __call__(self, cfg: Config) -> None:
        self.started.append(cfg.name)
        signal.signal(signal.SIGTERM, lambda *_: None)  # as torch's agent does
        run_dir.prepare(cfg)
        name = cfg.name.replace("-", "_")
        records = [
            {"step": s, "accuracy/mean": 0.1 * s, "actor/entropy": 1 / s, "loss/clip_fraction_low": 0.0}
            | {"tepo/kl_mask_share": 0.3 if cfg.objective.name == "tepo" else 0.0}
            for s in range(1, cfg.training.steps + 1)
        ]
        (cfg.run_dir / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        if name in self._fails:
            raise self._fails[name]
        write_evaluation(cfg.run_dir, accuracy(1), accuracy(2 + LIFT[cfg.objective.name]))
        (cfg.run_dir / "summary.json").write_text("{}")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE))
    path = tmp_path / "ab.yaml"
    tree = {"name": "ab", "base": "base.yaml", "runs": ["tepo", "grpo"], "baseline": "grpo", "output": str(tmp_path)}
    path.write_text(yaml.safe_dump(tree | {"overrides": {"training": {"steps": 10}}}))
    return path


def results(file: Path) -> dict[str, dict]:
    return {row["name"]: row for row in json.loads((file.parent / "ab" / "ablation.json").read_text())["rows"]}


ALL = ["tepo-seed0", "tepo-seed1", "grpo-seed0", "grpo-seed1"]


def test_every_run_is_made_once_and_reported(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, handler = Trainer(), signal.getsignal(signal.SIGTERM)
    assert ablate(file, [], check, trainer) == 0
    assert trainer.started == ALL
    assert signal.getsignal(signal.SIGTERM) is handler
    tepo, grpo = results(file)["tepo"], results(file)["grpo"]
    assert (tepo["after"]["mean"], grpo["after"]["mean"]) == (0.75, 0.5)
    assert tepo["difference"]["mean"] == 0.25 and grpo["difference"] is None
    assert tepo["difference"]["standard_error"] == pytest.approx(0.25)  # differences 0, 0, 1, 0
    assert (tepo["verdict"], grpo["verdict"]) == ("within noise", "baseline")
    assert tepo["steps_to_best"] == 10  # trailing means up to 0.8; 0.72 is reached with it alone, 0.7 comes before
    printed, markdown = capsys.readouterr().out, (file.parent / "ab" / "ablation.md").read_text()
    for phrase in ("75.0 ± 25.0", "+25.0 [-24.0, +74.0]", "within noise", "objective.name=grpo"):
        assert phrase in printed and phrase in markdown


@pytest.mark.parametrize(
    ("scores", "expected", "shown"),
    [
        ((0.75, 0.8, 0.7), "beyond seed noise", "[+12.6, +37.4]"),
        ((0.75, 0.95, 0.55), "beyond problem noise, within seed noise", "[-24.7, +74.7]"),
        ((0.75, 0.8), "beyond problem noise", "+25.0 … +30.0"),
    ],
)
def test_the_verdict_says_whether_other_seeds_would_agree(
    file: Path, scores: tuple[float, ...], expected: str, shown: str
) -> None:
    """The spread of three differences is 0.05 or 0.2, and t(2) / sqrt(3) = 2.484."""
    plan = read_plan(file, [], check)
    run, baseline = ({s: dict.fromkeys(range(9), x) for s, x in enumerate(of)} for of in (scores, [0.5] * len(scores)))
    row = MethodRow("tepo", 9, None, over_problems(run), None, None, paired_difference(run, baseline), {})
    assert verdict(plan, row) == expected == to_json(plan, [row])["rows"][0]["verdict"]
    assert cells(plan, row)[6] == shown


def test_finished_runs_are_kept_and_unfinished_ones_start_again(file: Path) -> None:
    assert ablate(file, [], check, Trainer()) == 0
    first = results(file)
    (file.parent / "ab" / "grpo-seed0" / "summary.json").unlink()
    again = Trainer()
    assert ablate(file, [], check, again) == 0
    assert again.started == ["grpo-seed0"] and results(file) == first


@pytest.mark.slow
def test_finished_runs_of_another_config_are_replaced_only_when_asked(file: Path) -> None:
    ablate(file, [], check, Trainer())
    other = Trainer()
    with pytest.raises(ConfigError, match=r"tepo-seed0 holds a finished run of another config.*--overwrite true"):
        ablate(file, ["--optimizer.lr", "1e-3"], check, other)
    assert other.started == []
    assert ablate(file, ["--optimizer.lr", "1e-3", "--overwrite", "true"], check, other) == 0
    assert other.started == ALL


def test_a_failing_run_is_reported_and_the_others_go_on(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failing = Trainer(grpo_seed0=RolloutError("rank 0: a traceback\nthe server | died"))
    assert ablate(file, [], check, failing) == 1
    assert failing.started == ALL
    assert "seed 0 failed: the server | died" in " ".join(capsys.readouterr().out.split())
    assert "seed 0 failed: the server \\| died" in (file.parent / "ab" / "ablation.md").read_text()
    tepo, grpo = results(file)["tepo"], results(file)["grpo"]
    assert list(grpo["after"]["by_seed"]) == ["1"] and list(tepo["difference"]["by_seed"]) == ["1"]
    assert grpo["errors"] == {"0": "rank 0: a traceback\nthe server | died"}
    repaired = Trainer()
    assert ablate(file, [], check, repaired) == 0
    assert repaired.started == ["grpo-seed0"]


def test_a_baseline_that_never_ended_leaves_nothing_to_compare(file: Path) -> None:
    died = RolloutError("died")
    assert ablate(file, [], check, Trainer(grpo_seed0=died, grpo_seed1=died)) == 1
    assert results(file)["tepo"]["verdict"] == "no comparison" and results(file)["grpo"]["after"] is None


def test_ctrl_c_ends_it_and_leaves_what_is_finished(file: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        ablate(file, [], check, Trainer(tepo_seed1=KeyboardInterrupt()))
    again = Trainer()
    assert ablate(file, [], check, again) == 0
    assert again.started == ALL[1:]
