"""Copies of the tree, into which one bug at a time is put."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.exhibit import Exhibit, mutated

ROOT = Path(__file__).parents[2]
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - (.*))?$", re.MULTILINE)
_TESTS_FAILED = 1  # exit status of pytest; others say that it could not run them


@dataclass(frozen=True)
class Verdict:
    """The result for a bug.

    Attributes:
        caught_by: First test that failed. None: none did.
    """

    name: str
    caught_by: str | None
    how: str
    seconds: float

    def line(self) -> str:
        """Return a line for the terminal."""
        return f"{'caught ' if self.caught_by else 'MISSED '} {self.seconds:5.1f} s  {self.name}: {self.caught_by or self.how}"


def selection(tests: Sequence[str]) -> tuple[str, ...]:
    """Return pytest's arguments that run named tests, marked full or not, and of whole files the cases not marked full.

    Args:
        tests: Files, or tests in the form file::test.
    """
    named = all("::" in test for test in tests)
    return tuple(tests) if named else (*tests, "-m", "not full")


class Copy:
    """A copy of the tracked files of `root` in the new folder `path`, with links to its environments."""

    def __init__(self, root: Path, path: Path) -> None:
        self.path = path
        words = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in filter(None, subprocess.run(words, check=True, capture_output=True, text=True).stdout.split("\0")):
            if (root / name).is_file():
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, path / name)
        for environment in root.glob(".venv*"):
            (path / environment.name).symlink_to(environment.resolve())

    def look(self, exhibit: Exhibit, tests: Sequence[str], seconds: float) -> Verdict:
        """Put the bug in, run tests until one fails, and take it out again.

        A bug does not count as caught when pytest cannot run the tests, or does not end in time.

        Raises:
            NotFound: The exhibit does not fit the tree.
        """
        file, text = mutated(exhibit, self.path)
        original = (self.path / file).read_text()
        (self.path / file).write_text(text)
        try:
            return self._run(exhibit.name, tests, seconds)
        finally:
            (self.path / file).write_text(original)

    def _run(self, name: str, tests: Sequence[str], seconds: float) -> Verdict:
        # no bytecode: of two versions of a file written within a second, one would run with the other's bytecode
        env = os.environ | {"PYTHONPATH": str(self.path), "PYTHONDONTWRITEBYTECODE": "1"}
        words = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--durations=0", *tests]
        started = time.monotonic()
        with subprocess.Popen(
            words, cwd=self.path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        ) as pytest:
            try:
                printed, _ = pytest.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                os.killpg(pytest.pid, signal.SIGKILL)
                return Verdict(name, None, f"its tests were not done in {seconds:g} s", seconds)
        taken = round(time.monotonic() - started, 1)
        if pytest.returncode == 0:
            return Verdict(name, None, "no test failed", taken)
        found = _FAILED.search(printed)
        if pytest.returncode != _TESTS_FAILED or found is None:
            return Verdict(name, None, f"pytest ended with status {pytest.returncode}:\n{printed[-2000:]}", taken)
        return Verdict(name, found[1], (found[2] or "").strip(), taken)
