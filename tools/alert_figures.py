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


def table(path: Path) -> str:
    """Return the figures of each recorded run with a fault, and the number of false alarms, in Markdown."""
    runs = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    lines, found, false = ["| fault | made by | expected | raised at step | others |", "|---|---|---|---|---|"], 0, 0
    healthy = [run for run in runs if run["expected"] is None]
    planted = [run for run in runs if run["expected"] is not None]
    for run in planted:
        raised = _raised(run)
        found += run["expected"] in raised
        others = ", ".join(f"`{name}` at {step}" for name, step in raised.items() if name != run["expected"]) or "-"
        step = raised.get(run["expected"], "never")
        lines.append(f"| {run['name']} | {run['made']} | `{run['expected']}` | {step} | {others} |")
    per_rule = dict.fromkeys((rule.name for rule in RULES), 0)
    for run in healthy:
        for name in _raised(run):
            per_rule[name] += 1
            false += 1
    steps = sum(len(run["records"]) for run in healthy)
    alarms = ", ".join(f"`{name}` {count}" for name, count in per_rule.items() if count)
    total = f"False alarms in {len(healthy)} healthy runs of {steps} steps: {false}{f' ({alarms})' if alarms else ''}."
    return "\n".join([*lines, "", f"Found: {found} of {len(planted)}. {total}"])


def _raised(run: dict[str, Any]) -> dict[str, int]:
    """Return the first step of each alert."""
    steps: dict[str, int] = {}
    for alert in judge((record["step"], record) for record in run["records"]):
        steps.setdefault(alert.rule.name, alert.step)
    return steps


def page(text: str) -> str:
    """Return the page with its figures written again."""
    for mark, path in (("figures", RUNS), ("fresh figures", FRESH)):
        head, _, rest = text.partition(f"<!-- {mark} -->\n")
        end = f"<!-- end of {mark} -->"
        text = f"{head}<!-- {mark} -->\n{table(path)}\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
