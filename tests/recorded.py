"""What runs have recorded in metrics.jsonl."""

from pathlib import Path
from typing import Any

from tepo_megatron.base.records import StepRecords, read_lines, steps_of
from tepo_megatron.monitor.sinks import METRICS_FILE


def sorted_lines(run: Path) -> StepRecords:
    path = run / METRICS_FILE
    return steps_of(read_lines(path) if path.exists() else [])


def step_records(run: Path) -> list[dict[str, Any]]:
    """Return the records of the steps, after asserting that the file is whole."""
    found = sorted_lines(run)
    assert not found.faults and not found.rest
    return found.records


def steps_taken(run: Path) -> int:
    """Return the number of recorded steps, also while the run writes."""
    return len(sorted_lines(run).records)
