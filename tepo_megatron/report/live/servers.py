"""The servers of a run on the live page, from what each step records of them."""

import math

from tepo_megatron.report.figures import NOTHING
from tepo_megatron.report.live.columns import ColumnCurves

PREFIX = "server/"
_STATES = ((1.0, "up"), (0.0, "lost"))


def server_rows(curves: ColumnCurves) -> list[tuple[str, ...]]:
    """Return a row for each server: name, state, requests at once, tokens per second, restarts, at the last step.

    Empty: the run has no servers of its own, or was recorded by a version that recorded nothing of them.
    """
    keys = curves.named(PREFIX)
    names = sorted({key.split("/")[1] for key in keys}, key=lambda name: (len(name), name))
    return [_row(curves, name) for name in names]


def _row(curves: ColumnCurves, name: str) -> tuple[str, ...]:
    state, queue, speed, restarts = (
        float(curves[f"{PREFIX}{name}/{key}"][-1]) for key in ("up", "queue", "tokens_per_second", "restarts")
    )
    words = next((text for value, text in _STATES if value == state), NOTHING if math.isnan(state) else "starting")
    numbers = [NOTHING if math.isnan(x) else f"{x:,.0f}" for x in (queue, speed, restarts)]
    return f"server {name}", words, *numbers
