"""The folder of a run: what it can hold, and when it may be replaced or gone on with."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tepo_megatron.errors import ConfigError

if TYPE_CHECKING:
    from tepo_megatron.config import Config

# Signs of a run that got somewhere; what a start that failed left behind has none of them.
_SIGNS = ("summary.json", "hf", "checkpoints", "metrics.lost.jsonl")
# What the end of a run writes, and its name once the run goes on, which writes it anew.
_OUTCOME = {
    "summary.json": "summary.former.json", "evaluation.jsonl": "evaluation.former.jsonl", "hang.txt": "hang.former.txt",
}  # fmt: skip
# All that a run writes: `overwrite` removes these and nothing else.
_OF_A_RUN = (
    "checkpoints", *_OUTCOME, *_OUTCOME.values(), "summary.json.partial", "config.yaml", "metrics.jsonl", "metrics.lost.jsonl",
    "metrics.lost.jsonl.partial", "rollouts", "evaluation", "log.txt", "server.log", "report.html", "report.html.partial",
    "report.png", "report.png.tmp", "hf", "hf.partial", "hf.former", "tensorboard", "wandb", "stacks",
)  # fmt: skip


def prepare(cfg: Config) -> Path:
    """Create output/name with the resolved config.yaml; returns its path.

    With `resume` nothing is removed; the outcome of one that had ended gets another name.

    Raises ConfigError if a run is there already and neither `resume` nor `overwrite` is set, if it is under way or has nothing
    to resume from, if the model or the data lie in what would be removed, or if the directory cannot be written.
    """
    from tepo_megatron.config_io import to_yaml

    metrics = cfg.run_dir / "metrics.jsonl"
    holds_a_run = (metrics.exists() and metrics.stat().st_size) or any((cfg.run_dir / n).exists() for n in _SIGNS)
    if holds_a_run and not (cfg.overwrite or cfg.resume):
        raise ConfigError(
            f"{cfg.run_dir} holds a run already; go on with it with --resume true, choose another `name`, or replace it with "
            f"--overwrite true"
        )
    _refuse_one_under_way(cfg.run_dir)
    if holds_a_run and cfg.resume:
        _refuse_without_checkpoints(cfg)
    removed = [] if cfg.resume else [cfg.run_dir / name for name in _OF_A_RUN]
    _refuse_to_remove_what_is_used(cfg, removed)
    try:
        for name, former in _OUTCOME.items() if cfg.resume else ():
            if (cfg.run_dir / name).exists():
                (cfg.run_dir / name).replace(cfg.run_dir / former)
        for path in removed:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        cfg.run_dir.mkdir(parents=True, exist_ok=True)
        resolved = cfg.run_dir / "config.yaml"
        resolved.write_text(to_yaml(cfg))
    except OSError as e:
        raise ConfigError(f"output={cfg.output}: {cfg.run_dir} cannot be written ({e}); choose another directory") from None
    return resolved


def finished(cfg: Config) -> bool:
    """Whether `resume` has nothing left to do: the run took `training.steps` steps, or ended early under `evaluation.patience`,
    and its model is exported if it shall be.

    Raises ConfigError where it took more.
    """
    try:
        summary = json.loads((cfg.run_dir / "summary.json").read_text()) if cfg.resume else {"steps": None}
        steps, early = summary["steps"], cfg.evaluation.patience is not None and "stopped_early" in summary
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or not one of a run
        return False
    if isinstance(steps, int) and steps > cfg.training.steps:
        raise ConfigError(
            f"training.steps={cfg.training.steps}: the run in {cfg.run_dir} ended at step {steps}; set it to more to go on"
        )
    return (steps == cfg.training.steps or early) and ((cfg.run_dir / "hf").exists() or not cfg.export_hf)


def lock(metrics: int, run_dir: Path) -> None:
    """Mark a run as under way while its open metrics file stays open. Raises ConfigError where another process did so."""
    try:
        fcntl.flock(metrics, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"{run_dir}: this run is under way in another process; wait for its end, or choose another `name`"
        ) from None
    except OSError:  # the file system has no locks
        return


def _refuse_one_under_way(run_dir: Path) -> None:
    with contextlib.suppress(OSError):  # there is none, or `prepare` will say what is wrong
        metrics = os.open(run_dir / "metrics.jsonl", os.O_WRONLY)
        try:
            lock(metrics, run_dir)
        finally:
            os.close(metrics)


def _refuse_without_checkpoints(cfg: Config) -> None:
    """To start anew what has no checkpoint is no loss where a run was cut off; where it had ended it would be."""
    if cfg.rollout.only:
        raise ConfigError(
            f"{cfg.run_dir} holds a run already, and rollout.only=true keeps no checkpoints to resume from; choose another "
            f"`name`, or replace it with --overwrite true"
        )
    checkpoints = (cfg.run_dir / "checkpoints").glob("step-*")
    if (cfg.run_dir / "summary.json").exists() and not any(c.name.removeprefix("step-").isdigit() for c in checkpoints):
        raise ConfigError(
            f"{cfg.run_dir} holds a run that has ended and kept no checkpoints, so resume=true would train it anew; choose "
            f"another `name`, or replace it with --overwrite true"
        )


def _refuse_to_remove_what_is_used(cfg: Config, removed: list[Path]) -> None:
    for key, used in (
        ("model.path", cfg.model.path),
        ("model.reference", cfg.model.reference),
        *cfg.data.paths,
        ("rollout.replay", cfg.rollout.replay),
        ("rollout.function", cfg.rollout.function),
    ):
        if used is not None and any(Path(used).resolve().is_relative_to(path.resolve()) for path in removed):
            raise ConfigError(f"{key}={used} lies in the run that would be replaced; choose another `name`")
