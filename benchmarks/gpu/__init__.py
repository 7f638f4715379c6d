"""The rows of the table that need a GPU: `python -m benchmarks.gpu`, timed by CUDA events, next to measured ceilings."""

from __future__ import annotations

from benchmarks.results import Measure, Target

ROWS, VOCAB, HIDDEN = 8192, 151936, 5120
COPY, GEMMS = "copy pair", "three GEMMs"
TARGETS = {
    8: (Target(f"ours / {COPY}", "<=", 1.3), Target("verl / ours", ">=", 10.0)),
    9: (Target(f"ours / {GEMMS}", "<=", 1.1),),
}


def name_of(row: int, what: str, rows: int = ROWS, vocab: int = VOCAB, hidden: int = HIDDEN) -> str:
    """Return the name of a measure."""
    return f"{what}, {rows} x {vocab} bf16" + (f", hidden {hidden}" if row == 9 else "")


def not_measured() -> list[Measure]:
    """Return the measures for a table that is made without a GPU."""
    why = "not measured: needs a GPU"
    return [Measure(row, name_of(row, "time"), "s", None, targets=targets, why=why) for row, targets in TARGETS.items()]
