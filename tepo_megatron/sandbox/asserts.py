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


class StandIn:
    """A function or an object of the program.

    Args:
        ask: Sends a request and returns the answer.
        name: Name of the function. None: an object.
        number: Number of the object.
    """

    def __init__(self, ask, name=None, number=None):  # type: ignore[no-untyped-def]
        self._ask, self._name, self._number = ask, name, number

    def __call__(self, *arguments, **named):  # type: ignore[no-untyped-def]
        if self._name is None:
            raise TypeError("an object of the program cannot be called")
        if hasattr(builtins, self._name):
            raise NameError(f"the program redefines {self._name}, which this test uses")
        return self._ask(["call", self._name, *_texts(arguments, named)])

    def __getattr__(self, name):  # type: ignore[no-untyped-def]
        if self._number is None or name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **named: self._ask(["method", self._number, name, *_texts(arguments, named)])

    def __eq__(self, other):  # type: ignore[no-untyped-def]
        raise TypeError("the program returned no literal")

    def __bool__(self):  # type: ignore[no-untyped-def]
        raise TypeError("the program returned no literal")

    __hash__ = None


def _texts(arguments, named):  # type: ignore[no-untyped-def]
    return [[repr(a) for a in arguments], {key: repr(a) for key, a in named.items()}]


def main(tests: str) -> None:
    """Run the tests of a file: {"setup": text, "tests": [text, ...]}."""
    requests, answers = os.fdopen(os.dup(1), "w", buffering=1), os.fdopen(os.dup(0))
    results = os.fdopen(os.dup(2), "w", buffering=1)
    quiet = os.open(os.devnull, os.O_RDWR)
    for file in (0, 1, 2):
        os.dup2(quiet, file)

    def ask(request):  # type: ignore[no-untyped-def]
        requests.write(json.dumps(request) + "\n")
        kind, value = json.loads(answers.readline())
        if kind == "error":
            raise RuntimeError(value)
        return ast.literal_eval(value) if kind == "value" else StandIn(ask, number=int(value))

    kind, names = json.loads(answers.readline())
    with open(tests) as file:
        given = json.load(file)
    space = {str(name): StandIn(ask, name=str(name)) for name in names}
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
