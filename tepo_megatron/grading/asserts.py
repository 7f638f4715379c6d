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


class StandIn:
    """A function or an object of the program.

    Args:
        ask: Sends a request and returns the answer.
        name: Name of the function. None: an object.
        number: Number of the object.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, ask: Callable[[list[Any]], Any], name: str | None = None, number: int | None = None) -> None:
        self._ask, self._name, self._number = ask, name, number

    def __call__(self, *arguments: object, **named: object) -> Any:
        if self._name is None:
            raise TypeError("an object of the program cannot be called")
        if hasattr(builtins, self._name):
            raise NameError(f"the program redefines {self._name}, which this test uses")
        return self._ask(["call", self._name, *_texts(arguments, named)])

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if self._number is None or name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **named: self._ask(["method", self._number, name, *_texts(arguments, named)])

    def __eq__(self, other: object) -> bool:
        raise TypeError("the program returned no literal")

    def __bool__(self) -> bool:
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
        kind, value = json.loads(answers.readline())
        if kind == "error":
            raise RuntimeError(value)
        return ast.literal_eval(value) if kind == "value" else StandIn(ask, number=int(value))

    _, names = json.loads(answers.readline())
    with open(tests) as content:
        given = json.load(content)
    space: dict[str, Any] = {str(name): StandIn(ask, name=str(name)) for name in names}
    exec(given["setup"], space)
    for test in given["tests"]:
        try:
            exec(test, space)
            right = True
        except BaseException:
            right = False
        results.write(json.dumps([right]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
