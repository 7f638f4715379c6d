"""Time between the warning signal of a Slurm job and its time limit."""

from __future__ import annotations

_MARGIN_SECONDS = 60  # part of the warning time reserved for Slurm to end the job before its limit


def patience_of(warning_seconds: int) -> int:
    """Return the seconds for which the batch script waits for the end of the run after the warning."""
    return warning_seconds - min(_MARGIN_SECONDS, warning_seconds // 2)
