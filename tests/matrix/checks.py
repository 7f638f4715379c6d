"""Run the checks of a release in a process with a limited time, and read the results."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.matrix.environments import ROOT
from tests.matrix.releases import Check, Release, checks_of

CHECK_SECONDS = 420
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
_REASON_LENGTH = 300


@dataclass(frozen=True)
class Result:
    """The result of one column.

    Attributes:
        result: PASSED, FAILED or NOT_RUN.
        detail: What a test measured, or the reason of a failure.
    """

    result: str
    detail: str = ""


def check(release: Release, python: Path) -> dict[str, Result]:
    """Run the tests of a release and return the result of each column.

    Tests of an engine run in this environment, its servers in that of the release. Tests of Megatron-Core run in the release's.

    Args:
        release: The release.
        python: Python of its environment.
    """
    checks, options = checks_of(release.component), ["-o", "addopts=-p tests.rotation", "-q"]
    ids = [test.format(engine=release.component) for each in checks for test in each.tests]
    own = python
    if release.component != "megatron":
        own = Path(sys.executable)
        options += [
            "-p",
            "tests.matrix.server_python",
            "--server-python",
            str(python),
            "-k",
            f"{release.component} and not tp2",
        ]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [str(own), "-m", "pytest", *options, f"--junitxml={report}", "-o", "junit_logging=system-out", *ids]
        problem = _run(command)
        found = ElementTree.parse(report).getroot() if report.exists() else ElementTree.Element("none")
    return results(checks, release.component, found, problem)


def results(checks: Sequence[Check], engine: str, report: ElementTree.Element, problem: str) -> dict[str, Result]:
    """Return the result of each column.

    Args:
        checks: The columns.
        engine: Component, which is in the ids of the tests.
        report: Root of pytest's JUnit report.
        problem: Reason of tests that are missing in the report.
    """
    cases: dict[str, list[ElementTree.Element]] = {}
    for case in report.iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        cases.setdefault(f"{file}::{case.get('name', '')}", []).append(case)
    found = {}
    for each in checks:
        wanted = [test.format(engine=engine) for test in each.tests]
        own = [case for name, of_it in cases.items() if any(_matches(name, test) for test in wanted) for case in of_it]
        found[each.title] = _result(own, problem)
    return found


def _matches(name: str, test: str) -> bool:
    return name == test or name.startswith(test + "[")


def _result(cases: Sequence[ElementTree.Element], problem: str) -> Result:
    for case in cases:
        for kind in ("failure", "error"):
            if (node := case.find(kind)) is not None:
                return Result(FAILED, short(node.get("message") or node.text or "no message"))
    if not cases or any(case.find("skipped") is not None for case in cases):
        return Result(NOT_RUN, problem or "the tests were skipped")
    return Result(PASSED, measured("\n".join(node.text or "" for case in cases for node in case.iter("system-out"))))


def measured(output: str) -> str:
    """Return the largest difference that tests printed, in words; empty if they printed none."""
    figures = [float(figure) for figure in re.findall(r"largest (?:log-prob )?difference[^:]*?:? (\d\S*e[+-]\d+)", output)]
    return f"{max(figures):.0e} nats" if figures else ""


def short(message: str) -> str:
    """Return the part of a failure that says most, in one line: the last line that names an error, else the first line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    error = re.compile(r"(E\s+)?[\w.]*(Error|Exception|Failed|Invalid)\w*\b.*:|.*error: ")
    named = [line for line in lines if error.match(line)]
    text = (named or lines or ["no message"])[-1 if named else 0]
    return re.sub(r"\s+", " ", _anonymous(text))[:_REASON_LENGTH]


def _anonymous(text: str) -> str:
    """Return the text without folders of this machine."""
    return re.sub(r"(?:/[\w.+-]+)+/(?=[\w.+-]+)", "", text.replace(str(ROOT) + "/", ""))


def _run(command: Sequence[str]) -> str:
    """Run the tests; return why tests may be missing in their report. Ends all that they started when the time is up."""
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=_environment(), start_new_session=True, **streams)
    try:
        output, _ = process.communicate(timeout=CHECK_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        return f"the check took more than {CHECK_SECONDS} s"
    return "" if process.returncode == 0 else short(output)


def _environment() -> Mapping[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTEST_ADDOPTS", "PYTHONPATH")}
