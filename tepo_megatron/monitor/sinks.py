"""The outputs for a run's metrics: `metrics.jsonl` (authoritative), the terminal and `log.txt`, TensorBoard, W&B.

The rollout service of a run opens its `RunLog`. Rank 0 opens a `LogFile`, for its own warnings.
"""

import contextlib
import json
import math
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tepo_megatron.base import records
from tepo_megatron.base.errors import ConfigError, DataError, RunReplacedError
from tepo_megatron.base.storage import replace_file, replacing, writing
from tepo_megatron.config import LoggingConfig
from tepo_megatron.monitor.alerts import AlertWatch, key_of
from tepo_megatron.monitor.log_file import LogFile, append_line, open_for_appending
from tepo_megatron.monitor.run_dir import lock
from tepo_megatron.monitor.tracer import Clock

METRICS_FILE = "metrics.jsonl"
LOST_FILE = "metrics.lost.jsonl"
HEADER_EVERY = 20  # progress lines between two headers
REMINDER_SECONDS = 20.0
_WANDB_ID = "wandb/run-id.txt"
_FIRST_KEY = "step"  # first key of every record

Value = float | int | None
Listener = Callable[[int, Mapping[str, Value]], object]


@dataclass(frozen=True)
class Column:
    """One value of the progress line, right-aligned in `width` characters."""

    heading: str
    key: str
    width: int
    format: str

    def cell(self, record: Mapping[str, Value]) -> str:
        """Return the formatted value, or "-" if the step has none."""
        value = record.get(self.key)
        return ("-" if value is None else format(value, self.format)).rjust(self.width)


# most important first: a narrow terminal shows only the columns that fit
COLUMNS = (
    Column("reward", "reward/mean", 6, ".3f"),
    Column("acc", "accuracy/mean", 5, ".3f"),
    Column("entropy", "actor/entropy", 7, ".3f"),
    Column("kl", "loss/kl", 7, ".1e"),
    Column("clip", "loss/clip_fraction", 5, ".3f"),
    Column("w p01", "tepo/ratio_p01", 6, ".3f"),
    Column("w p50", "tepo/ratio_p50", 6, ".3f"),
    Column("w p99", "tepo/ratio_p99", 6, ".3f"),
    Column("mask", "tepo/kl_mask_share", 5, ".3f"),
    Column("grad", "actor/grad_norm", 6, ".2f"),
    Column("groups", "rollout/kept_groups", 6, ".0f"),
    Column("length", "rollout/response_tokens_mean", 6, ".1f"),
    Column("|dlogp|", "rollout/logprob_diff_mean", 7, ".1e"),
    Column("max", "rollout/logprob_diff_max", 7, ".1e"),
    Column("roll s", "seconds/rollout", 6, ".1f"),
    Column("grade s", "seconds/grading_wait", 7, ".1f"),
    Column("old s", "seconds/old_stats", 5, ".1f"),
    Column("ref s", "seconds/reference", 5, ".1f"),
    Column("upd s", "seconds/update", 5, ".1f"),
    Column("sync s", "seconds/sync", 6, ".1f"),
    Column("wait s", "seconds/wait", 6, ".1f"),
    Column("total s", "seconds/total", 7, ".1f"),
    Column("tok/s", "tokens_per_second", 6, ".0f"),
)


