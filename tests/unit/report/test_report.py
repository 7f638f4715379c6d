"""The charts and the picture of a run: always drawn from whatever the run has left so far."""

import json
from pathlib import Path

import matplotlib
import pytest
from matplotlib.text import Text

from tepo_megatron.base.errors import DataError
from tepo_megatron.report.chart import Chart
from tepo_megatron.report.live.run import LiveRun
from tepo_megatron.report.panels import learning, sections
from tepo_megatron.report.run import read_run
from tepo_megatron.report.write import STYLE, draw, write_report
from tests.report_runs import SUMMARY, measured, records, write_run


def charts(folder: Path) -> dict[str, Chart]:
    """Return the charts of a run by title."""
    return {chart.title: chart for charts in sections(read_run(folder)).values() for chart in charts}


def lines(folder: Path) -> dict[str, list[float]]:
    """Return the values of every curve of a run by label."""
    axes = [axis for chart in charts(folder).values() for axis in chart.axes]
    return {series.label: series.rows[-1].tolist() for axis in axes for series in axis.series}


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
    (entropy,) = charts(tmp_path)["Entropy"].axes[0].series
    assert entropy.x.tolist() == [1, 2, 3]
    values = entropy.rows[0].tolist()
    assert (values[0], values[2]) == (rows[0]["actor/entropy"], rows[2]["actor/entropy"])
    assert values[1] != values[1]


def test_the_diagnostics_are_drawn_as_recorded(tmp_path: Path) -> None:
    rows = measured(5)
    write_run(tmp_path, rows)
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    found = lines(tmp_path)
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
    evaluations = charts(tmp_path)["Reward and accuracy"].axes[1].series[0]
    assert evaluations.x.tolist() == [0, 4]
    assert [round(float(x), 4) for row in evaluations.rows for x in row] == [0.19, 0.81, 0.17, 0.79, 0.21, 0.83]
    of_rollouts, _ = charts(tmp_path)["Reward and accuracy"].axes
    with (tmp_path / "metrics.jsonl").open("a") as file:
        for step in (0, 5):
            keys = {"held_out/accuracy": 0.1 * step, "held_out/standard_error": 0.1, "aime24/accuracy": 0.2}
            file.write(json.dumps({"step": step} | {f"evaluation/{key}": value for key, value in keys.items()}) + "\n")
    live = LiveRun(tmp_path, 0)
    live.refresh()
    for chart in (charts(tmp_path)["Reward and accuracy"], learning(live.thinned)):
        bars, curve, _, other = chart.axes[1].series
        assert [row.tolist() for row in (bars.x, *bars.rows)] == [[0, 5], [0, 0.5], [-0.1, 0.4], [0.1, 0.6]]
        assert curve.label == "evaluation: held out" and other.rows[0].tolist() == [0.2, 0.2]
        assert chart.axes[0].series[0].x.tolist() == of_rollouts.series[0].x.tolist() == [1, 2, 3, 4, 5]
    (tmp_path / "summary.json").unlink()
    write_run(tmp_path, rows)
    assert len(charts(tmp_path)["Reward and accuracy"].axes) == 1, "a run without evaluations has no such axis"


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_no_legend_of_the_picture_hides_a_title(tmp_path: Path, ahead: int) -> None:
    write_run(tmp_path, measured(4), rollout={"max_staleness": ahead})
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    with matplotlib.rc_context(STYLE):
        figure = draw(read_run(tmp_path))
        figure.draw_without_rendering()
    titles = {text.get_text(): text for text in figure.findobj(Text) if text.get_text() and text.get_fontweight() == "bold"}
    assert "Seconds per step" in titles
    for plot in figure.axes:
        legend, title = plot.get_legend(), titles.get(plot.get_title(loc="left"))
        assert title is None or not legend.get_window_extent().overlaps(title.get_window_extent()), title.get_text()


def test_the_objective_of_a_run_need_not_be_tepo(tmp_path: Path) -> None:
    write_run(tmp_path, measured(2), objective={"name": "grpo"})
    shown = sections(read_run(tmp_path))
    assert list(shown)[1] == "Objective" and "sequence's" not in shown["Objective"][0].caption


@pytest.mark.slow
def test_steps_without_any_value_are_drawn(tmp_path: Path) -> None:
    write_run(tmp_path, [{"step": 1}, {"step": 2, "rollout/logprob_diff_mean": 0.0}])
    assert write_report(tmp_path).exists()


def test_the_limit_that_is_drawn_is_the_runs_own(tmp_path: Path) -> None:
    write_run(tmp_path, records(2), sync={"max_logprob_diff": 0.02})
    axis = charts(tmp_path)["Rollout/train log-prob difference, nats"].axes[0]
    assert [rule.y for rule in axis.rules] == [0.02]


@pytest.mark.parametrize("text", ["{", "[]", '{"steps": 4}', json.dumps(SUMMARY | {"standard_error": 0.02})])
def test_a_malformed_summary_is_named(tmp_path: Path, text: str) -> None:
    write_run(tmp_path, records(2))
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(DataError, match=r"summary\.json: not the summary of a run"):
        write_report(tmp_path)
    assert not (tmp_path / "report.png").exists()
