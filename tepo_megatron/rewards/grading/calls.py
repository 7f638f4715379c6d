"""Serve the functions of a program to another process. This text is run inside of a sandbox, next to the program.

It reads one JSON line at a time from stdin and answers each with one to stdout:

    ["call", name, [argument, ...], {key: argument, ...}]           -> ["value", text], ["object", number] or ["error", text]
    ["method", number, name, [argument, ...], {key: argument, ...}] -> the same, of an object that an earlier answer numbered

The first answer, before any request, is ["names", [name, ...]], what the program defines. Arguments and values are Python
literals as text; a value that is none stays here under its number. The program can do whatever it likes to this process: it
only decides what is answered, and whoever asks decides what is right.
"""

import ast
import json
import os
import sys


def literal(value: object) -> "str | None":
    """Return a value as the text of a Python literal; None if it is none."""
    try:
        text = repr(value)
        return text if len(text) < 2**20 and ast.literal_eval(text) == value else None
    except Exception:  # the program's own `__repr__` and `__eq__` may raise anything
        return None


def serve(path: str) -> None:
    """Run the program, and answer requests until stdin ends."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    quiet = os.open(os.devnull, os.O_RDWR)
    for file in (0, 1, 2):
        os.dup2(quiet, file)
    space: dict[str, object] = {"__name__": "program"}
    objects: list[object] = []
    with open(path) as program:
        exec(compile(program.read(), path, "exec"), space)
    answers.write(json.dumps(["names", [name for name in space if not name.startswith("__")]]) + "\n")
    for line in requests:
        kind, *rest = json.loads(line)
        try:
            if kind == "call":
                target = space[rest[0]]
            else:
                target = getattr(objects[rest[0]], rest[1])
            named = {key: ast.literal_eval(text) for key, text in rest[-1].items()}
            value = target(*map(ast.literal_eval, rest[-2]), **named)  # type: ignore[operator]
            text = literal(value)
            if text is None:
                objects.append(value)
            answer = ["object", len(objects) - 1] if text is None else ["value", text]
        except BaseException as e:
            answer = ["error", f"{type(e).__name__}: {e}"[:500]]
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    sys.setrecursionlimit(10**5)
    serve(sys.argv[1])
