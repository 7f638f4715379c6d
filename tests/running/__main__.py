"""Run streams of tests at once, say every few seconds how far they are, and count all results in one line.

    python -m tests.running --stream parts '-n 3 -m "not server"' --stream servers '-n 1 -m server' --then alone '-n 1 -m alone'

A test of a server or a whole run that fails is run once more, alone, when its stream has ended. If it passes then, it is flaky:
both outputs are kept in build/flaky, and more than two flaky tests fail the run. build/streams keeps the output of each stream.
`--record FILE` appends the counts and the machine to a file, a JSON object a line.
Exit status 0 where every test passed, was skipped, or was one of at most two that are flaky.
"""

import argparse
import contextlib
import ctypes
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.results import commit
from tepo_megatron.base.memory_kills import usable_cores
from tepo_megatron.base.processes import die_with_parent, process_tree
from tests.running.guard import stacks
from tests.running.limits import LIMITS

OUTCOMES = ("passed", "failed", "skipped", "flaky")
MOST_FLAKY = 2  # in a run that passes
REPEATED = "server or e2e"  # pytest's -m of the tests that are run once more
_SILENT_SECONDS = 2.0 * max(LIMITS.values())  # without a result: every test has ended long before
_END_SECONDS = 5.0  # for processes to end after SIGTERM, then after SIGKILL
_LINES = 20  # printed of each failure
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class Session:
    """A pytest that runs, and its results so far.

    Args:
        output: File for what it prints. A file next to it gets the rows of results.py.

    Attributes:
        collected: Number of tests. None: not known yet.
        running: Tests that run, and when each started.
    """

    def __init__(self, output: Path, args: Sequence[str]) -> None:
        self.output, rows = output, output.with_suffix(".jsonl")
        rows.write_text("")
        with output.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *args, "--rows", str(rows)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this program alone
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        self._rows = rows.open()
        self._unread = ""
        self._heard = time.monotonic()
        self.collected: int | None = None
        self.running: dict[str, float] = {}
        self.outcomes: dict[str, str] = {}
        self.texts: dict[str, str] = {}
        self.captured: dict[str, str] = {}

    def look(self) -> None:
        """Take the rows that were written since the last time."""
        *lines, self._unread = (self._unread + self._rows.read()).split("\n")
        for line in lines:
            self._take(json.loads(line))
        if lines:
            self._heard = time.monotonic()
        elif time.monotonic() - self._heard > _SILENT_SECONDS:
            with self.output.open("a") as file:
                file.write(f"\nno result for {_SILENT_SECONDS:g} s\n{stacks(self.process.pid)}")
            self.process.kill()

    def _take(self, row: dict[str, Any]) -> None:
        match row:
            case {"collected": number}:
                self.collected = number
            case {"started": test}:
                self.running[test] = time.monotonic()
            case {"ended": test}:
                self.running.pop(test, None)
            case {"test": test, "outcome": "failed", "text": text, "captured": captured}:
                self.outcomes[test] = "failed"
                self.texts[test] = "\n".join(filter(None, (self.texts.get(test), text)))
                self.captured[test] = captured
            case {"test": test, "phase": "call", "outcome": outcome} | {"test": test, "outcome": "skipped" as outcome}:
                self.outcomes.setdefault(test, outcome)

    def end(self, status: int) -> None:
        """Take the last rows, and let what did not happen as it should be a failure."""
        self.look()
        self.running = {}
        if not all("::" in test for test in self.outcomes):
            return  # a file could not be collected, so that nothing ran
        if status != int("failed" in self.outcomes.values()) or len(self.outcomes) != self.collected:
            counts = f"pytest ended with status {status}, and {len(self.outcomes)} of {self.collected} tests have a result"
            self.outcomes[str(self.output)] = "failed"
            self.texts[str(self.output)] = f"{self.output.read_text(errors='replace')}\n{counts}"


class Stream:
    """Tests that run one after another or in the workers of one pytest; those that failed then again, each alone."""

    def __init__(self, name: str, args: str, build: Path) -> None:
        self.name, self._args, self._build = name, shlex.split(args), build
        self.output = build / "streams" / f"{name}.txt"
        self.outcomes: dict[str, str] = {}
        self.texts: dict[str, str] = {}
        self.captured: dict[str, str] = {}
        self.flaky: dict[str, Path] = {}  # test -> both outputs
        self.session: Session | None = None  # the one that runs
        self._failed: list[str] = []  # tests to run again

    def start(self) -> None:
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.session = Session(self.output, self._args)

    def look(self, statuses: dict[int, int]) -> bool:
        """Return whether the stream still runs, and start what comes next in it."""
        session = self.session
        if session is None:
            return False
        session.look()
        if (status := statuses.get(session.process.pid)) is None:
            return True
        session.process.returncode = status  # it has been reaped
        session.end(status)
        self._take(session)
        self.session = None
        if self._failed:
            self.session = Session(self.output.with_stem(f"{self.name}-again"), ["-n", "0", "-m", REPEATED, self._failed[0]])
        return self.session is not None

    def _take(self, session: Session) -> None:
        if not self._failed:
            self.outcomes, self.texts, self.captured = session.outcomes, session.texts, session.captured
            self._failed = [test for test, outcome in session.outcomes.items() if outcome == "failed"]
            if not all("::" in test for test in self._failed):  # a file, or the session
                self._failed = []
            return
        test = self._failed.pop(0)
        if session.outcomes != {test: "passed"}:
            self._failed = []  # the run has failed: nothing is gained by more
            return
        self.outcomes[test] = "flaky"
        if len(self.flaky) == MOST_FLAKY:
            self._failed = []  # this one is too many
        self.flaky[test] = kept = self._build / "flaky" / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', test)[-200:]}.txt"
        kept.parent.mkdir(parents=True, exist_ok=True)
        first, second = f"{self.texts[test]}\n{self.captured[test]}", session.output.read_text(errors="replace")
        kept.write_text(f"{test}\n\nfailed:\n{first}\n\npassed when it was run again:\n{second}")

    def progress(self) -> str:
        if self.session is None:
            return f"{self.name} ended"
        if self._failed:
            return f"{self.name} runs {self._failed[0]} again"
        counts = Counter(self.session.outcomes.values())
        failed = f", {counts['failed']} failed" if counts["failed"] else ""
        return f"{self.name} {counts.total()}/{self.session.collected or '?'}{failed}"


