"""The charts and the picture of a run: always drawn from whatever the run has left so far."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tepo_megatron.errors import DataError
from tepo_megatron.report import read_run, write_report
from tepo_megatron.report.chart import Chart, ChartAxis
from tepo_megatron.report.panels import sections
from tepo_megatron.report.picture import draw, write_picture
from tepo_megatron.report.run import facts
from tests.marks import full_but
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


def test_the_heading_names_the_run_and_its_result(tmp_path: Path) -> None:
    write_run(tmp_path, records(4))
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    texts = [text.get_text() for text in draw(read_run(tmp_path)).texts]
    assert "tepo  ·  tiny  ·  tp2  ·  cpu fp32  ·  4 steps in 1 min 35 s" in texts
    assert tmp_path.name in texts and "19.0% ± 2.0  →  81.0% ± 2.0" in texts


def test_a_run_under_way_says_how_far_it_is(tmp_path: Path) -> None:
    write_run(tmp_path, records(1), training={"steps": 9, "max_tokens_per_microbatch": 16384})
    figure = draw(read_run(tmp_path))
    assert "step 1 of 9" in "".join(text.get_text() for text in figure.texts)
    assert len(figure.axes) > 10 and all(axis.get_xlim()[1] > 9 for axis in figure.axes)


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
    evaluations = charts(tmp_path)["Reward and accuracy"].axes[0].series[-1]
    assert evaluations.x.tolist() == [0, 4]
    assert [round(float(x), 4) for row in evaluations.rows for x in row] == [0.19, 0.81, 0.17, 0.79, 0.21, 0.83]


def test_entropy_changes_of_both_signs_share_a_scale_that_shows_the_noise_floor(tmp_path: Path) -> None:
    write_run(tmp_path, measured(5))
    above, below = charts(tmp_path)["Entropy change dH by sign of A, nats"].axes
    assert above.limits == below.limits is not None and above.limits[0] < -0.12 < 0.12 < above.limits[1]
    for axis in (above, below):
        assert (axis.scale, axis.linear) == ("symlog", 2e-6)
        (floor,) = [series for series in axis.series if series.label == "noise floor"]
        assert [row.tolist() for row in floor.rows] == [[-2e-6] * 5, [2e-6] * 5]
    plots = [plot for plot in draw(read_run(tmp_path)).axes if plot.get_yscale() == "symlog"]
    assert [len(plot.get_yticks()) for plot in plots] == [5, 5]


def test_what_is_measured_at_some_steps_is_joined_between_them(tmp_path: Path) -> None:
    rows = measured(5)
    rows[3]["tepo/mask_below_noise"] = 0.4
    write_run(tmp_path, rows)
    shares = [row["tepo/kl_mask_share"] for row in rows]
    expected = [share * part for share, part in zip(shares, (0.1, 0.2, 0.3, 0.4, 0.4), strict=True)]
    assert lines(tmp_path)["of these, dH below the noise floor"] == pytest.approx(expected)


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
    without = lines(tmp_path)
    rows[1][key] = 0.5
    write_run(tmp_path, rows)
    assert label not in without and lines(tmp_path)[label][1] == 0.5
    assert title in charts(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("change", full_but([3e-7], [], [0.0, 3e-7, 50.0]))
def test_entropy_changes_of_any_size_are_drawn(tmp_path: Path, change: float) -> None:
    rows = [{k: change if "dH" in k else v for k, v in row.items() if "noise" not in k} for row in measured(2)]
    write_run(tmp_path, rows)
    assert write_picture(read_run(tmp_path)).exists()


@pytest.mark.slow
def test_steps_without_any_value_are_drawn(tmp_path: Path) -> None:
    write_run(tmp_path, [{"step": 1}, {"step": 2, "rollout/logprob_diff_mean": 0.0}])
    assert write_report(tmp_path).exists()


def test_the_limit_that_is_drawn_is_the_runs_own(tmp_path: Path) -> None:
    write_run(tmp_path, records(2), sync={"max_logprob_diff": 0.02})
    axis: ChartAxis = charts(tmp_path)["Rollout/train log-prob difference, nats"].axes[0]
    assert [rule.y for rule in axis.rules] == [0.02]


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


def test_restarts_of_servers_are_counted_where_there_were_some(tmp_path: Path) -> None:
    rows = measured(4)
    for row, restarts in zip(rows, (0, 2, None, 1), strict=True):
        row["rollout/server_restarts"] = restarts
    write_run(tmp_path, rows)
    run = read_run(tmp_path)
    assert facts(replace(run, summary=None))[-2:] == ("step 4 of 72", "3 server restarts")
    write_run(tmp_path, measured(4))  # written by a release that did not count them
    run = read_run(tmp_path)
    assert facts(replace(run, summary=None))[-1] == "step 4 of 72"
