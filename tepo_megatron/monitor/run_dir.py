"""The folder of a run: its contents, and when a start may replace or resume the run in it."""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tepo_megatron.base import save_requests
from tepo_megatron.base.errors import ConfigError
from tepo_megatron.base.run_lock import LOCK_FILE, RunLock
from tepo_megatron.base.storage import disk_fault, replace_file
from tepo_megatron.monitor.trace_file import TRACES

if TYPE_CHECKING:
    from tepo_megatron.config import Config

AUDIT = "audit"  # folder with the recorded terms of each token's loss, a folder for each step
Inputs = Sequence[tuple[str, str | None]]  # (config key, path) of everything that a run reads
# Files of a run that made progress. A failed start leaves none of them.
_SIGNS = ("summary.json", "hf", "checkpoints", "metrics.lost.jsonl")
# Files written at the end of a run -> their names after the run is resumed, which writes them again.
_OUTCOME = {"summary.json": "summary.former.json", "evaluation.jsonl": "evaluation.former.jsonl"}
CONFIG_FILE = "config.yaml"
_HANG = {"hang.txt": "hang.former.txt"}
# Everything that a run writes. `overwrite` removes these and nothing else.
_OF_A_RUN = (
    "checkpoints", *_OUTCOME, *_OUTCOME.values(), *_HANG, *_HANG.values(), "summary.json.partial", "evaluation.jsonl.partial",
    CONFIG_FILE, "config.yaml.partial", "metrics.jsonl", "metrics.jsonl.partial", "metrics.lost.jsonl",
    "metrics.lost.jsonl.partial", "rollouts", "decisions.jsonl", AUDIT, "evaluation", "log.txt", "server.log", "report.html",
    "report.html.partial", "report.png", "report.png.partial", "hf", "hf.partial", "hf.former", "tensorboard", "wandb",
    "stacks", TRACES, "metrics.key", "metrics_targets.json", "template_clock",
    "template_clock.partial", *save_requests.FILES,
)  # fmt: skip


def audit_folder(run_dir: Path, step: int) -> Path:
    """Return the folder with the recorded loss terms of a step."""
    return run_dir / AUDIT / f"step-{step:06d}"


def prepare(cfg: "Config") -> Path:
    """Prepare the folder of a run that starts later: call `claim`, then release the lock. Return the path of config.yaml."""
    with claim(cfg):
        return cfg.run_dir / CONFIG_FILE


def claim(cfg: "Config", check_only: bool = False) -> RunLock:
    """Lock the run's folder and prepare it: write the resolved config.yaml and remove what `overwrite` replaces.

    With `resume` nothing is removed. The outcome of a run that had ended keeps its name until the run continues
    (`rename_outcome`). A refusal changes nothing in the folder. Raises ConfigError if the folder holds a run and neither
    `resume` nor `overwrite` is set; the run is under way or has nothing to resume from; the model or the data lie in what would
    be removed; or the folder cannot be written.
    """
    from tepo_megatron.config.io import to_yaml

    inputs = (
        ("model.path", cfg.model.path),
        ("objective.ref_kl.path", cfg.objective.reference_path),
        *cfg.data.paths,
        ("rollout.replay", cfg.rollout.replay),
        ("rollout.function", cfg.rollout.function),
        ("objective.name", cfg.objective.path),
    )
    refuse = partial(_refuse_what_is_there, cfg.run_dir, cfg.overwrite, cfg.resume, cfg.rollout.only, inputs)
    if not (cfg.run_dir / LOCK_FILE).exists():
        refuse()  # before a lock file is created in a folder that is not ours
    try:
        lock = RunLock(cfg.run_dir)
    except ConfigError as e:
        raise ConfigError(f"output={cfg.output}: {e}") from None
    try:
        refuse()
        _refuse_one_under_way(cfg.run_dir)  # by its metrics: a version without this lock started it, or the lock is gone
        if check_only:
            return lock
        lock.sign()
        _make_ready(cfg.run_dir, cfg.resume, to_yaml(cfg), cfg.output)
    except BaseException:
        lock.release()
        raise
    return lock


