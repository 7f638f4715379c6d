"""The live page follows the files of a run."""

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tepo_megatron.base.run_lock import LOCK_FILE, RunLock
from tepo_megatron.report.live.run import LiveRun, compared
from tepo_megatron.report.run import BUCKETS, NOTHING, Curves
from tests.report_runs import measured, records, write_run


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_a_file_that_grows_is_cut_and_replaced_is_followed(tmp_path: Path) -> None:
    run, path, rows = LiveRun(tmp_path, 0), tmp_path / "metrics.jsonl", records(6)

    def steps() -> list[float]:
        version = run.version
        run.refresh()
        assert run.version == version + 1
        found: list[float] = run.curves.steps.tolist()
        return found

    assert steps() == []
    path.write_bytes(lines(rows[:3]) + lines(rows[3:4])[:-20])
    assert steps() == [1, 2, 3], "half a line is no step yet"
    path.write_bytes(lines(rows[:4]) + b'{"step": broken\n' + lines([{"step": 2, "reward/mean": -7.0}]))
    assert steps() == [1, 2, 3, 4] and any("line 5 cannot be read" in note for note in run.plain()["notes"])
    assert run.curves["reward/mean"][1] == -7.0, "the later record of a step counts"
    assert math.isnan(run.curves["actor/entropy"][1]) and "actor/entropy" in run.curves
    again = lines([{"step": s, "reward/mean": 5.0} for s in range(1, 4)])
    rest = path.stat().st_size - len(again)
    path.write_bytes(again + b" " * (rest - 1) + b"\n")  # cut and grown between two readings, the same file and size
    assert steps() == [1, 2, 3] and set(run.curves["reward/mean"]) == {5.0}
    other = tmp_path / "other"
    other.write_bytes(lines(rows[:1]))
    os.replace(other, path)
    assert steps() == [1]
    path.unlink()
    assert steps() == []
    run.refresh()
    assert run.version == 6, "nothing is new"


def test_long_runs_are_thinned_to_their_extremes() -> None:
    rng, count = np.random.default_rng(0), 10_007
    noise = rng.normal(size=count)
    noise[[3, 5000, count - 1]] = 50.0, -60.0, math.nan
    rare = np.where(np.arange(count) % 700 == 0, rng.normal(size=count), math.nan)
    columns = {"x": noise, "rare": rare, "seconds/total": rng.random(count), "none": np.full(count, math.nan)}
    whole = Curves(np.arange(1.0, count + 1), columns)
    thin = whole.thinned()
    assert len(thin.steps) <= 2 * BUCKETS and thin.steps[0] == 1 and thin.steps[-1] == count and (np.diff(thin.steps) > 0).all()
    assert np.nanmax(thin["x"]) == 50.0 and np.nanmin(thin["x"]) == -60.0
    kept = thin["x"].reshape(-1, 2)
    for place in (0, 100, 200, len(kept) - 1):
        inside = noise[(whole.steps >= thin.steps[2 * place]) & (whole.steps <= thin.steps[2 * place + 1])]
        assert {np.nanmin(inside), np.nanmax(inside)} == set(kept[place].tolist())
    assert np.isin(rare[np.isfinite(rare)], thin["rare"]).all() and "none" not in thin
    assert thin["seconds/total"].mean() == pytest.approx(columns["seconds/total"].mean(), rel=1e-3)
    assert whole.thinned(count) is whole


@pytest.mark.slow
def test_a_run_that_begins_is_restarted_and_replaced_stays_on_the_page(tmp_path: Path) -> None:
    first, second = LiveRun(tmp_path / "first", 0), LiveRun(tmp_path / "second", 1)
    for run in (first, second):
        run.folder.mkdir()
        run.refresh()
        assert run.plain()["sections"] == [] and run.plain()["notes"]
    write_run(first.folder, measured(3))
    first.refresh()
    plain = first.plain()
    assert plain["facts"][-2].startswith("step 3 of") and len(plain["sections"]) == 4 and not plain["state"]["ended"]
    assert compared([first, second])["charts"] == [], "the second one has no step yet"
    server = {"server/0/up": 1.0, "server/0/queue": 12.0, "server/0/tokens_per_second": 1234.5, "server/0/restarts": 0.0}
    write_run(second.folder, [row | server | {"server/1/up": 0.0} for row in measured(3000)])
    second.refresh()
    assert second.plain()["servers"] == [("server 0", "up", "12", "1,234", "0"), ("server 1", "lost", *[NOTHING] * 3)]
    assert any("3,000 steps" in note for note in second.plain()["notes"])
    chart = compared([first, second])["charts"][0]
    assert [s["label"] for s in chart["axes"][0]["series"]] == ["first", "second"]
    version = first.version
    (first.folder / "config.yaml").write_text("model: [")
    first.refresh()
    assert first.version > version and first.plain()["notes"] and first.plain()["sections"] == []
    with RunLock(second.folder) as lock:
        lock.sign()
        second.refresh()
        assert not second.plain()["state"]["died"]
        owner = (second.folder / LOCK_FILE).read_text()
    version = second.version
    second.refresh()
    assert second.plain()["state"]["died"] and second.version > version, "a launcher that failed leaves no file"
    (second.folder / LOCK_FILE).write_text(owner.replace('"start": "', '"start": "1'))  # of a pid that was given again
    second.refresh()
    assert second.plain()["state"]["died"], "a launcher that was killed leaves one"
    json.dumps([first.plain(), second.plain(), compared([first, second])], allow_nan=False)
