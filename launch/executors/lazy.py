"""NeMo-Run, imported where it is needed."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from launch import jobs
from launch.profile import Cluster
from launch.scripts import Task
from tepo_megatron.errors import ConfigError

if TYPE_CHECKING:
    from launch.nemo import Submission


def imported(module: str) -> ModuleType:
    """A module of launch that imports NeMo-Run. Raises ConfigError where that, or another package, is missing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NeMo-Run's dependencies warn of each other
            return importlib.import_module(module)
    except ModuleNotFoundError as e:
        raise ConfigError(f"{e.name} is not installed here; `make launch` makes .venv-launch, whose python has it") from None


def submission(
    folder: Path, tasks: Sequence[Task], cluster: Cluster, after: str | None = None, setup: str = "", requeued: bool = False
) -> Submission:
    """The next one of a folder, through launch/nemo.py."""
    os.environ["NEMORUN_HOME"] = str(jobs.home_of(folder))
    nemo = imported("launch.nemo")
    return nemo.Submission(*jobs.next_submission(folder), tasks, cluster, Path.cwd(), setup, requeued, after)
