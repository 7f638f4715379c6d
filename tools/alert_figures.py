"""Write the figures of docs/alerts.md from the recorded runs: `python -m tools.alert_figures`."""

import gzip
import json
from pathlib import Path
from typing import Any

from tepo_megatron.monitor.alerts import RULES, judge

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "tests" / "data" / "alert_runs.jsonl.gz"
FRESH = ROOT / "tests" / "data" / "alert_runs_fresh.jsonl.gz"
PAGE = ROOT / "docs" / "alerts.md"


def table() -> str:
    """Return when each fault was raised with the seeds of RUNS and those of FRESH, and the false alarms, in Markdown."""
    (first, summary), (fresh, fresh_summary) = _figures(RUNS), _figures(FRESH)
    lines = ["| fault | made by | expected | raised at step | with other seeds |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join(name)} | {raised} | {fresh.get(name, 'not run')} |" for name, raised in first.items()]
    return "\n".join([*lines, "", summary, f"With other seeds: {fresh_summary}"])


def _figures(path: Path) -> tuple[dict[tuple[str, str, str], str], str]:
    """Return (fault, how it was made, expected alert) -> the steps of its alerts, and a sentence of the counts."""
    runs = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    faults: dict[tuple[str, str, str], str] = {}
    found, per_rule = 0, dict.fromkeys((rule.name for rule in RULES), 0)
    for run in runs:
        raised, expected = _raised(run), run["expected"]
        if expected is None:
            for name in raised:
                per_rule[name] += 1
            continue
        found += expected in raised
        others = [f"`{name}` at {step}" for name, step in raised.items() if name != expected]
        faults[run["name"], run["made"], f"`{expected}`"] = ", ".join([str(raised.get(expected, "never")), *others])
    healthy = [run for run in runs if run["expected"] is None]
    steps, alarms = sum(len(run["records"]) for run in healthy), [f"`{name}` {n}" for name, n in per_rule.items() if n]
    false = f"False alarms in {len(healthy)} healthy runs of {steps} steps: {', '.join(alarms) or 0}."
    return faults, f"Found: {found} of {len(faults)}. {false}"


def _raised(run: dict[str, Any]) -> dict[str, int]:
    """Return the first step of each alert."""
    steps: dict[str, int] = {}
    for alert in judge((record["step"], record) for record in run["records"]):
        steps.setdefault(alert.rule.name, alert.step)
    return steps


def page(text: str) -> str:
    """Return the page with its figures written again."""
    head, _, rest = text.partition("<!-- figures -->\n")
    end = "<!-- end of figures -->"
    return f"{head}<!-- figures -->\n{table()}\n{end}{rest.partition(end)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
