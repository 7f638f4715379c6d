"""Import NeMo-Run only when it is needed."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from launch.jobs import JobFolder
from launch.profile import Cluster
from launch.scripts import Task
from tepo_megatron.errors import ConfigError

if TYPE_CHECKING:
    from launch.nemo import Submission


def imported(module: str) -> ModuleType:
    """Return a module of launch that imports NeMo-Run. Raise ConfigError if NeMo-Run or another package is missing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NeMo-Run's dependencies warn about each other
            return importlib.import_module(module)
    except ModuleNotFoundError as e:
        raise ConfigError(f"{e.name} is not installed here; `make launch` makes .venv-launch, whose python has it") from None


def submission(
    slot: JobFolder,
    tasks: Sequence[Task],
    cluster: Cluster,
    after: str | None = None,
    setup: str = "",
    requeued: bool = False,
    spare_nodes: int = 0,
    variables: Sequence[str] = (),
) -> Submission:
    """Return a submission, through launch/nemo.py."""
    os.environ["NEMORUN_HOME"] = str(slot.home)
    nemo = imported("launch.nemo")
    place = slot.name, slot.home, slot.number
    return nemo.Submission(*place, tasks, cluster, Path.cwd(), setup, requeued, after, spare_nodes, variables)
