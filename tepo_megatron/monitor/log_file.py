"""The file log.txt of a run, which several of its processes write."""

import contextlib
import errno
import logging
import os
from pathlib import Path

from rich.console import Console

from tepo_megatron.base.errors import escaped
from tepo_megatron.base.storage import writing

LOG_FILE = "log.txt"
_PACKAGE = "tepo_megatron"  # warnings of its loggers go to the log


class LogFile(contextlib.AbstractContextManager["LogFile"]):
    """A run's log.txt together with the terminal; several processes may have it open."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LOG_FILE
        self._file = open_for_appending(self._path)
        end_line(self._file, self._path)
        self._console, self._warnings = Console(), _Warnings(self)

    def __enter__(self) -> "LogFile":
        logging.getLogger(_PACKAGE).addHandler(self._warnings)
        return self

    def __exit__(self, *exc_info: object) -> None:
        logging.getLogger(_PACKAGE).removeHandler(self._warnings)
        os.close(self._file)

    def message(self, text: str) -> None:
        """Print `text` and write it to the log. Control characters are escaped, because the text may be foreign."""
        text = escaped(text)
        self._append(text)
        self._print(text)

    def row(self, first: str, cells: list[str], style: str | None = None) -> None:
        """Write the whole row to the log, and to a terminal the cells that fit on one line."""
        self._append(" ".join([first, *cells]))
        if self._console.is_terminal:
            while len(" ".join([first, *cells])) > self._console.width:
                cells = cells[:-1]
        self._print(" ".join([first, *cells]), style)

    def _append(self, line: str) -> None:
        with writing(self._path):
            append_line(self._file, line + "\n")

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False, highlight=False, emoji=False, soft_wrap=True)


class _Warnings(logging.Handler):
    def __init__(self, log: LogFile) -> None:
        super().__init__(logging.WARNING)
        self._to = log

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._to.message(f"warning: {record.getMessage()}")
        except OSError:  # a warning must not make its caller fail
            self.handleError(record)


def open_for_appending(path: Path) -> int:
    """Open a file, created if it is missing, whose writes go to its end; return its descriptor."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def append_line(file: int, line: str) -> None:
    """Write all of `line`, or nothing if the disk is full; then raise OSError."""
    data = line.encode()
    written = os.write(file, data)
    if written < len(data):
        os.ftruncate(file, os.fstat(file).st_size - written)
        raise OSError(errno.ENOSPC, "the disk is full: a line of the run's log was not written")


def end_line(file: int, path: Path) -> None:
    """End a line that a kill cut off, so that it stays a separate line."""
    with path.open("rb") as reader:
        if reader.seek(0, os.SEEK_END) and (reader.seek(-1, os.SEEK_END), reader.read(1))[1] != b"\n":
            os.write(file, b"\n")
