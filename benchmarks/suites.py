"""Map the rows of the table to the code that measures them. A suite has a process of its own, because it may set threads, fork
and use memory.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results import OURS, ROOT, ROWS, Measure, Target, load


@dataclass(frozen=True)
class SuiteOptions:
    """Options of all suites."""

    peers: Path | None = None
    quick: bool = False
    rows: Set[int] = frozenset(ROWS)


@dataclass(frozen=True)
class Suite:
    """One suite.

    Attributes:
        environment: Environment of its process, for what is read when torch is loaded.
    """

    rows: tuple[int, ...]
    run: Callable[[SuiteOptions], list[Measure]]
    environment: Mapping[str, str] = field(default_factory=dict)


def _token_stats(options: SuiteOptions) -> list[Measure]:
    from benchmarks import token_stats

    return token_stats.measure(options.peers, options.quick, rows=options.rows)


def _layouts(options: SuiteOptions) -> list[Measure]:
    from benchmarks import layouts

    return layouts.measure(options.peers)


def _packing(options: SuiteOptions) -> list[Measure]:
    from benchmarks import packing

    return packing.measures(2 if options.quick else packing.SEEDS)


def _step(options: SuiteOptions) -> list[Measure]:
    """Measure the demo's training step next to the fastest plain form, by threads. TP2 has no target."""
    from benchmarks import step as benchmark

    found = benchmark.measure(quick=options.quick)
    out = []
    for name, ratio in found["ratio"].items():  # key "tp1 2 threads"; value: seconds / seconds of the fastest plain form
        seconds = found["seconds"][name if name in found["seconds"] else name.replace("2 threads", "1 threads")]
        targets = (Target("ours / plain", "<=", benchmark.TARGET),) if name.startswith("tp1") else ()
        more = {"seconds": found["seconds"], "disagreement": found["disagreement"], "repetitions": found["repetitions"]}
        what = name.replace("tp", "TP").replace(" ", ", ", 1).replace("1 threads", "1 thread")
        out.append(Measure(7, f"demo, {what}", "s", seconds[0], {"plain": seconds[0] / ratio}, targets, more=more))
    return out


def _convert(options: SuiteOptions) -> list[Measure]:
    """Measure the speed of import and export relative to copying the same files, and their peak memory."""
    from benchmarks import convert as benchmark

    config = benchmark.QUICK if options.quick else benchmark.CONFIG
    with tempfile.TemporaryDirectory(prefix="convert-") as name:
        source = Path(name) / "hf"
        words = [sys.executable, str(ROOT / "benchmarks/convert.py"), "--make", str(source)]
        subprocess.run([*words, *(["--quick"] if options.quick else [])], check=True)  # its memory is not counted here
        size = sum(path.stat().st_size for path in source.iterdir())
        runs = benchmark.measure(source, Path(name), 1 if options.quick else 3)
        bound = (benchmark.largest_group(source, config) + benchmark.TARGET_MEMORY) / 2**30
    out = []
    for job in ("import", "export"):
        # paired by round, because the disk's speed changes between rounds
        share = statistics.median(c.seconds / r.seconds for c, r in zip(runs["copy"], runs[job], strict=True))
        what, more = f"{job} of {size / 1e9:.3g} GB", {"seconds": {k: [run.seconds for run in v] for k, v in runs.items()}}
        speed = () if options.quick else (Target(OURS, ">=", benchmark.TARGET_SPEED),)
        out.append(Measure(10, f"{what}, speed", "of copying", share, {}, speed, higher_is_better=True, more=more))
        peak = max(run.peak for run in runs[job]) / 2**30
        out.append(Measure(10, f"{what}, peak memory", "GiB", peak, {}, (Target(OURS, "<=", round(bound, 2)),)))
    return out


def _checkpoint(options: SuiteOptions) -> list[Measure]:
    """Measure the seconds for which a save blocks training, next to plain copies of the state to host memory.

    The target is the copy into memory that is allocated already, which a save has too. The copy into fresh memory is reported.
    """
    out = []
    for model, saves in {"demo": 2}.items() if options.quick else {"demo": 41, "100m": 6}.items():
        found = _run("checkpoint", "--model", model, "--saves", str(saves))
        # the first save describes the state and allocates memory; it is reported but not in the medians
        medians = {k: statistics.median(s[k] for s in found[1:]) for k in ("blocked", "kept", "fresh", "complete")}
        peers = {"plain copy": medians["kept"], "plain copy, fresh": medians["fresh"]}
        more = {"saves": found, "complete": medians["complete"]}
        name = f"training waits, {model} model, median after the first"
        target = (Target("ours / plain copy", "<=", 1.0),)
        out.append(Measure(11, name, "s", medians["blocked"], peers, target, more=more))
    return out


