"""Suggest, from a recorded run, the next best layout and split of the GPUs, and the interval of checkpoints."""

import statistics
from collections.abc import Iterator

from tepo_megatron.plan.calibration import MEASURED, RecordedRun, checkpoint_interval
from tepo_megatron.plan.search import LayoutCandidate, SearchResult
from tepo_megatron.plan.step import Predictor
from tepo_megatron.plan.whole_run import whole_run

_LEAST_GAIN = 0.05  # less is not worth another layout


def advice_lines(
    predictor: Predictor, run: RecordedRun, given: LayoutCandidate, found: SearchResult, gpu_hours_per_failure: float
) -> Iterator[str]:
    """Yield what was calibrated, and what to change."""
    assert given.step is not None and predictor.measured is not None
    factors = predictor.measured.factors
    words = [f"{name} {factors[phases[0]]:.3g}" for name, phases in MEASURED.items() if phases[0] in factors]
    yield f"calibrated with steps {run.steps[0]} to {run.steps[1]} of {run.path}; measured over predicted seconds:"
    yield f"  {', '.join(words)}; beyond the phases {predictor.measured.beyond:+.0%}"
    if predictor.cfg.platform == "cpu":
        yield "  platform cpu: ranks share cores, which the plan does not know; only layouts with as many ranks compare"
    yield from _layout_lines(given, found)
    yield from _checkpoint_lines(predictor, run, given.step.seconds, gpu_hours_per_failure)


def _layout_lines(given: LayoutCandidate, found: SearchResult) -> Iterator[str]:
    assert given.step is not None
    best = found.best[0] if found.best else given
    assert best.step is not None
    gain = best.step.tokens_per_second / given.step.tokens_per_second - 1
    if gain < _LEAST_GAIN:
        yield f"layout: no other one is predicted to train more than {_LEAST_GAIN:.0%} more tokens per second"
        return
    yield f"layout: {best.name} is predicted to train {gain:.0%} more tokens per second:"
    yield "  " + " ".join(f"--{key} {value}" for key, value in changed_keys(given, best))


def changed_keys(given: LayoutCandidate, other: LayoutCandidate) -> list[tuple[str, str]]:
    """Return the keys and values, as on the command line, with which one layout becomes another."""
    before, after = given.cfg, other.cfg
    pairs = [
        (f"parallel.{name}", getattr(before.parallel, name), getattr(after.parallel, name))
        for name in ("tp", "pp", "vpp", "cp", "ep", "dp", "sequence_parallel")
    ]
    pairs.append(("rollout.servers", before.rollout.servers, after.rollout.servers))
    pairs.append(("rollout.server.tp", before.rollout.server.tp, after.rollout.server.tp))
    name = "max_tokens_per_microbatch"
    pairs.append((f"training.{name}", getattr(before.training, name), getattr(after.training, name)))
    return [(key, str(new).lower()) for key, old, new in pairs if old != new]


def _checkpoint_lines(predictor: Predictor, run: RecordedRun, step: float, gpu_hours_per_failure: float) -> Iterator[str]:
    cfg = predictor.cfg
    blocked, how = whole_run(predictor, step).checkpoint, "predicted"
    if run.blocked:
        blocked, how = statistics.fmean(run.blocked), f"the mean of {len(run.blocked)} recorded ones"
    found = checkpoint_interval(blocked, step, cfg.checkpoint.every, predictor.placement.gpus, gpu_hours_per_failure)
    yield f"checkpoints: training waits {blocked:.2f} s for one ({how}); a failure is expected every {found.hours:.0f} h"
    now = "none are written" if found.lost_now is None else f"with {cfg.checkpoint.every}: {found.lost_now:.2%}"
    yield f"  --checkpoint.every {found.steps} loses the least time, {found.lost:.2%} ({now})"
