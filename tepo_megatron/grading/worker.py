"""What runs inside a grading worker: `python worker.py SOFT_SECONDS MEMORY_MIB PARENT_PID GRADER [ARGUMENT ...]`.

Reads one JSON line `[serial, text, ...]` at a time from stdin and writes one JSON line `[serial, status, value, detail]` to
stdout, after a first line `"ready"`. It is run as a file, so that it starts in a fraction of a second and holds neither PyTorch
nor a GPU context (unless a user's own function loads them).
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from types import FrameType

from tepo_megatron.processes import die_with_parent

_ALARM_AGAIN_SECONDS = 0.25
_DETAIL_CHARS = 500
Graded = tuple[str, float, str]  # status, value, detail
Grader = Callable[..., Graded]


class OutOfTimeError(BaseException):
    """The soft alarm. Not an Exception, since math-verify and SymPy swallow those."""


def limit_resources(memory_mib: int) -> None:
    """Cap the address space (beyond it: MemoryError, hence an unparsed or wrong answer) and write no core files."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_mib * 2**20, memory_mib * 2**20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def equality() -> Grader:
    """(gold, answer) -> equal, wrong, unparsed or bad_gold. Exits unless it works."""
    from tepo_megatron.grading.equality import load_grader

    grade = load_grader()
    # also builds the tables of the LaTeX parser; with too little memory every answer would silently be a bad one
    if (verdict := grade("1/2", "0.5")) != "equal":
        raise SystemExit(f"self-test: 0.5 for 1/2 is graded {verdict!r}")

    def graded(gold: str, answer: str) -> Graded:
        status = grade(gold, answer)
        return status, float(status == "equal"), ""

    return graded


def pattern(expression: str) -> Grader:
    """(text,) -> matched or unmatched; the whole text, in which `.` is a line break, too."""
    compiled = re.compile(expression, re.DOTALL)

    def graded(text: str) -> Graded:
        return ("matched", 1.0, "") if compiled.fullmatch(text) else ("unmatched", 0.0, "")

    return graded


def custom(spec: str) -> Grader:
    """(prompt, response, answer) -> what the user's function finds: graded, or failed with what went wrong and where."""
    from tepo_megatron.user_file import load, told

    found = load(spec, "function")

    def graded(prompt: str, response: str, answer: str) -> Graded:
        try:
            value = found.value(prompt, response, answer)
            number = float(value)
        except (Exception, SystemExit) as e:
            return "failed", 0.0, told(e, found.file)
        if not math.isfinite(number):
            return "failed", 0.0, f"it returned {number}, which is not finite"
        return "graded", number, ""

    return graded


GRADERS: dict[str, Callable[..., Grader]] = {"equality": equality, "pattern": pattern, "custom": custom}


def grade_in_time(grade: Callable[[], Graded], seconds: float) -> Graded:
    """`grade()`, or "timeout" after `seconds` of processor time: on a busy machine a right answer must not turn wrong.

    The alarm repeats: a bare `except:` or a destructor may swallow one. It cannot end a single long C call (a power of
    huge integers); the parent's hard deadline does.
    """

    def ring(signum: int, frame: FrameType | None) -> None:
        raise OutOfTimeError

    signal.signal(signal.SIGPROF, ring)
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds, _ALARM_AGAIN_SECONDS)
        try:
            return grade()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except OutOfTimeError:
        signal.setitimer(signal.ITIMER_PROF, 0)  # again: it may have rung before the line in `finally`
        return "timeout", 0.0, ""


def main(soft_seconds: float, memory_mib: int, parent_pid: int, grader: str, *arguments: str) -> None:
    """Serve until stdin ends."""
    # a closed stdin says that it ended, too, but only after the current answer, and only if no fork holds the other end
    die_with_parent(parent_pid, signal.SIGKILL)
    limit_resources(memory_mib)
    logging.disable(logging.CRITICAL)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints must not pass for a reply
    grade = GRADERS[grader](*arguments)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)  # stderr is read only if the start fails; later output could fill the disk
    replies.write('"ready"\n')
    for line in sys.stdin:
        serial, *texts = json.loads(line)
        status, value, detail = grade_in_time(functools.partial(grade, *texts), soft_seconds)
        replies.write(json.dumps([serial, status, value, detail[:_DETAIL_CHARS]]) + "\n")


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
