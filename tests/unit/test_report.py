"""The picture of a run: always drawn from whatever the run has left so far."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib.figure import Figure

from tepo_megatron import report
from tepo_megatron.config import Config
from tepo_megatron.config_io import load_config, to_yaml, validate
from tepo_megatron.errors import DataError
from tepo_megatron.report import Curves, Summary, write_report
from tepo_megatron.sinks import COLUMNS, read_metrics

SUMMARY = {
    "accuracy_before": 0.19,
    "accuracy_after": 0.81,
    "standard_error": {"before": 0.02, "after": 0.02},
    "steps": 4,
    "seconds": 95.4,
}


def write_run(folder: Path, records: list[dict[str, Any]], **settings: Any) -> Config:
    tree: dict[str, Any] = {
        "name": folder.name,
        "model": {"path": "m/tiny", "precision": "fp32"},
        "platform": "cpu",
    }
    cfg = validate(tree | {"data": {"train": "t.jsonl"}, "parallel": {"tp": 2}} | settings)
    (folder / "config.yaml").write_text(to_yaml(cfg))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return cfg


def records(steps: int) -> list[dict[str, Any]]:
    return [{"step": s} | {c.key: 0.1 * i + 0.01 * s for i, c in enumerate(COLUMNS)} for s in range(1, steps + 1)]


def drawn(folder: Path, summary: Summary | None = None) -> Figure:
    with matplotlib.rc_context(report.STYLE):
        return report.draw(Curves(read_metrics(folder)), load_config(folder / "config.yaml"), summary)


def texts(figure: Figure) -> str:
    return "\n".join(t.get_text() for t in figure.texts)


def test_the_picture_of_a_finished_run(tmp_path: Path) -> None:
    write_run(tmp_path, records(4))
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    path = write_report(tmp_path)
    assert path == tmp_path / "report.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "config.yaml", "metrics.jsonl", "report.png", "summary.json",
    ]  # fmt: skip


def test_the_heading_names_the_run_and_its_result(tmp_path: Path) -> None:
    write_run(tmp_path, records(4))
    figure = drawn(tmp_path, Summary(steps=4, seconds=95.4, evaluations=[(0.19, 0.02), (0.812, 0.021)]))
    assert tmp_path.name in texts(figure)
    assert "tepo  ·  tiny  ·  tp2  ·  cpu fp32  ·  4 steps in 1 min 35 s" in texts(figure)
    assert "19.0% ± 2.0  →  81.2% ± 2.1" in texts(figure)


def test_a_run_under_way_says_how_far_it_is(tmp_path: Path) -> None:
    write_run(tmp_path, records(1), training={"steps": 9, "max_tokens_per_microbatch": 16384})
    figure = drawn(tmp_path)
    assert "step 1 of 9" in texts(figure) and "→" not in texts(figure)
    assert all(axis.get_xlim()[1] > 9 for axis in figure.axes)
    assert write_report(tmp_path).exists()


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


def test_steps_without_any_value_are_drawn(tmp_path: Path) -> None:
    write_run(tmp_path, [{"step": 1}, {"step": 2, "rollout/logprob_diff_mean": 0.0}])
    assert write_report(tmp_path).exists()


@pytest.mark.parametrize(("precision", "limits"), [("fp32", 2), ("bf16", 0)])
def test_the_fp32_limits_are_drawn_where_they_hold(tmp_path: Path, precision: str, limits: int) -> None:
    write_run(tmp_path, records(2), model={"path": "m/tiny", "precision": precision})
    panel = next(a for a in drawn(tmp_path).axes if a.get_title("left").startswith("Rollout/train"))
    assert sum(str(line.get_label()).startswith("limit") for line in panel.lines) == limits


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
