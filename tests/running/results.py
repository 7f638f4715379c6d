"""A pytest plugin that writes the results as they come, for `python -m tests.running`: `--rows FILE`, a JSON object a line.

{"collected": 40}
{"started": NODEID}
{"test": NODEID, "phase": "setup|call|teardown|collection", "outcome": "passed|failed|skipped",
     "seconds": 0.25, "text": TRACEBACK, "captured": OUTPUT}
{"ended": NODEID}
"""

import json
from pathlib import Path
from typing import Any

import pytest


class Rows:
    """Writes the rows of a session; under pytest-xdist those of all its workers."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)

    def _write(self, **row: Any) -> None:
        self._file.write(json.dumps(row) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write(collected=len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._write(collected=len(ids))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(started=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        text = report.longreprtext if report.failed else ""
        captured = "\n".join(f"{title}:\n{content}" for title, content in report.sections) if report.failed else ""
        row = {"outcome": report.outcome, "seconds": round(report.duration, 3), "text": text, "captured": captured}
        self._write(test=report.nodeid, phase=report.when, **row)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(test=report.nodeid, phase="collection", outcome="failed", text=report.longreprtext, captured="")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(ended=nodeid)

    def pytest_unconfigure(self) -> None:
        self._file.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rows", type=Path, metavar="FILE", help="write each result to this file as it comes")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--rows")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Rows(path), "rows")
