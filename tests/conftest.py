"""Set before torch is loaded: one thread a process, and the CPU platform with Megatron-Core imported once for all worlds."""

import gc
import inspect
import os
import signal
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # threads that wait must not spin: the ranks of a world share the cores
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tokenizers refuses threads after a fork, with a warning

import pytest
from hypothesis import HealthCheck, settings

from tepo_megatron.dist.platform import activate
from tests.core import ROOT, is_core

# Imports, tests and models are many objects that stay: by default the collector looks through them a tenth of the time.
gc.set_threshold(100_000)

activate("cpu")

# The same examples in every run, and none fails for the time that it takes: others may use this machine.
settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

# A shell starts its background jobs with SIGINT ignored, and so would be every child: some tests send one.
signal.signal(signal.SIGINT, signal.default_int_handler)

HERE = Path(__file__).parent
# The Makefile looks for tests of these marks in these folders alone.
FOLDERS = {"e2e": (HERE / "e2e", HERE / "launch"), "server": (HERE / "server", HERE / "e2e")}


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is not of the core. Refuse a test whose mark no target of the Makefile would find in its folder."""
    for item in items:
        name = f"{item.path.relative_to(ROOT)}::{item.nodeid.partition('::')[2]}"
        if not is_core(name, item.get_closest_marker("slow") is not None):
            item.add_marker(pytest.mark.full)
        for mark, folders in FOLDERS.items():
            if item.get_closest_marker(mark) and not any(item.path.is_relative_to(folder) for folder in folders):
                raise pytest.UsageError(f"{item.nodeid} is marked {mark}: move it to {' or '.join(f.name for f in folders)}")


def pytest_pycollect_makeitem(name: str, obj: Any) -> None:
    """Refuse a function that is marked as a test and not named like one, which would never run."""
    if inspect.isfunction(obj) and hasattr(obj, "pytestmark") and not name.startswith("test_"):
        raise pytest.UsageError(f"{obj.__module__}.{name} is marked, and its name does not begin with test_")


def pytest_collection_finish() -> None:
    """Keep the garbage collector from looking again and again through modules and tests, which all stay until the end."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let the interpreter end as usual."""
    gc.unfreeze()
