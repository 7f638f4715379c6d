"""A pytest plugin that ends a test which hangs, and prints the stacks of all its processes; the other tests go on.

pytest-timeout reads the limit (`--timeout`, `@pytest.mark.timeout`, here by mark). What happens then is decided by a guard, a
process of its own (guard.py), because a process in a C call, or one that is stopped, can do nothing itself:

    limit       the guard prints the stacks, signals this process, and kills the children of the test. The signal's handler
                fails the test, whose fixtures are torn down. Processes of shared fixtures stay for the other tests.
    2 x limit   the test, or its teardown, still hangs: the guard kills this process and all its children. pytest-xdist reports
                the test as failed and goes on in a new worker; without it (-n 0) the session ends.
"""

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest_timeout import is_debugging

from tepo_megatron.base.processes import process_tree

# Seconds of a test with its fixtures, on a busy machine; of several marks the longest holds. A wait within a test is shorter.
LIMITS = {"": 600, "slow": 1200, "server": 1200, "e2e": 1800, "full": 3600, "slurm": 3600}


class Limits:
    """Tells the guard when a test starts and ends. The guard starts with the first test, so xdist's controller has none.

    Args:
        folder: Folder for the stacks, which the controller reads when a worker was killed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._guard: subprocess.Popen[str] | None = None
        self._stderr = os.dup(2)  # before pytest captures it
        self._in_phase = False
        self._nodeid = ""

    def _tell(self, line: str) -> None:
        if self._guard is None:
            signal.signal(signal.SIGALRM, self._fail)
            words = [sys.executable, "-m", "tests.running.guard", str(os.getpid())]
            root = Path(__file__).parents[2]
            self._guard = subprocess.Popen(words, cwd=root, stdin=subprocess.PIPE, stderr=self._stderr, text=True)
        assert self._guard.stdin is not None
        self._guard.stdin.write(f"{line}\n")
        self._guard.stdin.flush()

    def _stacks(self, nodeid: str) -> Path:
        return self._folder / hashlib.sha256(nodeid.encode()).hexdigest()

    def _fail(self, *_: Any) -> None:
        __tracebackhide__ = True
        stacks = self._stacks(self._nodeid)
        if self._in_phase and stacks.exists():  # else the test has ended just now
            pytest.fail(stacks.read_text())

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        for item in items:
            if config.getoption("timeout") is None and item.get_closest_marker("timeout") is None:
                marks = {"", *(mark.name for mark in item.iter_markers())}
                item.add_marker(pytest.mark.timeout(max(LIMITS[mark] for mark in marks & LIMITS.keys())))

    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool:
        self._nodeid = item.nodeid
        if not is_debugging():
            self._tell(f"start {settings.timeout} {self._stacks(item.nodeid)}")
        return True

    def pytest_timeout_cancel_timer(self) -> bool:
        return True  # pytest-timeout asks for it as soon as a test has failed, before its teardown, which may hang too

    def pytest_runtest_logfinish(self) -> None:
        if self._guard is not None:
            self._tell("end")

    def pytest_enter_pdb(self) -> None:
        self.pytest_runtest_logfinish()

    @contextlib.contextmanager
    def _phase(self) -> Iterator[None]:
        self._in_phase = True
        try:
            yield
        finally:
            self._in_phase = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Any:
        with self._phase():
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Any:
        with self._phase():
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Any:
        with self._phase():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Any:
        result = yield
        if fixturedef.scope != "function" and self._guard is not None:
            self._tell(" ".join(["keep", *(str(process.pid) for process in process_tree(os.getpid()))]))
        return result

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["stacks"] = str(self._folder)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: Any) -> None:
        with contextlib.suppress(FileNotFoundError):  # it crashed for another reason
            report.longrepr = f"{report.longrepr}\n{self._stacks(crashitem).read_text()}"

    def pytest_unconfigure(self) -> None:
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
        os.close(self._stderr)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if folder := getattr(config, "workerinput", {}).get("stacks"):
        config.pluginmanager.register(Limits(Path(folder)), "limits")
        return
    own = tempfile.TemporaryDirectory(prefix="stacks-")
    config.pluginmanager.register(Limits(Path(own.name)), "limits")
    config.add_cleanup(own.cleanup)
