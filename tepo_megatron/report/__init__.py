"""`tepo report`: a run as one page, `report.html`, and as one picture, `report.png`; several runs as one comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tepo_megatron.errors import ConfigError
from tepo_megatron.report.drawing import STYLE, Curves
from tepo_megatron.report.page import render
from tepo_megatron.report.picture import draw, save_picture, write_picture
from tepo_megatron.report.run import Run, Summary, read_run
from tepo_megatron.sinks import replace_file

__all__ = [
    "STYLE",
    "Curves",
    "Run",
    "Summary",
    "draw",
    "read_run",
    "save_picture",
    "write_comparison",
    "write_page",
    "write_report",
]


def write_report(run_dir: Path) -> Path:
    """Write the page and then the picture of the run in `run_dir` (config.yaml, metrics.jsonl and whatever else it has left so
    far) into it; returns the page's path.

    Both replace older ones in one step. Raises DataError when no step has been recorded or a file is malformed, ConfigError
    when config.yaml is or the page cannot be written.
    """
    run = read_run(run_dir)
    page = write_page(run_dir / "report.html", render([run]))
    write_picture(run)
    return page


def write_comparison(run_dirs: Sequence[Path], page: Path) -> Path:
    """Write the comparison of several runs, with each of them below, as `page`; returns it.

    Raises as `write_report` does, and ConfigError for a run that is named twice.
    """
    for place, run_dir in enumerate(run_dirs):
        if any(run_dir.resolve() == other.resolve() for other in run_dirs[:place]):
            raise ConfigError(f"{run_dir} is named twice; a run is compared with others")
    return write_page(page, render([read_run(run_dir) for run_dir in run_dirs]))


def write_page(page: Path, text: str) -> Path:
    """Replace `page` in one step; returns it. Raises ConfigError where it cannot be written."""
    try:
        replace_file(page, text.encode())
    except OSError as e:
        raise ConfigError(f"{page}: the page cannot be written ({e.strerror}); make room, or name another place") from None
    return page