class Runner:
    """Runs the streams, and ends every process below this one when it ends itself."""

    def __init__(self, streams: Sequence[Stream], then: Sequence[Stream], seconds: float, record: Path | None) -> None:
        self._streams, self._then, self._seconds, self._record = list(streams), list(then), seconds, record
        self._started = self._printed = time.monotonic()
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:  # no orphan leaves the tree
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")

    def run(self) -> int:
        """Run everything, print the results, and return the exit status."""
        try:
            for streams in filter(None, (self._streams, self._then)):
                for stream in streams:
                    stream.start()
                while self._look(streams):
                    time.sleep(0.1)
        finally:
            _end_descendants()
        return self._report()

    def _look(self, streams: Sequence[Stream]) -> bool:
        statuses = _reap()
        running = [stream.look(statuses) for stream in streams]
        if time.monotonic() - self._printed > self._seconds:
            self._printed = time.monotonic()
            parts = [f"{self._printed - self._started:4.0f} s: {'; '.join(stream.progress() for stream in streams)}"]
            tests = [test for stream in streams if stream.session for test in stream.session.running.items()]
            if tests:
                test, since = min(tests, key=lambda one: one[1])
                parts.append(f"{self._printed - since:.0f} s in {test}")
            print("; ".join(parts), flush=True)
        return any(running)

    def _report(self) -> int:
        streams = [*self._streams, *self._then]
        for stream in streams:
            for test in (test for test, outcome in stream.outcomes.items() if outcome == "failed"):
                lines = stream.texts[test].splitlines()[-_LINES:]
                print("\n".join([f"\nFAILED {test} ({stream.output})", *(f"    {line}" for line in lines)]))
        for stream in streams:
            for test, kept in stream.flaky.items():
                print(f"FLAKY {test} failed, and passed when it was run again: {kept}")
        counts = Counter(outcome for stream in streams for outcome in stream.outcomes.values())
        if counts["flaky"] > MOST_FLAKY:
            print(f"more than {MOST_FLAKY} tests are flaky, so the run has failed")
        print(", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES))
        if self._record is not None:
            flaky = sorted(test for stream in streams for test in stream.flaky)
            row: dict[str, Any] = {"date": time.strftime("%Y-%m-%d %H:%M"), "commit": commit()}
            row |= {"seconds": round(time.monotonic() - self._started)}
            row |= {outcome: counts[outcome] for outcome in OUTCOMES} | {"names": flaky, "cores": usable_cores()}
            with self._record.open("a") as file:
                file.write(json.dumps(row | {"load": round(os.getloadavg()[2], 1)}) + "\n")
        return int(counts["failed"] > 0 or counts["flaky"] > MOST_FLAKY)


def _reap() -> dict[int, int]:
    """Return the exit status of each child that has ended, orphans of the tests among them."""
    statuses: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return statuses
        if not pid:
            return statuses
        statuses[pid] = os.waitstatus_to_exitcode(status)


def _end_descendants() -> None:
    for signum in (signal.SIGTERM, signal.SIGKILL):
        signalled: set[int] = set()
        deadline = time.monotonic() + _END_SECONDS
        while (processes := process_tree(os.getpid())) and time.monotonic() < deadline:
            for process in processes:
                if process.pid not in signalled:
                    signalled.add(process.pid)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signum)
            time.sleep(0.05)
            _reap()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.running", description=__doc__.splitlines()[0])
    for option, text in (("--stream", "run at once with the others"), ("--then", "run after them")):
        parser.add_argument(option, nargs=2, action="append", default=[], metavar=("NAME", "ARGS"), help=text)
    parser.add_argument("--build", type=Path, default=Path("build"), help="folder for the outputs (default: %(default)s)")
    parser.add_argument("--record", type=Path, metavar="FILE", help="append the counts and the machine to this file")
    parser.add_argument("--progress", type=float, default=15.0, help="seconds between two lines (default: %(default)s)")
    args = parser.parse_args(argv)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda number, _: sys.exit(128 + number))
    streams, then = ([Stream(name, words, args.build) for name, words in pairs] for pairs in (args.stream, args.then))
    return Runner(streams, then, args.progress, args.record).run()


if __name__ == "__main__":
    sys.exit(main())
