"""`tepo report`: show a run as a page, `report.html`, and as a picture, `report.png`; compare several runs on one page.



A page is one self-contained HTML file. Every value is escaped, and only the page's own script may run.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from tepo_megatron import __version__
from tepo_megatron.base.errors import ConfigError, escaped
from tepo_megatron.base.run_lock import RunLock
from tepo_megatron.base.storage import replace_file
from tepo_megatron.config.io import to_yaml
from tepo_megatron.config.safety import safety_checks
from tepo_megatron.report import comparison, curves, evaluations, panels, samples, tokens
from tepo_megatron.report.chart import BLUE, MUTED, Chart, css_color, on_page
from tepo_megatron.report.curves import Curves
from tepo_megatron.report.picture import write_picture
from tepo_megatron.report.run import RunRecord, Summary, facts, read_run

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


_TEMPLATES = Path(__file__).parent / "templates"


def render(runs: Sequence[RunRecord]) -> str:
    """Return the page of one run, or the comparison of several with each run below. Raises DataError for a malformed file."""
    names = comparison.names(runs)
    views = [_view(run, name, place) for place, (run, name) in enumerate(zip(runs, names, strict=True))]
    several = len(runs) > 1
    compared = (
        comparison.compare(dict(zip(names, runs, strict=True)), [view["held_out"] for view in views]) if several else None
    )
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"on_page": on_page, "pieces": lambda text: samples.of_text(text, "text")}
    script = "\n".join((_TEMPLATES / name).read_text() for name in ("plots.js", "page.js"))
    return environment.get_template("page.html").render(
        title="Comparison of runs" if several else names[0],
        style=Markup((_TEMPLATES / "style.css").read_text()),
        script=Markup(script),
        script_hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        version=__version__,
        window=curves.WINDOW,
        last_step=max(run.last_step for run in runs),
        runs=views,
        comparison=compared,
    )


def _view(run: RunRecord, name: str, place: int) -> dict[str, Any]:
    anchor, evaluated, suite = f"run-{place}", evaluations.read_held_out(run), evaluations.read_benchmarks(run)
    sections = panels.sections(run)
    numbered = [(name, f"{anchor}-{number}") for number, name in enumerate(sections, start=1)]
    others = ("figures",) if run.fine_tuned else ("evaluation", "samples", "tokens", "figures")
    rest = [(heading.capitalize(), f"{anchor}-{heading}") for heading in others]
    return {
        "name": name,
        "anchor": anchor,
        "color": css_color(comparison.color(place)),
        "facts": (*facts(run), *filter(None, [panels.time_shares(run)])),
        "fine_tuned": run.fine_tuned,
        "safety": safety_checks(run.cfg),
        "notes": run.notes,
        "sections": sections,
        "contents": [*numbered, *rest],
        "held_out": evaluated,
        "evaluation": _evaluation(run),
        "benchmarks": suite,
        "samples": samples.read_samples(run),
        "tokens": tokens.read_tokens(run),
        "table": curves.table(run.curves),
        "config": to_yaml(run.cfg),
        "last_step": run.last_step,
    }


def _evaluation(run: RunRecord) -> Chart | None:
    if run.summary is None or not run.summary.evaluations:
        return None
    results = [(f"step {step}", mean, error, MUTED if step == 0 else BLUE) for step, mean, error in run.summary.evaluations]
    return evaluations.accuracies(results, "Bars: 95 % intervals over problems.")
