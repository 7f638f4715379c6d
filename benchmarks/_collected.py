"""Turn the results of whole-job benchmarks into measures: training step, conversion, saving, sync, overlap, shared prompts."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.results import OURS, ROOT, Measure, Target, load


def step(quick: bool) -> list[Measure]:
    """Measure row 7: the demo's training step next to the fastest plain form, by threads. TP2 has no target."""
    from benchmarks import step as benchmark

    found = benchmark.measure(quick=quick)
    out = []
    for name, ratio in found["ratio"].items():  # key "tp1 2 threads"; value: seconds / seconds of the fastest plain form
        seconds = found["seconds"][name if name in found["seconds"] else name.replace("2 threads", "1 threads")]
        targets = (Target("ours / plain", "<=", benchmark.TARGET),) if name.startswith("tp1") else ()
        more = {"seconds": found["seconds"], "disagreement": found["disagreement"], "repetitions": found["repetitions"]}
        peers = {"plain": seconds[0] / ratio}
        what = name.replace("tp", "TP").replace(" ", ", ", 1).replace("1 threads", "1 thread")
        out.append(Measure(7, f"demo, {what}", "s", seconds[0], peers, targets, more=more))
    return out


def convert(quick: bool, repetitions: int = 3) -> list[Measure]:
    """Measure row 10: the speed of import and export relative to copying the same files, and their peak memory."""
    from benchmarks import convert as benchmark

    config = benchmark.QUICK if quick else benchmark.CONFIG
    with tempfile.TemporaryDirectory(prefix="convert-") as name:
        source = Path(name) / "hf"
        again = [sys.executable, str(ROOT / "benchmarks/convert.py"), "--make", str(source), *(["--quick"] if quick else [])]
        subprocess.run(again, check=True)  # in a process of its own, so that its memory is not counted
        size = sum(path.stat().st_size for path in source.iterdir())
        runs = benchmark.measure(source, Path(name), 1 if quick else repetitions)
        bound = (benchmark.largest_group(source, config) + benchmark.TARGET_MEMORY) / 2**30
    out = []
    for job in ("import", "export"):
        # paired by round, because the disk's speed changes between rounds
        share = statistics.median(c.seconds / r.seconds for c, r in zip(runs["copy"], runs[job], strict=True))
        what, more = f"{job} of {size / 1e9:.3g} GB", {"seconds": {k: [run.seconds for run in v] for k, v in runs.items()}}
        speed = () if quick else (Target(OURS, ">=", benchmark.TARGET_SPEED),)
        out.append(Measure(10, f"{what}, speed", "of copying", share, {}, speed, higher_is_better=True, more=more))
        peak = max(run.peak for run in runs[job]) / 2**30
        out.append(Measure(10, f"{what}, peak memory", "GiB", peak, {}, (Target(OURS, "<=", round(bound, 2)),)))
    return out


def checkpoint(quick: bool) -> list[Measure]:
    """Measure row 11: seconds for which a save blocks training, next to plain copies of the state to host memory.

    The target is the copy into memory that is allocated already, which a save has too. The copy into fresh memory is reported.
    """
    out = []
    for model, saves in {"demo": 2}.items() if quick else {"demo": 41, "100m": 6}.items():
        found = _run("checkpoint", "--model", model, "--saves", str(saves))
        # the first save describes the state and allocates memory; it is reported but not in the medians
        medians = {k: statistics.median(s[k] for s in found[1:]) for k in ("blocked", "kept", "fresh", "complete")}
        peers = {"plain copy": medians["kept"], "plain copy, fresh": medians["fresh"]}
        targets = (Target("ours / plain copy", "<=", 1.0),)
        more = {"saves": found, "complete": medians["complete"]}
        name = f"training waits, {model} model, median after the first"
        out.append(Measure(11, name, "s", medians["blocked"], peers, targets, more=more))
    return out


def sync(quick: bool) -> list[Measure]:
    """Measure row 12: seconds of gather and transport next to a copy of the bytes, and seconds with the engine loading."""
    from benchmarks import sync as benchmark

    out = []
    for transport, target in {"shm": 3.0}.items() if quick else benchmark.TARGETS.items():
        found = _run("sync", "--transport", transport, *(["--quick", "--engines", "vllm", "--pushes", "1"] if quick else []))
        for engine, seconds in found.items():
            targets = (Target("ours / copy", "<=", target),)
            name = f"{transport}, {engine}"
            out.append(
                Measure(12, f"{name}: gather and transport", "s", seconds["transport"], {"copy": seconds["copy"]}, targets)
            )
            out.append(Measure(12, f"{name}: all, with the engine loading", "s", seconds["total"], {"copy": seconds["copy"]}))
    return out


