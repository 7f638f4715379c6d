"""`tepo report`: show a run as a page, `report.html`, and as a picture, `report.png`; compare several runs on one page."""

import json
from collections.abc import Sequence
from pathlib import Path

from tepo_megatron.base.errors import ConfigError, escaped
from tepo_megatron.base.run_lock import RunLock
from tepo_megatron.base.storage import replace_file
from tepo_megatron.report.curves import Curves
from tepo_megatron.report.page import render
from tepo_megatron.report.picture import write_picture
from tepo_megatron.report.run import RunRecord, Summary, read_run

__all__ = [
    "Curves", "RunRecord", "Summary", "print_results", "read_run", "write_comparison", "write_page", "write_report",
]  # fmt: skip


def write_report(run_dir: Path) -> Path:
    """Write the page and then the picture of a run into its folder; return the page's path.

    `run_dir` must hold config.yaml and metrics.jsonl; other records of the run are shown if present. Both files are replaced
    atomically.

    Raises:
        DataError: No step has been recorded, or a file is malformed.
        ConfigError: config.yaml is malformed, or the page cannot be written.
    """
    run = read_run(run_dir)
    page = write_page(run_dir / "report.html", render([run]))
    write_picture(run)
    return page


def write_comparison(run_dirs: Sequence[Path], page: Path) -> Path:
    """Write a page that compares several runs, with each run below; return its path.

    Raises:
        DataError: As `write_report`.
        ConfigError: As `write_report`, or a run is named twice.
    """
    for place, run_dir in enumerate(run_dirs):
        if any(run_dir.resolve() == other.resolve() for other in run_dirs[:place]):
            raise ConfigError(f"{run_dir} is named twice; a run is compared with others")
    return write_page(page, render([read_run(run_dir) for run_dir in run_dirs]))


def write_page(page: Path, text: str) -> Path:
    """Replace `page` atomically; return its path. Raises ConfigError if the file cannot be written."""
    try:
        replace_file(page, text.encode())
    except OSError as e:
        raise ConfigError(f"{page}: the page cannot be written ({e.strerror}); free some space, or name another file") from None
    return page


def print_results(folder: Path, steps: int) -> None:
    """Print the results of a finished run; write its page and picture if it was killed before it did."""
    names = ("summary.json", "report.html", "report.png", "hf")
    if not (folder / "report.png").exists():  # a run removes the picture before it writes its summary
        with RunLock(folder):
            write_report(folder)
    results = ", ".join(name for name in names if (folder / name).exists())
    taken = json.loads((folder / "summary.json").read_text())["steps"]
    print(f"{escaped(str(folder))}: this run is finished, with {taken} steps; its results: {results}")
    print(f"only {'--evaluation.patience null' if taken < steps else 'a higher training.steps'} makes it go on")
