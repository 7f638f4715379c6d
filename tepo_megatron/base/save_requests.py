"""Requests to save a checkpoint, or to trace a step: files in a run's folder. Whoever may write there may make one.

    save.request      save a checkpoint after the running step, and go on
    stop.request      save a checkpoint as soon as possible, and end the run
    stop.done         the answer to stop.request: the checkpoint is complete and the run ends
    trace.request     trace the next step. It holds a `TraceRequest` as JSON, or nothing
    trace.done        the answer to trace.request, as text for the user

Rank 0's machine looks for them, so a client of NFS elsewhere may be noticed up to a minute later. A start removes what is left.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tepo_megatron.base.storage import replace_file

SAVE, STOP, STOPPED, TRACE, TRACED = "save.request", "stop.request", "stop.done", "trace.request", "trace.done"
FILES = (SAVE, STOP, STOPPED, TRACE, TRACED)
LOOK_SECONDS = 1.0  # interval at which a run looks for a request while it waits


def ask(run_dir: Path, name: str) -> None:
    """Make a request."""
    (run_dir / name).touch()


def asked(run_dir: Path, name: str) -> bool:
    """Return whether there is a request."""
    return (run_dir / name).exists()


def take_save(run_dir: Path) -> bool:
    """Return whether there was a request to save; it is removed."""
    try:
        (run_dir / SAVE).unlink()
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class TraceRequest:
    """A request to trace steps. `profile`: rank that torch's profiler records, too. None: none."""

    steps: int = 1
    profile: int | None = None


def ask_trace(run_dir: Path, request: TraceRequest) -> None:
    """Ask a run to trace its next steps."""
    (run_dir / TRACED).unlink(missing_ok=True)
    replace_file(run_dir / TRACE, json.dumps(asdict(request)).encode(), durable=False)


def take_trace(run_dir: Path) -> TraceRequest | None:
    """Return the request to trace, which is removed; None without one. A request that cannot be read is answered at once."""
    path = run_dir / TRACE
    try:
        text = path.read_text()
        path.unlink()
    except OSError:
        return None
    try:
        request = TraceRequest(**json.loads(text or "{}"))
        profile = 0 if request.profile is None else request.profile
        if type(request.steps) is int and type(profile) is int and request.steps > 0 <= profile:
            return request
    except (ValueError, TypeError):
        pass
    answer_trace(run_dir, f'refused: {TRACE} must hold nothing, or JSON like {{"steps": 1, "profile": 0}}')
    return None


def answer_trace(run_dir: Path, text: str) -> None:
    """Answer the request to trace."""
    replace_file(run_dir / TRACED, text.encode(), durable=False)


def answer_stop(run_dir: Path) -> None:
    """Replace the request to end by its answer."""
    (run_dir / STOPPED).touch()
    (run_dir / STOP).unlink(missing_ok=True)


def clear(run_dir: Path) -> None:
    """Remove all requests and answers, because they were made to an earlier start."""
    for name in FILES:
        (run_dir / name).unlink(missing_ok=True)
