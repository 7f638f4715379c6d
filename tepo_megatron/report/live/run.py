"""One run of the live page: follow its folder, and give what the page draws as JSON."""

import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from tepo_megatron.base.errors import ConfigError, DataError, excerpt
from tepo_megatron.base.records import parse_lines, steps_of
from tepo_megatron.base.run_lock import is_gone
from tepo_megatron.config import Config
from tepo_megatron.config.io import load_config
from tepo_megatron.monitor.sinks import METRICS_FILE
from tepo_megatron.report.chart import css_color
from tepo_megatron.report.comparison import color, overlays
from tepo_megatron.report.curves import BUCKETS, NOTHING, Curves, table
from tepo_megatron.report.panels import sections, time_shares
from tepo_megatron.report.run import Evaluations, RunRecord, Summary, evaluations_of, facts, read_summary

_SERVER = "server/"  # first part of the keys that a step records of its servers
_STATES = {1.0: "up", 0.0: "lost"}
_Stamp = tuple[int, int, int] | None  # identity, size and time of a file; None: there is none


class LiveRun:
    """The folder of one run, read again and again. Nothing in it is changed.

    Attributes:
        version: Number that grows whenever `refresh` found something new.
    """

    def __init__(self, folder: Path, place: int) -> None:
        self.folder, self.version, self.curves = folder, 0, Curves.of([])
        self._place, self._thinned = place, self.curves
        self._stamps: tuple[_Stamp, ...] = ()
        self._cfg: Config | None = None
        self._summary: Summary | None = None
        self._notes: list[str] = []
        self._gone = False
        self._evaluations: Evaluations = {}

    def refresh(self) -> None:
        """Read what the run has written since the last call."""
        stamps = tuple(_stamp(self.folder / name) for name in ("config.yaml", "summary.json", METRICS_FILE))
        gone = is_gone(self.folder)
        if (stamps, gone) != (self._stamps, self._gone):
            self._stamps, self._gone, self.version = stamps, gone, self.version + 1
            self._read()

    def _read(self) -> None:
        self._cfg, self._summary, self._notes = None, None, []
        path = self.folder / METRICS_FILE
        data = path.read_bytes() if path.exists() else b""
        steps = steps_of(parse_lines(data[: data.rfind(b"\n") + 1]))  # a line without its end is still being written
        self.curves = Curves.of(steps.records)
        self._thinned, self._evaluations = self.curves.thinned(), evaluations_of(steps.evaluations)
        self._notes += [f"{METRICS_FILE}: {fault}." for fault in steps.faults]
        try:
            self._cfg = load_config(self.folder / "config.yaml")
            self._summary = read_summary(self.folder / "summary.json")
        except (ConfigError, DataError, OSError) as e:
            self._notes.append(excerpt(str(e), 500))

    @property
    def name(self) -> str:
        """Return the run's name, or its folder's while it has no config."""
        return self.folder.name if self._cfg is None else self._cfg.name

    def record(self, curves: Curves) -> RunRecord | None:
        """Return the run as the report's panels read it; None while it has no config or no step."""
        if self._cfg is None or not len(curves.steps):
            return None
        return RunRecord(self.folder, self._cfg, curves, self._summary, tuple(self._notes), self._evaluations)

    @property
    def thinned(self) -> RunRecord | None:
        """Return the run with thinned curves; None while it has no config or no step."""
        return self.record(self._thinned)

    def plain(self) -> dict[str, Any]:
        """Return what the page shows of this run, as JSON."""
        whole, thinned, notes = self.record(self.curves), self.thinned, list(self._notes)
        if whole is None and not notes:
            notes.append("No step has been recorded yet.")
        if len(self._thinned.steps) < len(self.curves.steps):
            notes.append(
                f"The {len(self.curves.steps):,} steps are shown as at most {BUCKETS} parts: by the least and greatest value "
                f"of each, and seconds by their mean."
            )
        xs: list[np.ndarray] = []
        shown = [
            {"name": name, "charts": [chart.plain(xs) for chart in charts]}
            for name, charts in ({} if thinned is None else sections(thinned)).items()
        ]
        return {
            "name": self.name,
            "folder": str(self.folder),
            "color": css_color(color(self._place)),
            "facts": [] if whole is None else [*facts(whole), *filter(None, [time_shares(whole)])],
            "notes": notes,
            "state": self._state(),
            "sections": shown,
            "x": [x.tolist() for x in xs],
            "servers": server_rows(self.curves),
            "table": [] if whole is None else table(self.curves),
        }

    def _state(self) -> dict[str, Any]:
        """Return whether the run has ended or died, and when it wrote its last step, in seconds since the epoch."""
        stamp, ended = _stamp(self.folder / METRICS_FILE), self._summary is not None
        written = None if stamp is None else stamp[2] / 1e9
        return {"ended": ended, "died": self._gone and not ended, "written": written, "now": time.time()}


def server_rows(curves: Curves) -> list[tuple[str, ...]]:
    """Return a row for each server: name, state, requests at once, tokens per second, restarts, at the last step.

    Empty: the run has no servers of its own, or was recorded by a version that recorded nothing of them.
    """
    rows = []
    names = {key.split("/")[1] for key in curves.named(_SERVER)}
    for name in sorted(names, key=lambda name: (len(name), name)):
        keys = (f"{_SERVER}{name}/{key}" for key in ("up", "queue", "tokens_per_second", "restarts"))
        state, *numbers = (float(curves[key][-1]) for key in keys)
        word = _STATES.get(state, NOTHING if math.isnan(state) else "starting")
        rows.append((f"server {name}", word, *(NOTHING if math.isnan(x) else f"{x:,.0f}" for x in numbers)))
    return rows


def compared(runs: list[LiveRun]) -> dict[str, Any]:
    """Return the curves of several runs in shared axes, as JSON."""
    known = [run.thinned for run in runs]
    xs: list[np.ndarray] = []
    # a run without a step yet has no curve, and the others keep their colours only if all are there
    charts = overlays([run for run in known if run is not None]) if all(run is not None for run in known) else []
    return {"charts": [chart.plain(xs) for chart in charts], "x": [x.tolist() for x in xs]}


def _stamp(path: Path) -> _Stamp:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
