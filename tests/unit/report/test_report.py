"""The picture of a run: always drawn from whatever the run has left so far."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
import pytest
from matplotlib.figure import Figure

from tepo_megatron import report
from tepo_megatron.config.io import load_config
from tepo_megatron.errors import DataError
from tepo_megatron.observability.sinks import read_metrics
from tepo_megatron.report import Curves, Summary, read_run, write_report
from tepo_megatron.report.picture import write_picture
from tepo_megatron.report.run import RunRecord
from tests.marks import full_but
from tests.report_runs import SUMMARY, measured, records, write_run


def drawn(folder: Path, summary: Summary | None = None) -> Figure:
    with matplotlib.rc_context(report.STYLE):
        return report.draw(RunRecord(folder, load_config(folder / "config.yaml"), Curves(read_metrics(folder)), summary))


def texts(figure: Figure) -> str:
    return "\n".join(t.get_text() for t in figure.texts)


@pytest.mark.slow
def test_the_picture_of_a_finished_run(tmp_path: Path) -> None:
    write_run(tmp_path, records(4))
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    path = write_report(tmp_path)
    assert path == tmp_path / "report.html"
    page = path.read_text()
    assert page.startswith("<!doctype html>") and "rollout.record=true keeps the rollouts of each step" in page
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "config.yaml", "metrics.jsonl", "report.html", "report.png", "summary.json",
    ]  # fmt: skip


def test_every_recorded_value_is_drawn_and_a_missing_one_is_a_gap(tmp_path: Path) -> None:
    rows = records(3)
    rows[1]["actor/entropy"] = None
    write_run(tmp_path, rows)
    figure = drawn(tmp_path)
    entropy = next(axis for axis in figure.axes if axis.get_title("left") == "Entropy").lines[0]
    assert entropy.get_xdata().tolist() == [1, 2, 3]
    values = entropy.get_ydata().tolist()
    assert (values[0], values[2]) == (rows[0]["actor/entropy"], rows[2]["actor/entropy"])
    assert values[1] != values[1]


def lines(figure: Figure) -> dict[str, list[float]]:
    """Every labelled line of the picture."""
    return {str(x.get_label()): list(x.get_ydata()) for axis in figure.axes for x in axis.lines if x.get_label()[0] != "_"}


def test_the_diagnostics_are_drawn_as_recorded(tmp_path: Path) -> None:
    rows = measured(5)
    write_run(tmp_path, rows)
    found = lines(drawn(tmp_path))
    for label, key in (
        ("A > 0: median", "tepo/dH_up_p50"),
        ("A < 0: median", "tepo/dH_down_p50"),
        ("tokens clipped: upper bound", "loss/clip_fraction_high"),
        ("lower bound", "loss/clip_fraction_low"),
        ("tokens under the mask", "tepo/kl_mask_share"),
        ("groups sampled", "rollout/sampled_groups"),
        ("trained on", "rollout/kept_groups"),
    ):
        assert found[label] == [row[key] for row in rows], label


@pytest.mark.parametrize(
    ("key", "title", "label"),
    [
        ("loss/ref_kl", "Entropy and KL to the reference", "KL to the reference, nats per token"),
        ("reward/ref_kl", "Entropy and KL to the reference", "KL to the reference, nats per response"),
        ("weighting/affected_share", "KL mask and weighting", "tokens that the weighting acts on"),
        ("correction/weight_mean", "Rollout/train log-prob difference, nats", "mean correction weight"),
    ],
)
@pytest.mark.slow
def test_quantities_that_a_method_lacks_have_no_panel(tmp_path: Path, key: str, title: str, label: str) -> None:
    rows = measured(3)
    write_run(tmp_path, [row | {key: None} for row in rows])
    without = drawn(tmp_path)
    rows[1][key] = 0.5
    write_run(tmp_path, rows)
    with_it = drawn(tmp_path)
    assert len(with_it.axes) == len(without.axes) + 1
    assert label not in lines(without) and lines(with_it)[label][1] == 0.5
    assert title in [axis.get_title("left") for axis in with_it.axes]


@pytest.mark.parametrize("change", full_but([3e-7], [], [0.0, 3e-7, 50.0]))
def test_entropy_changes_of_any_size_are_drawn(tmp_path: Path, change: float) -> None:
    rows = [{k: change if "dH" in k else v for k, v in row.items() if "noise" not in k} for row in measured(2)]
    write_run(tmp_path, rows)
    assert write_picture(read_run(tmp_path)).exists()


@pytest.mark.slow
def test_steps_without_any_value_are_drawn(tmp_path: Path) -> None:
    write_run(tmp_path, [{"step": 1}, {"step": 2, "rollout/logprob_diff_mean": 0.0}])
    assert write_report(tmp_path).exists()


def test_a_folder_without_metrics_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics\.jsonl"):
        write_report(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"steps": 4}', json.dumps(SUMMARY | {"standard_error": 0.02})])
def test_a_malformed_summary_is_named(tmp_path: Path, text: str) -> None:
    write_run(tmp_path, records(2))
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(DataError, match=r"summary\.json: not the summary of a run"):
        write_report(tmp_path)
    assert not (tmp_path / "report.png").exists()
