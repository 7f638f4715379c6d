"""Main program of a grading worker: `python worker.py SOFT_SECONDS MEMORY_MIB PARENT_PID GRADER [ARGUMENT ...]`.

It reads one JSON line `[serial, text, ...]` at a time from stdin and writes one JSON line `[serial, status, value, detail]` to
stdout, after a first line `"ready"`. It is run as a file, so that it starts in a fraction of a second and holds neither PyTorch
nor a GPU context (unless a user's own function loads them).
"""

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

from tepo_megatron.utils.processes import die_with_parent

_ALARM_AGAIN_SECONDS = 0.25
_DETAIL_CHARS = 500
Graded = tuple[str, float, str]  # status, value, detail
Grader = Callable[..., Graded]


class OutOfTimeError(BaseException):
    """Raised by the soft alarm. It is not an Exception, since math-verify and SymPy swallow those."""


def limit_resources(memory_mib: int) -> None:
    """Cap the address space at `memory_mib` MiB and disable core files.

    Beyond the cap there is a MemoryError, hence an unparsed or wrong answer.
    """
    resource.setrlimit(resource.RLIMIT_AS, (memory_mib * 2**20, memory_mib * 2**20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def equality() -> Grader:
    """Return the grader (gold, answer) -> equal, wrong, unparsed or bad_gold. Exits the process if a self-test fails."""
    from tepo_megatron.grading.equality import load_grader

    grade = load_grader()
    # this also builds the tables of the LaTeX parser; with too little memory every answer would silently be graded wrong
    if (verdict := grade("1/2", "0.5")) != "equal":
        raise SystemExit(f"self-test: 0.5 for 1/2 is graded {verdict!r}")

    def graded(gold: str, answer: str) -> Graded:
        status = grade(gold, answer)
        return status, float(status == "equal"), ""

    return graded


def pattern(expression: str) -> Grader:
    """Return the grader (text,) -> matched or unmatched. The whole text must match; `.` matches line breaks too."""
    compiled = re.compile(expression, re.DOTALL)

    def graded(text: str) -> Graded:
        return ("matched", 1.0, "") if compiled.fullmatch(text) else ("unmatched", 0.0, "")

    return graded


def custom(spec: str) -> Grader:
    """Return the grader (prompt, response, answer) -> graded with the user function's value, or failed with the error."""
    from tepo_megatron.utils.user_file import describe_error, load

    found = load(spec, "function")

    def graded(prompt: str, response: str, answer: str) -> Graded:
        try:
            number = float(found.value(prompt, response, answer))
        except (Exception, SystemExit) as e:
            return "failed", 0.0, describe_error(e, found.file)
        if not math.isfinite(number):
            return "failed", 0.0, f"it returned {number}, which is not finite"
        return "graded", number, ""

    return graded


GRADERS: dict[str, Callable[..., Grader]] = {"equality": equality, "pattern": pattern, "custom": custom}


def grade_in_time(grade: Callable[[], Graded], seconds: float) -> Graded:
    """Return `grade()`, or "timeout" after `seconds` of processor time.

    Wall time would turn right answers wrong on a busy machine. The alarm repeats, since a bare `except:` or a destructor may
    swallow one. It cannot interrupt a single long C call (a power of huge integers); the parent's hard deadline does.

    Args:
        grade: Grades one request.
        seconds: Limit in seconds of processor time.
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
        signal.setitimer(signal.ITIMER_PROF, 0)  # again, since the alarm may have come before the line in `finally`
        return "timeout", 0.0, ""


def main(soft_seconds: float, memory_mib: int, parent_pid: int, grader: str, *arguments: str) -> None:
    """Serve requests until stdin ends.

    Args:
        soft_seconds: Processor time per request.
        memory_mib: Limit of the address space, in MiB.
        parent_pid: Process whose end ends this one.
        grader: Key of GRADERS.
        arguments: Arguments of that grader.
    """
    # A closed stdin also tells that the parent ended, but only after the current answer, and only if no fork of the parent
    # holds the pipe's other end.
    die_with_parent(parent_pid, signal.SIGKILL)
    limit_resources(memory_mib)
    logging.disable(logging.CRITICAL)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the output of a library must not be taken for a reply
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
