"""Render runs as one self-contained HTML file. Every value is escaped, and only the page's own script may run."""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from tepo_megatron import __version__
from tepo_megatron.config.io import to_yaml
from tepo_megatron.config.safety import safety_checks
from tepo_megatron.report import benchmarks, comparison, figures, held_out, panels, samples, tokens, words
from tepo_megatron.report.chart import BLUE, MUTED, Chart, css_color, on_page
from tepo_megatron.report.run import RunRecord, facts

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
    environment.filters |= {"on_page": on_page, "pieces": lambda text: words.of_text(text, "text")}
    script = "\n".join((_TEMPLATES / name).read_text() for name in ("plots.js", "page.js"))
    return environment.get_template("page.html").render(
        title="Comparison of runs" if several else names[0],
        style=Markup((_TEMPLATES / "style.css").read_text()),
        script=Markup(script),
        script_hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        version=__version__,
        window=figures.WINDOW,
        last_step=max(run.last_step for run in runs),
        runs=views,
        comparison=compared,
    )


def _view(run: RunRecord, name: str, place: int) -> dict[str, Any]:
    anchor, evaluated, suite = f"run-{place}", held_out.read_held_out(run), benchmarks.read_benchmarks(run)
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
        "table": figures.table(run.curves),
        "config": to_yaml(run.cfg),
        "last_step": run.last_step,
    }


def _evaluation(run: RunRecord) -> Chart | None:
    if run.summary is None or not run.summary.evaluations:
        return None
    results = [(f"step {step}", mean, error, MUTED if step == 0 else BLUE) for step, mean, error in run.summary.evaluations]
    return held_out.accuracies(results, "Bars: 95 % intervals over problems.")
