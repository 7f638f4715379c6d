"""Main program of a grading worker: `python worker.py SOFT_SECONDS MEMORY_MIB PARENT_PID TOKENIZER GRADER [ARGUMENT ...]`.

It reads one JSON line `[serial, field, ...]` at a time from stdin. A field is text, or a number of bytes: that many bytes of
token ids (int32) follow the line, in the order of the fields. It writes one JSON line `[serial, status, value, detail, CPU
seconds]` to stdout, after a first line `"ready"`. It is run as a file, so that it starts in a fraction of a second and holds
neither PyTorch nor a GPU context (unless a user's own function loads them).
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
import time
from array import array
from collections.abc import Callable
from types import FrameType

from tepo_megatron.base.processes import die_with_parent

_ALARM_AGAIN_SECONDS = 0.25
_DETAIL_CHARS = 500
Graded = tuple[str, float, str]  # status, value, detail
Grader = Callable[..., Graded]


class OutOfTimeError(BaseException):
    """Raised by the soft alarm. It is not an Exception, since math-verify and SymPy swallow those."""


def limit_resources(memory_mib: int) -> None:
    """Cap the address space at `memory_mib` MiB and disable core files."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_mib * 2**20, memory_mib * 2**20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def equality(finder: str) -> Grader:
    """Return the grader (step, gold, text), where `step` is one of two. Exits the process if a self-test fails.

    read      Settle what strings alone can settle about a response. Status `open`: the answer, which is the detail, and the
              gold answer must be compared.
    compare   Compare an answer with the gold answer: equal, wrong, unparsed or bad_gold.
    """
    from tepo_megatron.rewards.grading.answers import FINDERS, gold_answer
    from tepo_megatron.rewards.grading.equality import load_grader, settle

    compare, find = load_grader(), FINDERS[finder]
    # this also builds the tables of the LaTeX parser; with too little memory every answer would silently be graded wrong
    if (verdict := compare("1/2", "0.5")) != "equal":
        raise SystemExit(f"self-test: 0.5 for 1/2 is graded {verdict!r}")

    def graded(step: str, gold: str, text: str) -> Graded:
        if step == "compare":
            return compare(gold, text), 0.0, ""
        answer = find(text)
        status = settle(gold_answer(gold), answer)
        return status or "open", 0.0, "" if status else answer or ""

    return graded


def pattern(expression: str) -> Grader:
    """Return the grader (text,) -> matched or unmatched. The whole text must match; `.` matches line breaks too."""
    compiled = re.compile(expression, re.DOTALL)

    def graded(text: str) -> Graded:
        return ("matched", 1.0, "") if compiled.fullmatch(text) else ("unmatched", 0.0, "")

    return graded


def custom(spec: str) -> Grader:
    """Return the grader (prompt, response, answer, row) -> graded with the user function's value, or failed with the error.

    `row` is JSON of the other columns, for a function with a parameter of that name.
    """
    from tepo_megatron.base.user_file import describe_error, load, takes

    function = load(spec, "function")
    takes_row = takes(function.value, "row")

    def graded(prompt: str, response: str, answer: str, row: str) -> Graded:
        try:
            returned = function.value(prompt, response, answer, **({"row": json.loads(row)} if takes_row else {}))
            number = float(returned) if hasattr(returned, "__float__") else math.nan  # text has none: float("1.0") parses
        except (Exception, SystemExit) as e:
            return "failed", 0.0, describe_error(e, function.file)[:_DETAIL_CHARS]
        if not math.isfinite(number):
            return "failed", 0.0, f"it returned {returned!r:.80}, which is no finite number"
        return "graded", number, ""

    return graded