def overlap(quick: bool) -> list[Measure]:
    """Measure row 13: seconds of a step with rollouts one step ahead, next to the longer of its phases plus the sync."""
    name = "one step ahead, a core for each"
    if quick:
        return [Measure(13, name, "s", None, why="two runs of the demo are not quick")]
    from benchmarks import overlap as benchmark

    found = _run("overlap")
    ahead, in_turn = found["one step ahead"], found["in turn"]
    peers = {"longer phase + sync": benchmark.longest(ahead), "in turn": in_turn["step"]}
    targets = (Target("ours / longer phase + sync", "<=", benchmark.TARGET),)
    return [Measure(13, name, "s", ahead["step"], peers, targets, more=found)]


PREFIX = {"medium": 3, "small": 7}  # repetitions, after a warm-up; `long` takes minutes: python -m benchmarks.prefix


def prefix(quick: bool) -> list[Measure]:
    """Measure row 14: seconds of a step whose responses share prompts, next to the same step without sharing."""
    out = []
    for case, repetitions in PREFIX.items():
        words = ["--quick", "--repetitions", "1"] if quick else ["--repetitions", str(repetitions)]
        (found,) = _run("prefix", "--cases", case, *words)
        seconds, keys = found["seconds"], ("cpu_seconds", "faster", "faster_cpu", "tokens", "load")
        more = {key: found[key] for key in keys} | {"threads": 2}
        out.append(Measure(14, f"{case}, 2 threads", "s", seconds["shared"], {"not shared": seconds["plain"]}, more=more))
    return out + prefix_tokens()


def prefix_tokens() -> list[Measure]:
    """Return the tokens that each side computes; every run of the benchmark compares its own count with them."""
    from benchmarks import prefix as benchmark

    found = {case: benchmark.computed_tokens(benchmark.CASES[case]) for case in ("long", *PREFIX)}
    return [
        Measure(14, f"{case}, tokens computed", "", tokens["shared"], {"not shared": tokens["plain"]}, deterministic=True)
        for case, tokens in found.items()
    ]


def controller(quick: bool) -> list[Measure]:
    """Measure row 15: what the engine client costs per token, and counts of bytes, wake-ups and connections."""
    from benchmarks.controller.engine_rows import counted, intake
    from benchmarks.controller.fake_pool import BINARY
    from benchmarks.controller.parts import CPU_BINARY, CPU_JSON

    out = []
    for kind, most in [("json", CPU_JSON), (BINARY, CPU_BINARY)]:
        (point,) = intake([0.1 if quick else 1.0], kind)
        cost, targets = point.cpu_seconds / point.size, (Target(OURS, "<=", most),)
        out.append(Measure(15, f"intake of a million tokens, {kind}", "CPU s", cost, {}, targets))
        found = counted(answer_format=kind)
        more = {"tokens": found["tokens"], "servers": 8}
        # the requests alone decide the answers, and timing the other counts
        out.append(Measure(15, f"bytes per token, {kind}", "B", found["bytes per token"], deterministic=True, more=more))
        names = ("wake-ups per request", "connections at once", "connections opened")
        out += [Measure(15, f"{name}, {kind}", "", found[name], more=more) for name in names]
    return out


def mechanisms(quick: bool) -> list[Measure]:
    """Measure row 16: how far the 95 % interval of each predicted effect is above 0."""
    found = _run("mechanisms", *(["--quick", "--seeds", "0,1"] if quick else []))
    out = []
    for x in found["predictions"]:
        measure = x["larger"][1]
        unit = "nats" if measure.startswith(("entropy", "KL")) else ""
        more = {key: x[key] for key in ("larger", "smaller", "factor", "effect", "interval", "verdict")}
        out.append(
            Measure(16, f"{x['claim']} ({x['regime']})", unit, x["interval"][0], {}, (Target(OURS, ">=", 0),), more=more)
        )
    return out


def _run(benchmark: str, *words: str) -> Any:
    """Run a benchmark in a process of its own with one thread; return what it wrote to its --json file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{benchmark}", *words, "--json", str(path)]
        subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=sys.stderr)
        return load(path)
