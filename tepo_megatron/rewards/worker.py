"""What runs inside a grading worker: `python worker.py SOFT_SECONDS MEMORY_MIB PARENT_PID`.

Reads one JSON line `[gold, answer]` at a time from stdin and writes one JSON line, its status, to stdout, after a first
line `"ready"`. It is run as a file, so that it starts in a fraction of a second and holds neither PyTorch nor a GPU context.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from functools import lru_cache
from types import FrameType

from tepo_megatron.processes import die_with_parent

_ALARM_AGAIN_SECONDS = 0.25
_GOLDS_KEPT = 4096


class OutOfTimeError(BaseException):
    """The soft alarm. Not an Exception, since math-verify and SymPy swallow those."""


def limit_resources(memory_mib: int) -> None:
    """Cap the address space (beyond it: MemoryError, hence an unparsed or wrong answer) and write no core files."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_mib * 2**20, memory_mib * 2**20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def load_grader() -> Callable[[str, str], str]:
    """The function (gold, answer) -> status. Imports math-verify, hence after the limits are set."""
    from math_verify import LatexExtractionConfig, parse, verify

    targets = [LatexExtractionConfig(boxed_match_priority=0)]  # 0: "the answer is 42" never overrides the box

    def parse_boxed(content: str) -> list:
        # no time limit here and in verify: theirs is one per call, the alarm of `grade_in_time` is for all of them
        return parse(
            f"\\boxed{{{content}}}",
            extraction_config=targets,
            fallback_mode="no_fallback",
            parsing_timeout=None,
        )

    parse_gold = lru_cache(maxsize=_GOLDS_KEPT)(parse_boxed)  # one gold meets a whole group of answers

    def grade(gold: str, answer: str) -> str:
        parsed_gold = parse_gold(gold)
        if not parsed_gold:
            return "bad_gold"
        parsed_answer = parse_boxed(answer)
        if not parsed_answer:
            return "unparsed"
        return "equal" if verify(parsed_gold, parsed_answer, timeout_seconds=None) else "wrong"

    return grade


def grade_in_time(grade: Callable[[str, str], str], gold: str, answer: str, seconds: float) -> str:
    """`grade(gold, answer)`, or "timeout" after `seconds` of wall time.

    The alarm repeats: a bare `except:` or a destructor may swallow one. It cannot end a single long C call (a power of
    huge integers); the parent's hard deadline does.
    """

    def ring(signum: int, frame: FrameType | None) -> None:
        raise OutOfTimeError

    signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, _ALARM_AGAIN_SECONDS)
        try:
            return grade(gold, answer)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except OutOfTimeError:
        signal.setitimer(signal.ITIMER_REAL, 0)  # again: it may have rung before the line in `finally`
        return "timeout"


def main(soft_seconds: float, memory_mib: int, parent_pid: int) -> None:
    """Serve until stdin ends."""
    # a closed stdin says that it ended, too, but only after the current answer, and only if no fork holds the other end
    die_with_parent(parent_pid, signal.SIGKILL)
    limit_resources(memory_mib)
    logging.disable(logging.CRITICAL)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints must not pass for a reply
    grade = load_grader()
    # also builds the tables of the LaTeX parser; with too little memory every answer would silently be a bad one
    if (verdict := grade("1/2", "0.5")) != "equal":
        raise SystemExit(f"self-test: 0.5 for 1/2 is graded {verdict!r}")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)  # stderr is read only if the start fails; later output could fill the disk
    replies.write('"ready"\n')
    for line in sys.stdin:
        gold, answer = json.loads(line)
        replies.write(json.dumps(grade_in_time(grade, gold, answer, soft_seconds)) + "\n")


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
