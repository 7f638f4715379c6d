"""Format the output of `tepo plan`."""

from collections.abc import Iterator
from typing import Any

from tepo_megatron.plan.gpus import GIB, Gpu
from tepo_megatron.plan.roofline import Predictor, StepPrediction
from tepo_megatron.plan.search import LayoutCandidate, SearchResult

_SHOWN = 8


def memory_lines(layout: LayoutCandidate, gpu: Gpu) -> Iterator[str]:
    """Yield the memory table, with one column per state."""
    states = layout.states
    yield "memory of a GPU, GiB".ljust(28) + "".join(state.name.rjust(10) for state in states)
    for name in dict.fromkeys(name for state in states for name in state.parts):
        cells = (f"{state.parts[name] / GIB:10.2f}" if name in state.parts else " " * 10 for state in states)
        yield f"  {name}".ljust(28) + "".join(cells)
    yield f"  total, of {gpu.memory / GIB:.1f}".ljust(28) + "".join(f"{state.total / GIB:10.2f}" for state in states)


def time_lines(predictor: Predictor, step: StepPrediction) -> Iterator[str]:
    """Yield the seconds of each phase, the throughput, and the assumptions behind them."""
    yield "a step, s"
    for name, seconds in step.phases.items():
        if seconds:
            yield f"  {name}".ljust(38) + f"{seconds:10.2f}"
    how = "one after the other" if step.hidden == 0 else f"{step.hidden:.0%} of training hidden"
    yield f"  all, {how}".ljust(38) + f"{step.seconds:10.2f}"
    gpus, steps = predictor.placement.gpus, predictor.cfg.training.steps
    yield f"  {step.tokens} tokens: {step.tokens_per_second:.0f} tokens/s, {step.tokens_per_second / gpus:.0f} per GPU"
    hours = steps * step.seconds / 3600
    yield f"  {steps} steps: {hours:.1f} h, {hours * gpus:.0f} GPU-hours of {gpus} GPUs"
    a = predictor.assumed
    rates = f"{a.matmul[2]:g} of the BF16 peak in products, {a.attention:g} in attention, {a.elementwise:g} of memory bandwidth"
    yield f"  assumed: {rates}, {a.links:g} of links; {predictor.beyond:.2f} of the phases beyond them"
    if predictor.factors:
        factors = ", ".join(f"{name} {factor:.3g}" for name, factor in predictor.factors.items())
        yield f"  from the recorded run, times: {factors}"


def search_lines(result: SearchResult, gpus: int) -> Iterator[str]:
    """Yield the best layouts, and why the others are refused."""
    yield f"{result.seen} layouts of {gpus} GPUs, {len(result.best)} fit"
    if result.best:
        yield "  " + "layout".ljust(52) + "tokens/s".rjust(10) + "step, s".rjust(10) + "GiB".rjust(8)
    for layout in result.best[:_SHOWN]:
        assert layout.step is not None
        cells = f"{layout.step.tokens_per_second:10.0f}{layout.step.seconds:10.1f}{layout.fullest.total / GIB:8.1f}"
        yield "  " + layout.name.ljust(52) + cells
    for why, names in result.refused.items():
        yield f"  {len(names):4} refused: {why}"


def as_json(predictor: Predictor, layout: LayoutCandidate, result: SearchResult, gpus: int) -> dict[str, Any]:
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
    return {
        "gpu": predictor.gpu.name,
        "gpus": gpus,
        "factors": dict(predictor.factors),
        "beyond": predictor.beyond,
        "assumed": {
            "prompt_tokens": work.prompt,
            "response_tokens": work.response,
            "longest_response": work.longest,
            "dropped_groups": work.dropped,
        },
        "given": one(layout),
        "best": [one(best) for best in result.best],
        "refused": {why: list(names) for why, names in result.refused.items()},
    }