class RunLog:
    """The open outputs of one run; a context manager.

    Files are appended to, each line in one write, so a killed process hardly ever leaves half a line. Inside the context,
    warnings of this process are logged like messages. `listener`: called with the number and the values of each step. None:
    nobody listens. Raises ConfigError if a configured output is not installed, or another process has this run's log open.
    """

    def __init__(self, run_dir: Path, cfg: LoggingConfig, steps: int, columns: Sequence[Column] = COLUMNS) -> None:
        self._tensorboard = _open_tensorboard(run_dir) if cfg.tensorboard else None
        self._wandb = _open_wandb(run_dir, cfg.wandb_project) if cfg.wandb_project else None
        self.run_dir = run_dir
        self._metrics = open_for_appending(run_dir / METRICS_FILE)
        lock(self._metrics, run_dir)
        self._log, self._steps, self._lines, self._columns = LogFile(run_dir), steps, 0, columns
        self._alerts = AlertWatch()
        self._evaluations: dict[int, Mapping[str, Value]] = {}  # of the file, by step
        self.listener: Listener | None = None

    def __enter__(self) -> "RunLog":
        self._log.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._log.__exit__(kind, error, trace)
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=0 if kind is None else 1)
        os.close(self._metrics)

    def write(self, step: int, record: Mapping[str, Value]) -> None:
        """Record one step in all outputs. None and non-finite values become null in JSON and "-" in the progress line."""
        self.check_in_place()
        values = {k: v if v is not None and math.isfinite(v) else None for k, v in record.items()}
        alerts = self._alerts.observe(step, values)
        values |= {key_of(name): 1.0 for name in self._alerts.active}
        self._write(step, values)
        self._progress(step, values)
        for alert in alerts:
            self.message(alert.message)

    def write_evaluation(self, step: int, record: Mapping[str, Value]) -> None:
        """Record the evaluation of the weights of `step`, with keys that begin with `evaluation/`, in all outputs but the
        terminal. Nothing is written if metrics.jsonl has it already.
        """
        self.check_in_place()
        if record and self._evaluations.get(step) != record:
            self._write(step, record)
            self._evaluations[step] = dict(record)

    def _write(self, step: int, values: Mapping[str, Value]) -> None:
        with writing(self.run_dir / METRICS_FILE):
            append_line(self._metrics, json.dumps({_FIRST_KEY: step, **values}) + "\n")
        if self.listener is not None:
            self.listener(step, values)
        self._add_scalars(step, values)
        known = {key: value for key, value in values.items() if value is not None}
        if self._wandb is not None:
            self._wandb.log(known, step=step)

    def _add_scalars(self, step: int, values: Mapping[str, Value]) -> None:
        if self._tensorboard is not None:
            for key, value in values.items():
                if value is not None:
                    self._tensorboard.add_scalar(key, value, global_step=step)
            with writing(self.run_dir / "tensorboard"):
                self._tensorboard.flush()

    def check_in_place(self) -> None:
        """Raise RunReplacedError if the open metrics file is no longer the one in the run's folder."""
        path = self.run_dir / METRICS_FILE
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._metrics), path.stat()):
                return
        raise RunReplacedError(
            f"{path} was removed or replaced while this run was under way: its records go nowhere, and the folder may be "
            f"another run's; this run ends, and writes nothing more into it"
        )

    def sync(self) -> None:
        """Flush all records to the disk. Raise RunReplacedError or StorageError."""
        self.check_in_place()
        with writing(self.run_dir / METRICS_FILE):
            os.fsync(self._metrics)

    def rewind(self, step: int, keeps_evaluations: bool = False) -> list[str]:
        """Go back to the state after `step`: metrics.jsonl then holds the steps up to it, each once and in order.

        The evaluations of these steps stay, with `keeps_evaluations` those of later steps too. Everything else in the file
        moves to metrics.lost.jsonl: later steps, which the run repeats, and damaged lines.
        Later steps are dropped from TensorBoard. If the process is killed in between and the method is called again, everything
        is moved exactly once. Return one sentence for each thing that was moved and for each fault of the file.
        """
        path = self.run_dir / METRICS_FILE
        data = path.read_bytes() if path.exists() else b""
        last_evaluation = math.inf if keeps_evaluations else step
        steps = records.steps_of(records.parse_lines(data), last=step, last_evaluation=last_evaluation)
        # an evaluation comes after the record of its step; sorting is stable
        lines = sorted([*steps.kept, *steps.kept_evaluations], key=lambda line: line.step)
        kept = b"".join(line.raw + b"\n" for line in lines)
        if lost := b"".join(line.raw + b"\n" for line in (*steps.rest, *steps.later)):
            self._add_lost(lost)
        if data.startswith(kept):
            os.ftruncate(self._metrics, len(kept))
        else:
            self._replace_metrics(kept)
        self._alerts = AlertWatch()
        for record in steps.records:
            self._alerts.observe(record[_FIRST_KEY], record)
        self._evaluations = {record.pop(_FIRST_KEY): record for record in steps.evaluations}
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = _open_tensorboard(self.run_dir, forget_from=step + 1)
            for evaluated, values in self._evaluations.items():
                if evaluated > step:
                    self._add_scalars(evaluated, values)
        messages = [f"{METRICS_FILE}: {fault}" for fault in steps.faults]
        if steps.later:
            again = len({line.step for line in steps.later})
            messages.append(f"{again} recorded steps are taken again; their former records moved to {LOST_FILE}")
        if steps.rest:
            messages.append(f"{len(steps.rest)} other lines of {METRICS_FILE} moved to {LOST_FILE}")
        return messages

    def _add_lost(self, lost: bytes) -> None:
        """Append to metrics.lost.jsonl on a new line. Repeated calls with the same data append it once."""
        path = self.run_dir / LOST_FILE
        known = path.read_bytes() if path.exists() else b""
        if not known.endswith(lost):
            replace_file(path, known + (b"" if known.endswith(b"\n") or not known else b"\n") + lost)

    def _replace_metrics(self, data: bytes) -> None:
        """Replace metrics.jsonl atomically. The new file is locked for this run before other processes can see it."""
        path = self.run_dir / METRICS_FILE
        with replacing(path) as unfinished:
            unfinished.write_bytes(data)
            file = open_for_appending(unfinished)
            lock(file, self.run_dir)
        former, self._metrics = self._metrics, file
        os.close(former)

    def message(self, text: str) -> None:
        """See `LogFile.message`."""
        self._log.message(text)

    @contextlib.contextmanager
    def reminders(self, text: str) -> Iterator[None]:
        """Log every REMINDER_SECONDS that the block still runs."""
        over, waiting = threading.Event(), Clock()

        def remind() -> None:
            while not over.wait(REMINDER_SECONDS):
                self.message(f"{text} ({waiting.total:.0f} s so far)")

        thread = threading.Thread(target=remind, name="reminders", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(REMINDER_SECONDS)

    def _progress(self, step: int, record: Mapping[str, Value]) -> None:
        width = max(len("step"), 2 * len(str(self._steps)) + 1)
        if self._lines % HEADER_EVERY == 0:
            self._log.row("step".rjust(width), [column.heading.rjust(column.width) for column in self._columns], "bold")
        self._log.row(f"{step}/{self._steps}".rjust(width), [column.cell(record) for column in self._columns])
        self._lines += 1


def read_metrics(run_dir: Path) -> list[dict[str, Value]]:
    """Return a run's records: each step once, in order, even from a damaged file. Log a warning about damage."""
    steps = read_steps(run_dir)
    records.report(run_dir / METRICS_FILE, steps.faults)
    return steps.records


def read_steps(run_dir: Path) -> records.StepRecords:
    """Return a run's records and the file's faults as text. Raise DataError, naming the file, if there is no record."""
    path = run_dir / METRICS_FILE
    try:
        lines = records.read_lines(path)
    except OSError as e:
        raise DataError(f"{path}: cannot read the metrics ({e.strerror}); give the folder of a run") from None
    steps = records.steps_of(lines)
    if not steps.kept:
        what = f"{steps.faults[0]}; restore the file, or repeat the run" if steps.faults else "wait for the first one"
        raise DataError(f"{path}: no step has been recorded yet; {what}")
    return steps


def _open_tensorboard(run_dir: Path, forget_from: int | None = None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "logging.tensorboard=true: the tensorboard package is not installed; "
            "install tepo-megatron[tensorboard] or set the key to false"
        ) from None
    return SummaryWriter(str(run_dir / "tensorboard"), purge_step=forget_from)


def _open_wandb(run_dir: Path, project: str) -> Any:
    try:
        import wandb
    except ImportError:
        raise ConfigError(
            f"logging.wandb_project={project}: the wandb package is not installed; "
            "install tepo-megatron[wandb] or remove the key"
        ) from None
    # A resumed run continues the same W&B run. W&B keeps the former values of repeated steps.
    return wandb.init(project=project, name=run_dir.name, dir=str(run_dir), id=wandb_id(run_dir), resume="allow")


def wandb_id(run_dir: Path) -> str:
    """Return the id of this run in W&B, created at its first start and kept in its folder."""
    path = run_dir / _WANDB_ID
    known = path.read_text(errors="replace").strip() if path.exists() else ""
    if not re.fullmatch("[0-9a-f]{32}", known):
        if path.exists():
            records.report(path, ["not the id of a W&B run; a new one is begun there"])
        path.parent.mkdir(exist_ok=True)
        known = uuid.uuid4().hex
        replace_file(path, known.encode())
    return known
