"""Part `loop`: the whole loop on one card. `tepo train` with `rollout.engine: torch` on the demo's base model.

Trainer and server share the card and take turns. Next to the rewards are those of the same seeds on a CPU in fp32
(`benchmarks/results/gpu/loop_cpu.json`), which other rounding soon makes another sample of the same curve.
"""

import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.check.lines import Check, Skip, Status
from benchmarks.gpu.check.parts import LOOP_LINES
from benchmarks.results import ROOT
from tepo_megatron.monitor.sinks import read_metrics

MODEL = ROOT / ".cache/demo/seed-0"
CPU_CURVE = ROOT / "benchmarks/results/gpu/loop_cpu.json"
STEPS = {"cpu": 2, "cuda": 20}
LEAST_GAIN = {"cpu": -math.inf, "cuda": 10.0}  # standard errors
SHOWN = (1, 5, 10, 15, 20)  # steps
END_SECONDS = 3.0  # of the task's time, for what comes after the run
TRANSPORT = {"cpu": "shm", "cuda": "ipc"}
KEYS = {
    "rollout.engine": "torch", "rollout.colocate": "true", "rollout.server.kv_cache_gib": "8", "model.precision": "bf16",
    "parallel.tp": "1", "sync.verify_every": "1", "sync.max_logprob_diff": "0.05", "overwrite": "true", "name": "loop",
}  # fmt: skip


def run(check: Check) -> None:
    """Train, and report what the run's files say."""
    with check.line(*LOOP_LINES):
        if not (MODEL / "config.json").exists():
            raise Skip(f"no base model: run `make demo` here, or copy its {MODEL.relative_to(ROOT)}")
        steps = STEPS[check.platform]
        keys = KEYS | {
            "platform": check.platform, "sync.transport": TRANSPORT[check.platform], "training.steps": str(steps),
            "output": str(check.folder),
        }  # fmt: skip
        words = [sys.executable, "-m", "tepo_megatron", "train", "examples/demo.yaml"]
        words += [word for key, value in keys.items() for word in (f"--{key}", value)]
        done = subprocess.run(words, cwd=ROOT, stdin=subprocess.DEVNULL, timeout=check.left - END_SECONDS, check=False)
        if done.returncode:
            raise RuntimeError(f"the run ended with exit status {done.returncode}")
        _report(check, check.folder / "loop", steps)


def _report(check: Check, run_dir: Path, steps: int) -> None:
    """Report accuracy, rewards, seconds and the difference of log-probs."""
    summary = json.loads((run_dir / "summary.json").read_text())
    records: list[dict[str, Any]] = read_metrics(run_dir)
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    error = sum(x**2 for x in summary["standard_error"].values()) ** 0.5
    gain = (after - before) / error if error else 0.0
    why = f"{gain:.1f} standard errors above the {before:.3f} before; {steps} steps in {summary['seconds']:.0f} s"
    least = LEAST_GAIN[check.platform]
    status: Status = "passed" if gain >= least else "failed"
    check.report(LOOP_LINES[0], status, after, why=f"{why}; at least {least:g}", before=before, gain=gain)
    rewards, cpu = ([r["reward/mean"] for r in found] for found in (records, json.loads(CPU_CURVE.read_text())))
    pairs = ", ".join(f"{rewards[i - 1]:.2f} ({cpu[i - 1]:.2f})" for i in SHOWN if i <= len(rewards))
    check.report(LOOP_LINES[1], "measured", rewards[-1], why=f"steps {SHOWN}, on a CPU in brackets: {pairs}", rewards=rewards)
    seconds = {
        key: statistics.median(r[f"seconds/{key}"] for r in records[1:])
        for key in ("rollout", "old_stats", "update", "sync", "total")
    }
    parts = ", ".join(f"{key} {value:.2g}" for key, value in seconds.items() if key != "total")
    check.report(
        LOOP_LINES[2], "measured", seconds["total"], "s", f"median; {parts}; the first {records[0]['seconds/total']:.2g}"
    )
    means, largest = ([r[f"rollout/logprob_diff_{x}"] for r in records] for x in ("mean", "max"))
    why = f"of engine and actor, median of the steps' means; the largest of a token {max(largest):.2g}"
    check.report(LOOP_LINES[3], "measured", statistics.median(means), "nats", why)
