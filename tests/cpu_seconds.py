"""A pytest plugin that measures the CPU seconds of each test and fixture, with every process that they start.

Wall time says little on a machine that does other work too. `pytest -p tests.cpu_seconds` prints the files, fixtures and tests
that cost the most. The file of `--cpu-seconds` gets a row for each part as soon as it has ended: kind, seconds, name. With
pytest-xdist every worker measures itself, and writes into the same file.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
import pytest

_PRINTED = 25  # rows of each kind
_CGROUPS = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))  # version 2's folder, next to version 1's or alone


class Meter:
    """Counts the CPU seconds of this process and its descendants; as root, in a control group of its own.

    A control group counts daemons too, which have left the process tree. Without one, the living descendants are added to those
    that ended; a process whose parent ended before it is then missed.
    """

    def __init__(self) -> None:
        self._group: Path | None = None
        for root in _CGROUPS:
            with contextlib.suppress(OSError):
                if (root / "cgroup.controllers").exists():
                    self._home = root / _own_group().lstrip("/")
                    group = self._home / f"cpu-seconds-{os.getpid()}"
                    group.mkdir()
                    (group / "cgroup.procs").write_text(str(os.getpid()))
                    self._group = group
                    break
        used = resource.getrusage(resource.RUSAGE_SELF)
        self.before = used.ru_utime + used.ru_stime  # seconds of this process until now, most of them imports

    @property
    def counts_daemons(self) -> bool:
        """True if processes whose parents have ended are counted."""
        return self._group is not None

    def seconds(self) -> float:
        """Return the seconds since this was made, and without a control group, of children that were there before."""
        if self._group is not None:
            stat = dict(line.split() for line in (self._group / "cpu.stat").read_text().splitlines())
            return int(stat["usage_usec"]) / 1e6
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        total = sum(usage.ru_utime + usage.ru_stime for usage in used) - self.before
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                times = child.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def close(self) -> None:
        """Move what still runs back to the group above, and remove this one."""
        if self._group is None:
            return
        for pid in (self._group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (self._home / "cgroup.procs").write_text(pid)
        for _ in range(20):  # a process that is ending is in it until it has ended
            with contextlib.suppress(OSError):
                self._group.rmdir()
                return
            time.sleep(0.05)


def _own_group() -> str:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    return next(line.removeprefix("0::") for line in lines if line.startswith("0::"))


class CpuSeconds:
    """Writes a row for each test, without its shared fixtures, and for each fixture of more than one test."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._meter = Meter()
        self._tests = 0.0
        self._fixtures = [0.0]  # seconds of the fixtures within the part that is under way

    def _row(self, kind: str, seconds: float, name: str) -> None:
        with self._out.open("a") as file:
            file.write(f"{kind}\t{seconds:.3f}\t{name}\n")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        before, self._fixtures = self._meter.seconds(), [0.0]
        try:
            return (yield)
        finally:
            seconds = self._meter.seconds() - before
            self._tests += seconds
            self._row("test", seconds - self._fixtures[0], item.nodeid)
            self._row("file", seconds, item.nodeid.split("::")[0])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Any:
        before = self._meter.seconds()
        self._fixtures.append(0.0)
        try:
            return (yield)
        finally:
            within, seconds = self._fixtures.pop(), self._meter.seconds() - before
            shared = fixturedef.scope != "function"
            self._fixtures[-1] += seconds if shared else within
            if shared:
                self._row("fixture", seconds - within, f"{fixturedef.baseid}::{fixturedef.argname}")

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self) -> Any:
        self._row("process", self._meter.before, "until the plugin's start")
        self._row("process", self._meter.seconds() - self._tests, "between tests")
        self._meter.close()
        return (yield)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        rows: dict[tuple[str, str], list[float]] = defaultdict(list)
        for line in self._out.read_text().splitlines():
            kind, seconds, name = line.split("\t", 2)
            rows[kind, name].append(float(seconds))
        for kind in ("file", "fixture", "test", "process"):
            chosen = sorted(((sum(row), len(row), name) for (k, name), row in rows.items() if k == kind), reverse=True)
            terminalreporter.section(f"CPU seconds by {kind}: {sum(row[0] for row in chosen):.0f} in all")
            for seconds, count, name in chosen[:_PRINTED]:
                terminalreporter.write_line(f"{seconds:9.2f} {count:5d}  {name}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-seconds", default=".cache/cpu_seconds.tsv", help="file that gets the seconds of each part")


def pytest_configure(config: pytest.Config) -> None:
    out = Path(config.getoption("--cpu-seconds")).absolute()
    if not hasattr(config, "workerinput"):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("")
    config.pluginmanager.register(CpuSeconds(out), "cpu-seconds")
