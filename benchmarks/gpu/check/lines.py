"""Reporting of a task: one line of JSON for each result, as soon as it is known."""

import contextlib
import json
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["passed", "failed", "measured", "skipped", "running"]


class Skip(Exception):
    """Raised inside `Check.line` if the line cannot be measured here. Its message is the reason."""


@dataclass
class Check:
    """The argument of a task's code, through which it reports."""

    platform: Literal["cpu", "cuda"]
    task: str
    folder: Path  # scratch space that all tasks of a run share
    file: Path  # the lines are appended here, one JSON object each
    deadline: float  # when its time is up, on the monotonic clock, which all processes of a machine share
    names: list[str] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        """True if the part runs on a GPU."""
        return self.platform == "cuda"

    @property
    def left(self) -> float:
        """The seconds that are left."""
        return self.deadline - time.monotonic()

    def report(
        self, name: str, status: Status, value: float | str | None = None, unit: str = "", why: str = "", **more: Any
    ) -> None:
        """Write one line."""
        self.names.append(name)
        line = {"name": name, "status": status, "value": value, "unit": unit, "why": why, **more}
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def verdict(self, name: str, value: float, limit: float, unit: str = "", **more: Any) -> None:
        """Report a value that must not exceed its limit."""
        status: Status = "passed" if value <= limit else "failed"
        self.report(name, status, value, unit, f"limit {limit:g}", limit=limit, **more)

    @contextlib.contextmanager
    def line(self, *names: str) -> Iterator[None]:
        """Report an exception as the failure of these lines, and go on with the next ones."""
        try:
            yield
        except Skip as e:
            self._all(names, "skipped", str(e))
        except Exception as e:  # the check goes on: the next line may show why this one failed
            traceback.print_exc()
            self._all(names, "failed", f"{type(e).__name__}: {e}"[-600:])

    def _all(self, names: tuple[str, ...], status: Status, why: str) -> None:
        for name in names:
            if name not in self.names:
                self.report(name, status, why=why)


def read_all(file: Path) -> list[dict[str, Any]]:
    """Return the lines written so far, without a last one that was cut off in the middle."""
    found = []
    for text in file.read_text().splitlines() if file.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(text))
    return found


def read(file: Path) -> list[dict[str, Any]]:
    """Return the last line of each name, in the order of their first ones."""
    return list({line["name"]: line for line in read_all(file)}.values())
