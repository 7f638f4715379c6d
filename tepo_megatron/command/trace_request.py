"""`tepo trace`: ask a run for a trace of its next steps, or merge and describe the trace of a step that was traced."""

import gzip
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tepo_megatron.base.errors import ConfigError, DataError
from tepo_megatron.base.run_lock import is_under_way
from tepo_megatron.base.save_requests import TRACED, TraceRequest, ask_trace
from tepo_megatron.config.io import load_config
from tepo_megatron.monitor.trace_file import merge, step_folder, trace_path

_POLL_SECONDS = 0.5


def trace(run_dir: Path, request: TraceRequest, seconds: float) -> str:
    """Ask a run to trace its next steps, and wait for the last trace. Return the run's answer.

    Args:
        seconds: Limit of the wait. The request remains after it.
    Raises:
        ConfigError: The request fits no run in the folder, nothing is under way there, or it ended or did not answer in time.
    """
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{run_dir}: no config.yaml; give the folder of a run, runs/NAME")
    ranks = load_config(run_dir / "config.yaml").parallel.world_size
    if request.steps < 1:
        raise ConfigError(f"--steps {request.steps}: a positive number of steps")
    if request.profile is not None and not 0 <= request.profile < ranks:
        raise ConfigError(f"--profile {request.profile}: the run has {ranks} ranks; give one of 0 to {ranks - 1}")
    _check_under_way(run_dir)
    ask_trace(run_dir, request)
    until = time.monotonic() + seconds
    while not (run_dir / TRACED).exists():
        if time.monotonic() > until:
            raise ConfigError(f"no answer within {seconds:g} s; the steps are traced nevertheless, into {run_dir / 'traces'}")
        time.sleep(_POLL_SECONDS)
        _check_under_way(run_dir)
    text = (run_dir / TRACED).read_text()
    if text.startswith("refused"):
        raise ConfigError(f"{run_dir}: {text}")
    return text


def _check_under_way(run_dir: Path) -> None:
    if not is_under_way(run_dir) and not (run_dir / TRACED).exists():
        raise ConfigError(f"{run_dir}: no run is under way in this folder; start it, or give --step for a step that was traced")


def describe_step(run_dir: Path, step: int) -> Iterator[str]:
    """Yield lines that describe the trace of a step, after merging what its processes left. Raises DataError if the step was
    not traced, or its files are damaged.
    """
    path = trace_path(run_dir, step)
    if step_folder(run_dir, step).exists():
        path, _ = merge(run_dir, step)
    yield str(path)
    yield from describe(read_trace(path))


def read_trace(path: Path) -> dict[str, Any]:
    """Return a merged trace. Raises DataError if it is missing or damaged."""
    try:
        trace = json.loads(gzip.decompress(path.read_bytes()))
    except FileNotFoundError:
        others = ", ".join(sorted(p.name for p in path.parent.glob("step-*.json.gz"))) or "none"
        raise DataError(f"{path}: this step was not traced; traces in this folder: {others}") from None
    except (OSError, EOFError, ValueError) as e:
        raise DataError(f"{path}: not a trace ({e}); trace the step again") from None
    if not isinstance(trace, dict) or not {"traceEvents", "metadata"} <= trace.keys():
        raise DataError(f"{path}: a trace of another program; open it in ui.perfetto.dev")
    return trace


def describe(trace: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each process of a trace: its spans, its clock, and for ranks the share of the step that phases cover."""
    events, known = trace["traceEvents"], trace["metadata"]["processes"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    of: dict[int, list[Mapping[str, Any]]] = {pid: [] for pid in names}
    for event in events:
        if event["ph"] == "X":
            of[event["pid"]].append(event)
    for pid, name in names.items():
        spans = of[pid]
        words = [f"{name}: {len(spans)} spans"]
        if name in known:
            words.append(f"clock +- {known[name]['clock_uncertainty_ns'] / 1e6:.3f} ms")
            if dropped := known[name]["dropped_spans"]:
                words.append(f"{dropped} dropped")
        if (share := coverage(spans)) is not None:
            words.append(f"phases cover {share:.1%} of the step")
        yield ", ".join(words)


def coverage(spans: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the share of a step that the spans of the rank's main thread cover; None if the spans are not those of a rank."""
    steps = [span for span in spans if span["cat"] == "step"]
    if not steps:
        return None
    begun, covered = steps[0]["ts"], 0.0
    counted_to, end = begun, begun + steps[0]["dur"]
    for span in spans:
        if span["cat"] == "main thread":
            until = min(end, span["ts"] + span["dur"])
            covered += max(0.0, until - max(counted_to, span["ts"]))
            counted_to = max(counted_to, until)
    return covered / steps[0]["dur"] if steps[0]["dur"] else None
