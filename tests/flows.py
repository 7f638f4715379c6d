"""Record which files of the package carry a rollout, or a weight, while a run trains for real.

A run of one rank samples through HTTP from `scripted_sglang.SglangThread`, grades, trains and delivers weights. Meanwhile every
call and every return of a Python function is looked at (`sys.setprofile`, in all threads).

A value belongs to a path if it is an object of one of the path's types, or a list, tuple, dict or `functools.partial` of them.
On the path of a weight, an iterator of the package belongs to it, too. A file carries the objects of a path

* if a function of it returns or yields one to a function of another file,
* if a function of it hands one to the end of the path, or
* if a function of it hands one, as an argument, to a function of another file that carries them.

A file that is only given an object, and hands it to no file that carries it, reads it. The methods of the data objects
themselves (`types/`) are no files to hand them to, and `platform/` counts as a part of PyTorch, some of whose functions it
replaces.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, GeneratorType
from typing import Any

ROOT = str(Path(__file__).parents[1]) + "/"
OURS, DATA, TORCH = "tepo_megatron/", "tepo_megatron/types/", "tepo_megatron/platform/"
Place = tuple[str, str]  # (file, qualified name of a function)


@dataclass
class Flow:
    """A path, and what was recorded of it. Functions have the time of their first event.

    Attributes:
        types: Types of the objects.
        starts, ends: Whether the path starts, or ends, with the call of a function. None: it starts at once.
        iterators: Iterators of the package belong to the path.
        handled: Functions that returned, yielded or handed on an object; of all others, those that were given one.
        returning: Files that returned or yielded one to another file, or handed one to an end.
        handed: (file, file that it handed one to), our files only.
        given: Files that were given one.
    """

    types: tuple[type, ...]
    ends: Callable[[CodeType], bool]
    starts: Callable[[CodeType], bool] | None = None
    once: bool = True
    iterators: bool = False
    handled: dict[Place, int] = field(default_factory=dict)
    taken: dict[Place, int] = field(default_factory=dict)
    returning: set[str] = field(default_factory=set)
    handed: set[tuple[str, str]] = field(default_factory=set)
    given: set[str] = field(default_factory=set)
    over: bool = False

    def holds(self, value: Any, depth: int = 3) -> bool:
        """Return whether a value belongs to the path.

        Args:
            value: The value.
            depth: Levels of containers to look into.
        """
        if isinstance(value, self.types):
            return True
        if self.iterators and isinstance(value, GeneratorType):
            return _name(value.gi_code) is not None
        if depth == 0:
            return False
        inner: Any = ()
        if isinstance(value, list | tuple | deque):
            inner = tuple(value)[:4]
        elif isinstance(value, dict):
            inner = list(value.values())[:4]
        elif isinstance(value, functools.partial):
            inner = value.args
        return any(self.holds(each, depth - 1) for each in inner)

    @property
    def carriers(self) -> set[str]:
        """Return the files that carry the objects."""
        found = set(self.returning)
        while more := {giver for giver, receiver in self.handed if receiver in found} - found:
            found |= more
        return found

    @property
    def readers(self) -> set[str]:
        """Return the files that only read them."""
        return self.given - self.carriers

    def event(self, place: Place) -> int | None:
        """Return the time of the first event in which a function handled an object; None: it handled none."""
        return self.handled.get(place, self.taken.get(place))

    def dump(self) -> dict[str, Any]:
        """Return what was recorded, to be merged into the flow of another process."""
        return {name: getattr(self, name) for name in ("handled", "taken", "returning", "handed", "given")}

    def merge(self, recorded: dict[str, Any]) -> None:
        """Add what was recorded in another process of this machine.

        Args:
            recorded: The result of `dump` there.
        """
        for name, value in recorded.items():
            own = getattr(self, name)
            if isinstance(value, set):
                own |= value
            else:
                own |= {place: min(number, own.get(place, number)) for place, number in value.items()}

    def see(self, frame: FrameType, event: str, value: Any, number: int) -> None:
        """Record a call or a return.

        Args:
            frame: Frame of the called or returning function.
            event: "call" or "return".
            value: The returned value; None for a call.
            number: Time of the event in ns.
        """
        code, caller = frame.f_code, frame.f_back
        name, giver = _name(code), None if caller is None else _name(caller.f_code)
        by = None if caller is None or giver is None else (giver, caller.f_code.co_qualname)
        if event == "call" and by is not None and self.ends(code):
            self.returning.add(by[0])
            self.handled.setdefault(by, number)
            self.over = self.once
        if name is None or self.over:
            return
        place = (name, code.co_qualname)
        if event == "return":
            if self.holds(value) and caller is not None and caller.f_code.co_filename != code.co_filename:
                self.returning.add(name)
                self.handled.setdefault(place, number)
            return
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4)
        if name.startswith(DATA) or not any(self.holds(frame.f_locals.get(each)) for each in code.co_varnames[:count]):
            return
        self.given.add(name)
        self.taken.setdefault(place, number)
        if by is not None and giver is not None and giver != name:
            self.handed.add((giver, name))
            self.handled.setdefault(by, number)


_names: dict[str, str | None] = {}


def _name(code: CodeType) -> str | None:
    """Return the file of a function of the package, relative to the repository; None for others."""
    path = code.co_filename
    if path not in _names:
        short = path.removeprefix(ROOT)
        _names[path] = short if short.startswith(OURS) and not short.startswith(TORCH) else None
    return _names[path]


@contextlib.contextmanager
def recording(*flows: Flow) -> Iterator[None]:
    """Record the paths within the block, in this thread, in those that start meanwhile, and in forks of this process."""
    running = {id(flow): flow.starts is None for flow in flows}

    def profile(frame: FrameType, event: str, value: Any) -> None:
        if event not in ("call", "return"):
            return
        number = time.monotonic_ns()  # the same clock in all processes
        for flow in flows:
            if flow.starts is not None and flow.starts(frame.f_code):
                running[id(flow)] = event == "call"
            if running[id(flow)] and not flow.over:
                flow.see(frame, event, value, number)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
