"""Format the output of `tepo plan`."""

from collections.abc import Iterator
from typing import Any

from tepo_megatron.plan.gpus import GIB, Gpu
from tepo_megatron.plan.search import LayoutCandidate, SearchResult
from tepo_megatron.plan.step import Predictor, StepPrediction
from tepo_megatron.plan.whole_run import WholeRun, time_range, whole_run

_SHOWN = 8


def memory_lines(layout: LayoutCandidate, gpu: Gpu) -> Iterator[str]:
    """Yield the memory table, with one column per state."""
    states = layout.states
    yield "memory of a GPU, GiB".ljust(28) + "".join(state.name.rjust(10) for state in states)
    for name in dict.fromkeys(name for state in states for name in state.parts):
        cells = (f"{state.parts[name] / GIB:10.2f}" if name in state.parts else " " * 10 for state in states)
        yield f"  {name}".ljust(28) + "".join(cells)
    yield f"  total, of {gpu.memory / GIB:.1f}".ljust(28) + "".join(f"{state.total / GIB:10.2f}" for state in states)


def time_lines(step: StepPrediction, error: float, source: str = "others measured") -> Iterator[str]:
    """Yield the seconds of each phase, and the throughput."""
    yield "a step, s"
    for name, seconds in step.phases.items():
        if seconds:
            yield f"  {name}".ljust(38) + f"{seconds:10.2f}"
    yield f"  beyond these, as {source}".ljust(38) + f"{step.seconds - step.modelled:10.2f}"
    how = "one after the other" if step.hidden == 0 else f"{step.hidden:.0%} of training hidden"
    low, high = time_range(step.seconds, error)
    yield f"  all, {how}".ljust(38) + f"{step.seconds:10.2f}  ({low:.0f} to {high:.0f})"
    parts = step.update.cost
    words = ", ".join(f"{name} {seconds / parts.total:.0%}" for name, seconds in vars(parts).items())
    packing = step.update.packing
    waits = 1 - packing["packing/balance"] * (1 - packing["packing/bubble_share"])
    yield f"  of an update: {words}; {packing['packing/microbatches']:.0f} microbatches, {waits:.0%} waiting"
    yield f"  {step.tokens} tokens: {step.tokens_per_second:.0f} tokens/s, {step.tokens_per_second / step.gpus:.0f} per GPU"


def run_lines(run: WholeRun) -> Iterator[str]:
    """Yield the hours of the whole run."""
    low, high = time_range(run.seconds / 3600, run.error)
    yield f"the whole run, {run.steps} steps, h"
    yield "  steps".ljust(38) + f"{run.steps * run.step / 3600:10.2f}"
    for name, number, seconds in (
        ("evaluations", run.evaluations, run.evaluation),
        ("checkpoints", run.checkpoints, run.checkpoint),
    ):
        if number and seconds:
            yield f"  {name}, {number} x {seconds:.1f} s".ljust(38) + f"{number * seconds / 3600:10.2f}"
    if run.ending >= 18:  # seconds; less is 0.00 h
        yield "  writing at the end".ljust(38) + f"{run.ending / 3600:10.2f}"
    yield "  all".ljust(38) + f"{run.seconds / 3600:10.2f}  ({low:.1f} to {high:.1f})"
    hours = (run.gpu_hours, *time_range(run.gpu_hours, run.error))
    yield "  GPU-hours of {} GPUs: {:.0f} ({:.0f} to {:.0f})".format(run.gpus, *hours)


def search_lines(found: SearchResult, gpus: int) -> Iterator[str]:
    """Yield the best layouts, and why the others are refused."""
    yield f"{found.seen} layouts of {gpus} GPUs, {len(found.best)} fit"
    if found.best:
        yield "  " + "layout".ljust(52) + "tokens/s".rjust(10) + "step, s".rjust(10) + "GiB".rjust(8)
    for layout in found.best[:_SHOWN]:
        assert layout.step is not None
        cells = f"{layout.step.tokens_per_second:10.0f}{layout.step.seconds:10.1f}{layout.fullest.total / GIB:8.1f}"
        yield "  " + layout.name.ljust(52) + cells
    for why, names in found.refused.items():
        yield f"  {len(names):4} refused: {why}"


def as_json(predictor: Predictor, layout: LayoutCandidate, found: SearchResult, gpus: int) -> dict[str, Any]:
    """Return everything as JSON values, in bytes and seconds."""

    def one(layout: LayoutCandidate) -> dict[str, Any]:
        out: dict[str, Any] = {"layout": layout.name, "fits": not layout.why, "why": layout.why}
        out["memory_bytes"] = {state.name: {k: round(v) for k, v in state.parts.items()} for state in layout.states}
        if layout.step is not None:
            out["phases_seconds"] = dict(layout.step.phases)
            out["step_seconds"] = layout.step.seconds
            out["tokens_per_second"] = layout.step.tokens_per_second
        return out

    work = predictor.workload
    given = one(layout)
    if layout.step is not None:
        run = whole_run(predictor, layout.step.seconds)
        given["step_seconds_range"] = time_range(layout.step.seconds, run.error)
        given["run_seconds"], given["run_seconds_range"] = run.seconds, time_range(run.seconds, run.error)
        given["run_gpu_hours"], given["run_gpu_hours_range"] = run.gpu_hours, time_range(run.gpu_hours, run.error)
    measured = predictor.measured
    calibration = {"factors": dict(measured.factors), "beyond": measured.beyond} if measured is not None else None
    return {
        "calibration": calibration,
        "gpu": predictor.machine.gpu.name,
        "gpus": gpus,
        "assumed": {
            "prompt_tokens": work.prompt,
            "response_tokens": work.response,
            "longest_response": work.longest,
            "dropped_groups": work.dropped,
        },
        "given": given,
        "best": [one(best) for best in found.best],
        "refused": {why: list(names) for why, names in found.refused.items()},
    }