def program(credit: str, cpu: str, wall: str, response: str, memory_mib: str, processes: str) -> Grader:
    """Return the grader (tests, response) -> the status and value of `rewards.local.CodeTerm`."""
    from tepo_megatron.rewards.grading.programs import find_program, read_tests, run_tests
    from tepo_megatron.rewards.grading.sandbox import Limits

    limits = Limits(float(cpu), float(wall), int(memory_mib), int(processes))

    def graded(answer: str, text: str) -> Graded:
        try:
            tests = read_tests(answer)
        except ValueError as e:
            return "bad_tests", 0.0, str(e)[:_DETAIL_CHARS]
        if (found := find_program(text)) is None:
            return "no_code", 0.0, ""
        try:
            results = run_tests(found, tests, limits, float(response), until_failure=credit == "all")
        except OSError as e:
            return "no_sandbox", 0.0, str(e)[:_DETAIL_CHARS]
        right = sum(results.passed)
        if right == tests.count:
            return "passed", 1.0, ""
        value = right / tests.count if credit == "share" else 0.0
        return "timeout" if results.timeout else "failed", value, f"{right} of {tests.count} tests"

    return graded


def reasoning_gym(answer: str, credit: str) -> Grader:
    """Return the grader (source, place, response) of `rewards.grading.reasoning_gym`."""
    from tepo_megatron.rewards.grading.reasoning_gym import grader

    return grader(answer, credit)


def texts() -> Grader:
    """Return the grader (prompt, response), which only decodes: the detail is JSON of both texts."""
    return lambda *fields: ("decoded", 0.0, json.dumps(fields))


def verdict(regex: str) -> Grader:
    """Return a grader with two kinds of requests: (prompt, response), as in `texts`; and (text), an answer of a judge.

    Of the second kind the detail is the group of the last match. Status `missing`: nothing matches, or the group is not in it.
    """
    search, decoded = re.compile(regex), texts()

    def graded(*fields: str) -> Graded:
        if len(fields) > 1:
            return decoded(*fields)
        found = None
        for match in search.finditer(fields[0]):
            found = match[1]
        return ("missing", 0.0, "") if found is None else ("found", 0.0, found[:_DETAIL_CHARS])

    return graded


GRADERS: dict[str, Callable[..., Grader]] = {
    "equality": equality,
    "pattern": pattern,
    "custom": custom,
    "program": program,
    "reasoning_gym": reasoning_gym,
    "texts": texts,
    "verdict": verdict,
}


def load_decoder(tokenizer: str) -> Callable[[str | bytes], str]:
    """Return the function that makes the text of a field. Special tokens are left out."""
    if not tokenizer:
        return str
    from tokenizers import Tokenizer

    decode = Tokenizer.from_file(tokenizer).decode
    return lambda field: field if isinstance(field, str) else decode(array("i", field).tolist(), skip_special_tokens=True)


def grade_in_time(grade: Callable[[], Graded], seconds: float) -> Graded:
    """Return `grade()`, or "timeout" after `seconds` of processor time.

    Wall time would turn right answers wrong on a busy machine. The alarm repeats, since a bare `except:` or a destructor may
    swallow one. It cannot interrupt a single long C call (a power of huge integers); the parent's hard deadline does.
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


def main(soft_seconds: float, memory_mib: int, parent_pid: int, tokenizer: str, grader: str, *arguments: str) -> None:
    """Serve requests until stdin ends."""
    # A closed stdin also tells that the parent ended, but only after the current answer, and only if no fork of the parent
    # holds the pipe's other end.
    die_with_parent(parent_pid, signal.SIGKILL)
    limit_resources(memory_mib)
    logging.disable(logging.CRITICAL)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the output of a library must not be taken for a reply
    grade, text = GRADERS[grader](*arguments), load_decoder(tokenizer)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)  # stderr is read only if the start fails; later output could fill the disk

    def grade_fields(fields: list[str | bytes]) -> Graded:
        return grade(*map(text, fields))

    replies.write('"ready"\n')
    while line := sys.stdin.buffer.readline():
        serial, *heads = json.loads(line)
        fields = [head if isinstance(head, str) else sys.stdin.buffer.read(head) for head in heads]
        start = time.process_time()
        status, value, detail = grade_in_time(functools.partial(grade_fields, fields), soft_seconds)
        replies.write(json.dumps([serial, status, value, detail, time.process_time() - start]) + "\n")


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
