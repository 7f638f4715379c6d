"""Grade programs by unit tests: find the program in a response, read the tests of a row, run them in sandboxes.

The gold answer is JSON, or an object of the dataset's column, in one of the forms of public datasets:

    {"inputs": [text, ...], "outputs": [text, ...]}                        stdin and stdout (APPS, TACO, CodeContests)
    {"fn_name": name, "inputs": [[argument, ...], ...], "outputs": [...]}   calls of a function (APPS, TACO)
    [{"input": text, "output": text, "testtype": "stdin" or "functional"}]  LiveCodeBench; functional ones need fn_name:
    {"fn_name": name, "tests": [...]}                                       arguments are JSON, one to a line
    ["assert ...", ...] or {"test_list": [...], "test_setup_code": text}    MBPP
    {"test": text, "entry_point": name}                                     HumanEval: check(NAME) is called
    assert ...                                                              lines of asserts

Outputs are equal if their lines are, without spaces at the ends of lines and without empty lines at the end; or else if their
words are, where two numbers with a decimal point or an exponent may differ by 1e-6, relative or absolute.
"""

import functools
import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tepo_megatron.rewards.grading.sandbox import PROGRAM, Limits, run, run_pair

_FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
_DECIMAL = re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+)([eE][-+]?\d+)?")
_TOLERANCE = 1e-6
_TESTS = "/tests.json"
_SANDBOX = Path(__file__).parent
# In the sandbox of the tests. APPS wraps some outputs into a list of one; JSON knows no tuples.
_SAME = f"""
def same(found, wanted):
    def plain(x):
        return [plain(y) for y in x] if isinstance(x, (list, tuple)) else x
    def equal(a, b):
        if isinstance(a, list) and isinstance(b, list):
            return len(a) == len(b) and all(map(equal, a, b))
        if isinstance(a, float) or isinstance(b, float):
            return type(a) in (int, float) and type(b) in (int, float) and abs(a - b) <= {_TOLERANCE} * max(1, abs(b))
        return type(a) is type(b) and a == b
    found, wanted = plain(found), plain(wanted)
    return equal(found, wanted) or isinstance(wanted, list) and len(wanted) == 1 and equal(found, wanted[0])
"""


@dataclass(frozen=True)
class Tests:
    """The tests of one row.

    Attributes:
        pairs: (stdin, stdout) of each run.
        setup: Python that is run before the asserts.
        asserts: Python of each test; it raises if the program is wrong.
    """

    pairs: tuple[tuple[str, str], ...] = ()
    setup: str = ""
    asserts: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Number of tests."""
        return len(self.pairs) + len(self.asserts)


def find_program(response: str) -> str | None:
    """Return the last fenced code block of a response; None if it has none that is closed."""
    blocks = _FENCED.findall(response)
    return str(blocks[-1]) if blocks else None


def read_tests(answer: str) -> Tests:
    """Return the tests of a gold answer. Raises ValueError with the reason if it is in no known form, or has none."""
    if answer.lstrip().startswith("assert"):
        return Tests(asserts=tuple(line for line in answer.splitlines() if line.strip()))
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"it is neither JSON nor lines of asserts ({e})") from None
    tests = _tests(value)
    if tests.count == 0:
        raise ValueError("it has no test")
    return tests


def _tests(value: Any) -> Tests:
    match value:
        case {"test": str(text), "entry_point": str(name)}:
            return Tests(setup=text, asserts=(f"check({_name(name)})",))
        case {"test_list": [*asserts]} if all(isinstance(a, str) for a in asserts):
            return Tests(setup=str(value.get("test_setup_code") or ""), asserts=tuple(asserts))
        case {"inputs": [*inputs], "outputs": [*outputs]}:
            if len(inputs) != len(outputs):
                raise ValueError(f"it has {len(inputs)} inputs and {len(outputs)} outputs")
            if value.get("fn_name"):
                return _calls(value["fn_name"], list(zip(inputs, outputs, strict=True)))
            return Tests(pairs=tuple((_lines(i), _lines(o)) for i, o in zip(inputs, outputs, strict=True)))
        case {"tests": [*tests]}:
            return _listed(tests, value.get("fn_name"))
        case [*tests]:
            return _listed(tests, None)
    raise ValueError(f"its keys are {', '.join(map(str, value)) if isinstance(value, dict) else type(value).__name__}")


def _listed(tests: Sequence[Any], name: Any) -> Tests:
    if all(isinstance(test, str) for test in tests):
        return Tests(asserts=tuple(tests))
    if not all(isinstance(test, dict) and {"input", "output"} <= test.keys() for test in tests):
        raise ValueError("its entries are neither asserts nor objects with input and output")
    if all(test.get("testtype", "stdin") == "functional" for test in tests):
        if not name:
            raise ValueError("its tests call a function; give its name as fn_name")
        return _calls(name, [([json.loads(a) for a in _rows(test["input"])], json.loads(test["output"])) for test in tests])
    return Tests(pairs=tuple((_lines(test["input"]), _lines(test["output"])) for test in tests))


def _calls(name: Any, cases: Sequence[tuple[Any, Any]]) -> Tests:
    called = _name(name)
    setup = f"{_SAME}\n__call = Solution().{called} if 'Solution' in globals() else {called}\n"
    if any(not isinstance(arguments, list) for arguments, _ in cases):
        raise ValueError("the inputs of a function must be lists of its arguments")
    return Tests(setup=setup, asserts=tuple(f"assert same(__call(*{inputs!r}), {wanted!r})" for inputs, wanted in cases))


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"{name!r} is no name of a function")
    return name


def _lines(value: Any) -> str:
    """Return an input or output as text; APPS has some as lists of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _rows(text: Any) -> list[str]:
    return [row for row in str(text).split("\n") if row.strip()]