def _sync(options: SuiteOptions) -> list[Measure]:
    """Measure the seconds of gather and transport next to a copy of the bytes, and those with the engine loading."""
    from benchmarks import sync as benchmark

    out = []
    words = ["--quick", "--engines", "vllm", "--pushes", "1"] if options.quick else []
    for transport, target in {"shm": 3.0}.items() if options.quick else benchmark.TARGETS.items():
        for engine, seconds in _run("sync", "--transport", transport, *words).items():
            copy, name = {"copy": seconds["copy"]}, f"{transport}, {engine}"
            targets = (Target("ours / copy", "<=", target),)
            out.append(Measure(12, f"{name}: gather and transport", "s", seconds["transport"], copy, targets))
            out.append(Measure(12, f"{name}: all, with the engine loading", "s", seconds["total"], copy))
    return out


def _overlap(options: SuiteOptions) -> list[Measure]:
    """Measure the seconds of a step with rollouts one step ahead, next to the longer of its phases plus the sync."""
    name = "one step ahead, a core for each"
    if options.quick:
        return [Measure(13, name, "s", None, why="not measured: two runs of the demo are not quick")]
    from benchmarks import overlap as benchmark

    found = _run("overlap")
    ahead, in_turn = found["one step ahead"], found["in turn"]
    peers = {"longer phase + sync": benchmark.longest(ahead), "in turn": in_turn["step"]}
    targets = (Target("ours / longer phase + sync", "<=", benchmark.TARGET),)
    return [Measure(13, name, "s", ahead["step"], peers, targets, more=found)]


def _controller(options: SuiteOptions) -> list[Measure]:
    """Measure what the engine client costs per token, and count bytes and connections."""
    from benchmarks.controller.engine_rows import CPU_TARGETS, counted, intake

    out = []
    for kind, most in CPU_TARGETS.items():
        (point,) = intake([0.1 if options.quick else 1.0], kind)
        cost, targets = point.cpu_seconds / point.size, (Target(OURS, "<=", most),)
        out.append(Measure(15, f"intake of a million tokens, {kind}", "CPU s", cost, {}, targets))
        found = counted(answer_format=kind)
        more = {"tokens": found["tokens"], "servers": 8}
        # the requests alone decide the answers, and timing the other counts
        out.append(Measure(15, f"bytes per token, {kind}", "B", found["bytes per token"], deterministic=True, more=more))
        names = ("connections at once", "connections opened")
        out += [Measure(15, f"{name}, {kind}", "", found[name], more=more) for name in names]
    return out


def _mechanisms(options: SuiteOptions) -> list[Measure]:
    """Measure how far the 95 % interval of each predicted effect is above 0."""
    out = []
    for x in _run("mechanisms", *(["--quick", "--seeds", "0,1"] if options.quick else []))["predictions"]:
        unit = "nats" if x["larger"][1].startswith(("entropy", "KL")) else ""
        more = {key: x[key] for key in ("larger", "smaller", "factor", "effect", "interval", "verdict")}
        name = f"{x['claim']} ({x['regime']})"
        out.append(Measure(16, name, unit, x["interval"][0], {}, (Target(OURS, ">=", 0),), more=more))
    return out


def _run(benchmark: str, *words: str) -> Any:
    """Run a benchmark in a process of its own with one thread; return what it wrote to its --json file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{benchmark}", *words, "--json", str(path)]
        subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=sys.stderr)
        return load(path)


# waiting threads sleep: on a busy machine, spinning threads would make the times depend on other processes
_PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "KINETO_LOG_LEVEL": "99"}
# one thread before and after a fork, as in tests/conftest.py; without the flag verl would compile in each rank
_FORKS = _PASSIVE | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}

SUITES = {
    "token_stats": Suite((1, 2, 3), _token_stats, _PASSIVE),
    "layouts": Suite((4,), _layouts, _FORKS),
    "packing": Suite((6,), _packing),
    "step": Suite((7,), _step, _PASSIVE),
    "convert": Suite((10,), _convert),
    "checkpoint": Suite((11,), _checkpoint, {"OMP_NUM_THREADS": "1"}),
    "sync": Suite((12,), _sync, {"OMP_NUM_THREADS": "1"}),
    "overlap": Suite((13,), _overlap),
    "controller": Suite((15,), _controller, _FORKS),
    "mechanisms": Suite((16,), _mechanisms, {"OMP_NUM_THREADS": "1"}),
}
