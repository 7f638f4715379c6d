"""The trace of a step of a real run has ranks, service, grading and server in it, and the phases cover the step."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tepo_megatron.launcher.trace_request import coverage, read_trace
from tepo_megatron.observability.trace_file import profile_path, trace_path
from tests.chrome import rows
from tests.e2e.conftest import ROOT

pytestmark = [pytest.mark.server, pytest.mark.e2e, pytest.mark.full]
BOUND = 240.0


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_trace_of_a_step_is_whole(tepo, arguments, base: Path, tmp_path: Path, engine: str) -> None:
    settings = {"training__steps": 40, "rollout__engine": engine, "logging__trace_every": 3, "evaluation__max_problems": 4}
    settings |= {"rollout__prompts_per_step": 8, "training__minibatch_prompts": 4}
    run, command = tmp_path / "runs" / "traced", tepo(*arguments(base, name="traced", **settings))
    command.until(lambda: trace_path(run, 3).exists(), timeout=BOUND)
    words = [sys.executable, "-m", "tepo_megatron", "trace", run, "--steps", "2", "--profile", "0", "--wait", "60"]
    asked = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert asked.returncode == 0, asked.stderr + command.output
    last = int(re.findall(r"trace of step (\d+): ", asked.stdout)[0])
    assert all(trace_path(run, step).exists() and profile_path(run, step, 0).exists() for step in (last - 1, last))
    trace = read_trace(trace_path(run, 3))
    found = rows(trace)
    server = next(process for process, row in found if row == "weights")
    requests = [s for (process, row), spans in found.items() if process == server and row.startswith("requests") for s in spans]
    names = {span["name"] for span in requests}
    assert names == ({"generate", "until it is read", "queue and prefill", "decode"} if engine == "vllm" else {"generate"})
    assert sum(span["name"] == "generate" for span in requests) == 8
    assert {"begin update", "load", "finish update"} <= {span["name"] for span in found[server, "weights"]}
    service = {row.rstrip(" 0123456789") for process, row in found if process == "rollout service"}
    assert {"requests", "grading", "calls of rank", "rollout_"} <= service
    instants = {e["name"] for e in trace["traceEvents"] if e["ph"] == "i"}
    assert {"weights of version 3", "weights of version 3 are served"} <= instants
    for rank in ("rank 0", "rank 1"):
        assert {s["name"] for s in found[rank, "main thread"]} >= {"wait", "update", "forward", "backward", "loss", "sync"}
        covered = coverage([*found[rank, "step"], *found[rank, "main thread"]])
        print(f"{engine}, {rank}: phases cover {covered:.1%} of {found[rank, 'step'][0]['dur'] / 1e6:.2f} s")
        assert covered is not None and covered >= 0.95
    chains = [e for e in trace["traceEvents"] if e["ph"] in "stf"]
    longest = max(sum(e["id"] == chain["id"] for e in chains) for chain in chains)
    assert longest >= 4, "request, server, grading, minibatch"
    command.process.terminate()
    assert command.wait(BOUND) in (1, 75, 130)
    command.assert_nothing_left()