def same_output(printed: str, wanted: str) -> bool:
    """Return whether two outputs are equal, as the top of this file defines it."""
    if _stripped(printed) == _stripped(wanted):
        return True
    ours, theirs = printed.split(), wanted.split()
    return len(ours) == len(theirs) and all(map(_same_word, ours, theirs))


def _stripped(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _same_word(printed: str, wanted: str) -> bool:
    if printed == wanted:
        return True
    a, b = _DECIMAL.fullmatch(printed), _DECIMAL.fullmatch(wanted)
    if a is None or b is None or not any(c in printed + wanted for c in ".eE"):
        return False
    x, y = float(printed), float(wanted)
    return math.isfinite(x) and math.isfinite(y) and abs(x - y) <= _TOLERANCE * max(1.0, abs(y))


@dataclass(frozen=True)
class TestResults:
    """The results of the tests. `timeout`: a limit of time ended the program, or the time for all tests was over."""

    passed: tuple[bool, ...]
    timeout: bool = False


def run_tests(program: str, tests: Tests, limits: Limits, seconds: float, until_failure: bool) -> TestResults:
    """Run the tests, one after the other. `seconds`: time for all runs; tests that have not begun by then are not passed."""
    files = {PROGRAM: program.encode(errors="replace")}
    end, passed, timeout = time.monotonic() + seconds, list[bool](), False
    for stdin, wanted in tests.pairs:
        if time.monotonic() > end:
            return TestResults(tuple(passed), timeout=True)
        finished = run([PROGRAM], files, stdin.encode(), limits)
        timeout |= finished.why == "timeout"
        passed.append(finished.well and same_output(finished.stdout.decode(errors="replace"), wanted))
        if until_failure and not passed[-1]:
            return TestResults(tuple(passed), timeout)
    if tests.asserts:
        given_tests = json.dumps({"setup": tests.setup, "tests": tests.asserts}).encode()
        first = (["-c", _text("asserts.py"), _TESTS], {_TESTS: given_tests})
        finished = run_pair(first, (["-c", _text("calls.py"), PROGRAM], files), limits)
        timeout |= finished.why == "timeout"
        passed += [line == b"[true]" for line in finished.stderr.splitlines()[: len(tests.asserts)]]
    return TestResults(tuple(passed), timeout)


@functools.cache
def _text(name: str) -> str:
    return (_SANDBOX / name).read_text()