def _refuse_what_is_there(run_dir: Path, overwrite: bool, resume: bool, only_samples: bool, inputs: Inputs) -> None:
    metrics = run_dir / "metrics.jsonl"
    holds_a_run = (metrics.exists() and metrics.stat().st_size) or any((run_dir / n).exists() for n in _SIGNS)
    if holds_a_run and not (overwrite or resume):
        raise ConfigError(
            f"{run_dir} holds a run already; go on with it with tepo resume {run_dir}, choose another `name`, or replace it "
            f"with --overwrite true"
        )
    if holds_a_run and resume:
        _refuse_without_checkpoints(run_dir, only_samples)
    _refuse_to_remove_what_is_used(inputs, _removed(run_dir, resume))


def _removed(run_dir: Path, resume: bool) -> list[Path]:
    return [] if resume else [run_dir / name for name in _OF_A_RUN]


def _make_ready(run_dir: Path, resume: bool, config: str, output: str) -> None:
    try:
        if resume:
            rename_hang(run_dir)
            save_requests.clear(run_dir)
        for path in _removed(run_dir, resume):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        # ranks on other machines may read it meanwhile
        replace_file(run_dir / CONFIG_FILE, config.encode(), durable=False)
    except OSError as e:
        fault = disk_fault(e, run_dir, written=False) or f"{run_dir} cannot be written ({e}); choose another directory"
        raise ConfigError(f"output={output}: {fault}") from None


def rename_outcome(run_dir: Path) -> None:
    """Rename the outcome of a run that had ended, because the run continues."""
    _rename(run_dir, _OUTCOME)


def rename_hang(run_dir: Path) -> None:
    """Rename the explanation of a hang, because the run continues."""
    _rename(run_dir, _HANG)


def _rename(run_dir: Path, names: Mapping[str, str]) -> None:
    for name, former in names.items():
        if (run_dir / name).exists():
            (run_dir / name).replace(run_dir / former)


def finished(cfg: "Config") -> bool:
    """Return whether `resume` has nothing left to do."""
    try:
        summary = json.loads((cfg.run_dir / "summary.json").read_text()) if cfg.resume else {"steps": None}
        steps, early = summary["steps"], cfg.evaluation.patience is not None and "stopped_early" in summary
    except (OSError, ValueError, KeyError, TypeError):  # there is no summary, or it is not a run's
        return False
    if isinstance(steps, int) and steps > cfg.training.steps:
        raise ConfigError(
            f"training.steps={cfg.training.steps}: the run in {cfg.run_dir} ended at step {steps}; set it to more to go on"
        )
    return (steps == cfg.training.steps or early) and ((cfg.run_dir / "hf").exists() or not cfg.export_hf)


def lock(metrics: int, run_dir: Path) -> None:
    """Lock the open metrics file to mark a run as under way for as long as the file stays open."""
    try:
        fcntl.flock(metrics, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"{run_dir}: this run is under way in another process; wait for its end, or choose another `name`"
        ) from None
    except OSError:  # the file system has no locks
        return


def _refuse_one_under_way(run_dir: Path) -> None:
    with contextlib.suppress(OSError):  # there is no such file, or `prepare` reports what is wrong
        metrics = os.open(run_dir / "metrics.jsonl", os.O_WRONLY)
        try:
            lock(metrics, run_dir)
        finally:
            os.close(metrics)


def _refuse_without_checkpoints(run_dir: Path, only_samples: bool) -> None:
    """Refuse a resume without checkpoints if the run had ended. Restarting an interrupted run from scratch loses nothing."""
    if only_samples:
        raise ConfigError(
            f"{run_dir} holds a run already, and rollout.only=true keeps no checkpoints to resume from; choose another "
            f"`name`, or replace it with --overwrite true"
        )
    checkpoints = (run_dir / "checkpoints").glob("step-*")
    if (run_dir / "summary.json").exists() and not any(c.name.removeprefix("step-").isdigit() for c in checkpoints):
        raise ConfigError(
            f"{run_dir} holds a run that has ended and kept no checkpoints (shorter than checkpoint.every), so it would "
            f"be trained again; choose another `name`, or replace it with --overwrite true"
        )


def _refuse_to_remove_what_is_used(inputs: Inputs, removed: list[Path]) -> None:
    for key, used in inputs:
        if used is not None and any(Path(used).resolve().is_relative_to(path.resolve()) for path in removed):
            raise ConfigError(f"{key}={used} lies in the run that would be replaced; choose another `name`")
