"""The trace of a step of real ranks: every process has its rows, on one clock, and a pipeline's passes are in their order."""

import gzip
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules

from tepo_megatron.base.save_requests import TRACE, TRACED, TraceRequest, ask_trace
from tepo_megatron.command.trace_request import coverage, read_trace
from tepo_megatron.monitor import run_dir
from tepo_megatron.monitor.trace_file import TRACES, profile_path, trace_path
from tepo_megatron.monitor.tracer import tracer
from tests.chrome import Event, named, rows
from tests.parallel import resume_worlds as w
from tests.worlds import run_world

SERVICE, MAIN, COLLECTIVES = "rollout service", "main thread", "collectives"
SAMPLES = 2


class Ask(w.Request):
    """A request to trace the next step, and to profile rank 1 in it."""

    def die(self, journal: Path, *args: Any) -> None:
        ask_trace(journal.parent / "run", TraceRequest(1, profile=1))


def shift(pid: int) -> int:
    """Return the ns by which the clock of a process is ahead of this machine's."""
    return pid % 1000 * 10**12


def rank_with_its_own_clock(rank: int, *args: Any) -> tuple[bool, bool]:
    """Be a rank. The service, a fork of rank 0, has a clock of its own, too. Return what is left of the tracing."""
    tracer.clock = lambda: time.monotonic_ns() + shift(os.getpid())
    before = dist.all_reduce, dist.Work.wait, schedules.backward_step
    w.run_rank(rank, *args)
    return before != (dist.all_reduce, dist.Work.wait, schedules.backward_step), tracer.active


def ends(span: Event) -> float:
    return float(span["ts"] + span["dur"])


def uncertainty(trace: Any) -> float:
    """Return the us by which times of two processes may be apart."""
    return max(p["clock_uncertainty_ns"] for p in trace["metadata"]["processes"].values()) / 1000


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of a run whose steps 2 (on request) and 3 are traced, and of the same run without traces."""
    folder = tmp_path_factory.mktemp("traces")
    model = w.write_inputs(folder / "model")
    sections = {
        "parallel": {"pp": 2},
        "rollout": {"prompts_per_step": 8, "samples_per_prompt": SAMPLES},
        "training": {"steps": 3, "max_tokens_per_microbatch": 32, "minibatch_prompts": 8},
        "evaluation": {"every": 0},
        "export_hf": False,
    }
    traced = w.run_config(model, folder / "traced", logging={"trace_every": 3}, **sections)
    plain = w.run_config(model, folder / "plain", **sections)
    run_dir.prepare(traced)
    asking = Ask("tepo_megatron.trainer.schedule:Schedule.next_parts")  # on rank 0, in step 1
    assert run_world(2, rank_with_its_own_clock, traced, folder / "traced" / "journal", 0, asking) == [(False, False)] * 2
    w.attempt(plain, folder / "plain" / "journal")
    return traced.run_dir, plain.run_dir


def test_a_trace_has_all_processes_on_one_clock(runs: tuple[Path, Path]) -> None:
    trace = read_trace(trace_path(runs[0], 3))
    found, known = rows(trace), trace["metadata"]["processes"]
    assert list(known) == [SERVICE, "rank 0", "rank 1"] and trace["metadata"]["step"] == 3
    assert {(p, MAIN) for p in ("rank 0", "rank 1")} | {(p, COLLECTIVES) for p in ("rank 0", "rank 1")} < found.keys()
    here = known[SERVICE]["pid"]
    for process in known.values():
        error = process["clock_offset_ns"] - (shift(here) - shift(process["pid"]))
        assert abs(error) <= process["clock_uncertainty_ns"]
    for rank in ("rank 0", "rank 1"):
        (step,) = found[rank, "step"]
        assert [s["name"] for s in found[rank, MAIN] if s["name"] in ("wait", "old_stats", "update", "sync", "log")] == [
            "wait", "sync", "old_stats", "update", "sync", "log",
        ]  # fmt: skip
        assert coverage([*found[rank, "step"], *found[rank, MAIN]]) > 0.8 and step["name"] == "step 3"
    (step,), (waiting,) = found["rank 0", "step"], named(trace, "rank 0", MAIN, "wait")
    begin, end = step["ts"] - uncertainty(trace), ends(waiting) + uncertainty(trace)
    (collect,) = (s for s in found[SERVICE, "calls of rank 0"] if s["name"] == "collect")
    grades = [s for (process, row), spans in found.items() if row.startswith("grading") for s in spans]
    assert grades and all(begin <= collect["ts"] <= s["ts"] and ends(s) <= end for s in grades)
    assert [e["name"] for e in trace["traceEvents"] if e["ph"] == "i"] == ["weights of version 3 are served"] * 2
    # An arrow ends in the minibatch, or at the last grade of a prompt that was sampled twice and is not trained on: which ones
    # these are depends on the bits of the weights.
    arrows = [e for e in trace["traceEvents"] if e["ph"] == "f"]
    (minibatch,) = named(trace, "rank 0", MAIN, "minibatch")
    trained = [e for e in arrows if e["pid"] == minibatch["pid"]]
    assert trained and all(minibatch["ts"] <= e["ts"] <= ends(minibatch) for e in trained)
    assert len(trained) * SAMPLES == minibatch["args"]["rollouts"]
    again = {e["name"] for e in arrows} - {e["name"] for e in trained}
    of_grades = Counter(f"group {s['args']['prompt']}" for s in grades)
    assert again == {group for group, count in of_grades.items() if count > 1} - {e["name"] for e in trained}


def test_a_step_is_traced_on_request_and_one_rank_is_profiled(runs: tuple[Path, Path]) -> None:
    run = runs[0]
    names = {path.name for path in (run / TRACES).iterdir()}
    assert names == {"step-000002.json.gz", "step-000003.json.gz", "step-000002-rank1-profile.json.gz"}
    assert not (run / TRACE).exists() and (run / TRACED).read_text() == (
        f"trace of step 2: {trace_path(run, 2)}; open it in ui.perfetto.dev"
    )
    profile = json.loads(gzip.decompress(profile_path(run, 2, 1).read_bytes()))
    assert sum(event.get("name") == "aten::mm" for event in profile["traceEvents"]) > 10


def test_traces_change_no_number(runs: tuple[Path, Path]) -> None:
    traced, plain = (w.records(run) for run in runs)
    assert traced == plain and len(plain) == 3
    assert not (runs[1] / TRACES).exists()
