"""One run of the live page: follow its folder, and give what the page draws as JSON, samples and tokens included.

Samples are given one page at a time, and the numbers of their tokens one sample at a time.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tepo_megatron.base.errors import ConfigError, DataError, excerpt
from tepo_megatron.base.records import parse_lines, steps_of
from tepo_megatron.base.run_lock import is_gone
from tepo_megatron.config import Config
from tepo_megatron.config.io import load_config
from tepo_megatron.monitor.run_dir import audit_folder
from tepo_megatron.monitor.sinks import METRICS_FILE
from tepo_megatron.report.audit.reading import read_batch, read_update
from tepo_megatron.report.chart import css_color, rounded
from tepo_megatron.report.comparison import color, overlays
from tepo_megatron.report.panels import sections, time_shares
from tepo_megatron.report.run import (
    BUCKETS,
    NOTHING,
    Curves,
    Evaluations,
    RunRecord,
    Summary,
    evaluations_of,
    facts,
    read_summary,
    table,
)
from tepo_megatron.report.samples import (
    ReportSample,
    TextSpan,
    find_tokenizer,
    of_text,
    of_tokens,
    read_folder,
    sample_of,
    shortened,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tepo_megatron.base.types import Rollout

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
        self._thinned = self.curves.thinned()
        self._notes += [f"{METRICS_FILE}: {fault}." for fault in steps.faults]
        try:
            self._cfg = load_config(self.folder / "config.yaml")
            self._summary = read_summary(self.folder / "summary.json")
        except (ConfigError, DataError, OSError) as e:
            self._notes.append(excerpt(str(e), 500))
        self._evaluations = evaluations_of(steps.evaluations, self._summary)

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


PAGE = 4  # samples of a page
TOKENS = 1000  # tokens of a page
LONGEST_TOKEN = 200  # characters shown of one token
ORDERS = ("recorded", "best", "worst", "longest")
KEEP_TOKENS = "The numbers of this step's tokens were not kept: logging.audit_every=10 keeps them in every tenth step."
KEEP_SAMPLES = "No samples were kept: rollout.record=true keeps the rollouts of each step."


class SampleReader:
    """Reads samples of one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._notes: list[str] = []
        self._model = ""  # whose tokenizer is loaded

    def page(self, run: RunRecord, step: int | None, order: str, page: int) -> dict[str, Any]:
        """Return some samples as JSON, of the recorded step that is nearest to `step`. None: of the last one.

        Raises DataError if the recording is missing or damaged.
        """
        from tepo_megatron.rollout import record  # imports torch

        folder = read_folder(run)
        known = record.steps(folder)
        if not known:
            return {"steps": 0, "notes": [KEEP_SAMPLES], "samples": []}
        place = len(known) - 1 if step is None else int(np.abs(np.array(known) - step).argmin())
        step = known[place]
        rewards = np.array(record.column(folder, step, "reward"))
        chosen = _ordered(rewards, order, lambda: record.column(folder, step, "length"))
        pages = max(1, -(-len(chosen) // PAGE))
        page = min(max(page, 0), pages - 1)
        places = chosen[page * PAGE : (page + 1) * PAGE]
        tokenizer = self._load(run)
        samples = [
            {"place": i, **_plain(sample_of(f"sample {i}, prompt {rollout.prompt_id}", rollout, tokenizer))}
            for i, rollout in zip(places, record.read_some(folder, step, places), strict=True)
        ]
        near = {"before": known[place - 1] if place else None, "after": known[place + 1] if place + 1 < len(known) else None}
        return {
            "step": step, "steps": len(known), "page": page, "pages": pages, **near,
            "mean": round(float(rewards.mean()), 4) if len(rewards) else None, "notes": self._notes, "samples": samples,
        }  # fmt: skip

    def tokens(self, run: RunRecord, step: int, place: int, first: int) -> dict[str, Any]:
        """Return the tokens of one sample's response with their numbers, as JSON.

        Raises DataError if a file is missing or damaged, or has no such sample.
        """
        from tepo_megatron.rollout import record  # imports torch

        (rollout,) = record.read_some(read_folder(run), step, [place])
        ids, mask = rollout.token_ids_L.numpy(), rollout.response_mask_L.numpy().astype(bool)
        sequence, values, note = self._values(run, step, rollout, place)
        engine = rollout.rollout_logprobs_L.numpy().astype(np.float64)[mask]
        numbers = {**values, "log-prob of the engine": engine}
        count, tokenizer = int(mask.sum()), self._load(run)
        end = min(count, first + TOKENS)
        return {
            "place": place, "step": step, "sequence": sequence, "first": first, "count": count, "note": note,
            "tokens": [_spans(_of_token(int(token), tokenizer)) for token in ids[mask][first:end]],
            "ids": ids[mask][first:end].tolist(),
            "numbers": {name: rounded(x[first:end]) for name, x in numbers.items() if len(x) == count},
        }  # fmt: skip

    def _values(
        self, run: RunRecord, step: int, rollout: "Rollout", place: int
    ) -> tuple[int | None, dict[str, np.ndarray], str]:
        """Return the sample's index in the audited step, its numbers by name, and a sentence if there are none."""
        folder = audit_folder(run.folder, step)
        if not folder.is_dir():
            return None, {}, KEEP_TOKENS
        batch = read_batch(folder)
        sequence = batch.sequence_of(rollout.prompt_id, rollout.token_ids_L.numpy(), place)
        for number in reversed(range(0 if sequence is None else batch.updates)):
            update = read_update(folder, number, batch)
            here = np.flatnonzero(update.sequence_N == sequence)
            if here.size:
                names = {"advantage": "advantage", "ratio": "ratio", "entropy change": "entropy_change"}
                values = {name: update.used[key][here] for name, key in names.items()}
                mismatch = update.inputs["old_logprob"][here] - update.inputs["rollout_logprob"][here]
                return sequence, {**values, "mismatch": mismatch}, ""
        return None, {}, "The step did not train on this sample."

    def _load(self, run: RunRecord) -> "PreTrainedTokenizerBase | None":
        if self._model != run.cfg.model.path:
            self._notes = []
            self._tokenizer, self._model = find_tokenizer(run, self._notes), run.cfg.model.path
        return self._tokenizer


def _ordered(rewards: np.ndarray, order: str, lengths: Callable[[], Sequence[float]]) -> list[int]:
    if order == "longest":
        return [int(i) for i in np.argsort(-np.array(lengths()), kind="stable")]
    if order in ("best", "worst"):
        return [int(i) for i in np.argsort(-rewards if order == "best" else rewards, kind="stable")]
    return list(range(len(rewards)))


def _of_token(token: int, tokenizer: "PreTrainedTokenizerBase | None") -> list[TextSpan]:
    return shortened([span for side in of_tokens([token], [True], tokenizer) for span in side], LONGEST_TOKEN)


def _spans(spans: Iterable[TextSpan]) -> list[list[str]]:
    return [[span.kind, span.text] for span in spans]


def _plain(sample: ReportSample) -> dict[str, Any]:
    answer = shortened(of_text(sample.answer, "text"))
    return {
        "title": sample.title, "right": sample.right, "facts": list(sample.facts), "answer": _spans(answer),
        "prompt": _spans(sample.prompt), "response": _spans(sample.response),
    }  # fmt: skip
