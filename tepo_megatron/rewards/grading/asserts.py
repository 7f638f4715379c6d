"""Run tests that call the functions of a program in another sandbox. This text is run inside of a sandbox of its own.

The tests come from a dataset, the program from a model: neither is trusted, and the program must not decide whether it is
right. So the tests run here, every name that the program defines is a stand-in whose calls go to the program's sandbox, and
values come back as literals. stdin and stdout lead there (`calls.py`). The result goes to stderr: a JSON line [true or false]
for each test.
"""

import ast
import builtins
import json
import os
import sys
from collections.abc import Callable
from typing import Any


class ProgramEnded(BaseException):
    """The program's sandbox has ended, or answers rubbish. No test may catch it as an error that it expects."""


class StandIn:
    """A function, an object or a method of the program. It can only be called: a test that does anything else with it fails.

    `request`: begin of the request of a call. Empty: an object.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, ask: Callable[[list[Any]], Any], request: tuple[object, ...] = (), number: int | None = None) -> None:
        self._ask, self._request, self._number = ask, request, number

    def __call__(self, *arguments: object, **named: object) -> Any:
        if not self._request:
            raise TypeError("an object of the program cannot be called")
        kind, *_, name = self._request
        if kind == "call" and hasattr(builtins, str(name)):
            raise NameError(f"the program redefines {name}, which this test uses")
        return self._ask([*self._request, *_texts(arguments, named)])

    def __getattr__(self, name: str) -> "StandIn":
        if self._number is None or name.startswith("__"):
            raise AttributeError(name)
        # a plain function would be true, so that `assert result.found` would pass whatever the program has there
        return StandIn(self._ask, ("method", self._number, name))

    def __eq__(self, other: object) -> bool:
        raise TypeError("the program returned no literal")

    def __bool__(self) -> bool:
        raise TypeError("the program returned no literal")

    def __repr__(self) -> str:
        raise TypeError("the program returned no literal")


def _texts(arguments: tuple[object, ...], named: dict[str, object]) -> list[Any]:
    return [[repr(a) for a in arguments], {key: repr(a) for key, a in named.items()}]


def main(tests: str) -> None:
    """Run the tests of a file: {"setup": text, "tests": [text, ...]}."""
    requests, answers = os.fdopen(os.dup(1), "w", buffering=1), os.fdopen(os.dup(0))
    results = os.fdopen(os.dup(2), "w", buffering=1)
    quiet = os.open(os.devnull, os.O_RDWR)
    for file in (0, 1, 2):
        os.dup2(quiet, file)

    def ask(request: list[Any]) -> Any:
        requests.write(json.dumps(request) + "\n")
        try:
            kind, value = json.loads(answers.readline())
            answer = ast.literal_eval(value) if kind == "value" else value
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            raise ProgramEnded from None
        if kind == "error":
            raise RuntimeError(value)
        return answer if kind == "value" else StandIn(ask, number=int(value))

    _, names = json.loads(answers.readline())
    with open(tests) as content:
        suite = json.load(content)
    space: dict[str, Any] = {str(name): StandIn(ask, ("call", str(name))) for name in names}
    exec(suite["setup"], space)
    for test in suite["tests"]:
        try:
            exec(test, space)
            right = True
        except BaseException:
            right = False
        results.write(json.dumps([right]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
