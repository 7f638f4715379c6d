"""Run real engines on machines that fail: out of memory, disks, a clock that jumps, limits.

    python -m tests.harness.hurt --out FILE [--minutes 60] [--only "slow disk"]

Every trial, a fault of `tests/hurts.py` in a run of one of WAYS, is one JSON line in FILE; a trial that FILE holds already is
skipped, so that the command can be interrupted and called again. The first trials apply every fault to SGLang, to vLLM, to a
colocated run and over the transports group and ipc. A trial fails unless the run continues, or ends with one message and is
resumed; unless all its metrics and weights equal those of an undisturbed run of the same engine (disaggregated, over shm), bit
for bit; and unless no process, no file in TMPDIR or shared memory, and no unfinished file is left.

Takes root and Linux. /dev/shm is a file system of the harness alone.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import json
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.results import commit
from tests.e2e.conftest import Command, commands, settings
from tests.harness.chaos import LEFT_SECONDS, RUN, STEPS, left_behind, lives, own_shared_memory, write_inputs
from tests.hurts import OF_ALL, OF_REAL_ENGINES, Runs

BOUND = 600.0  # seconds of each wait, on machines that do other work too
PR_SET_CHILD_SUBREAPER = 36
HURTS = OF_REAL_ENGINES | OF_ALL
# name -> settings
WAYS: dict[str, dict[str, Any]] = {
    "sglang group": {"rollout__engine": "sglang", "sync__transport": "group"},
    "vllm ipc colocated": {"rollout__engine": "vllm", "sync__transport": "ipc", "rollout__colocate": "true"},
    "vllm group": {"rollout__engine": "vllm", "sync__transport": "group"},
    "sglang ipc colocated": {"rollout__engine": "sglang", "sync__transport": "ipc", "rollout__colocate": "true"},
    "vllm shm": {"rollout__engine": "vllm", "sync__transport": "shm"},
    "sglang shm colocated": {"rollout__engine": "sglang", "sync__transport": "shm", "rollout__colocate": "true"},
    "sglang shm": {"rollout__engine": "sglang", "sync__transport": "shm"},
}
COVERING = 2  # the first ones have both engines, colocation, group and ipc
# takes more memory with each answer, so that the kernel kills this grader
_SCORE = """
kept = []

def score(prompt, response, answer):
    kept.append(b"x" * 2**18)
    return float(sum(map(ord, response)) % 2)
"""
_KEYS = RUN | {
    "reward__workers": 1, "rollout__prompts_per_step": 4, "evaluation__max_problems": 4, "rollout__server__ready_seconds": 1800,
    "rollout__server__heartbeat_timeout": 120, "rollout__server__restarts": 3,
}  # fmt: skip


@dataclass
class Trial:
    """One line of the output."""

    hurt: str
    way: str
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    commit: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Fault and kind of run, which identify the trial."""
        return self.hurt, self.way


def trials() -> list[Trial]:
    """Return all trials: every fault with the kinds of runs that cover all, then each with one of the others in turn."""
    ways = list(WAYS)
    found = [Trial(hurt, way) for hurt in HURTS for way in ways[:COVERING]]
    others = ways[COVERING:]
    return found + [Trial(hurt, others[i % len(others)]) for i, hurt in enumerate(HURTS)]


class Bench:
    """Folders of the runs, and the undisturbed run of each engine."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model, self.temporary = folder, folder / "model", folder / "t"
        write_inputs(self.model)
        (self.model / "score.py").write_text(_SCORE)
        self._straight: dict[str, Path] = {}

    def words(self, way: str, output: Path, name: str, **more: Any) -> list[str]:
        """Return the command line of a run.

        Args:
            way: A name in WAYS.
            output: Parent of the run's folder.
            name: Name of the run.
            more: Further config keys.
        """
        score = [{"type": "custom", "function": f"{self.model / 'score.py'}:score"}]
        keys = _KEYS | WAYS[way] | {"reward__terms": json.dumps(score), "output": output, "name": name} | more
        return ["train", "examples/demo.yaml", *settings(self.model, **keys)]

    def start(self, start: Any, *words: str, env: dict[str, str] | None = None, **how: Any) -> Command:
        """Start a run of this checkout, with a TMPDIR of its own in which it may leave nothing.

        Args:
            start: See `tests.e2e.conftest.commands`.
            words: Command line of the run.
            env: Further environment variables.
            how: Further arguments of `start`.
        """
        self.temporary.mkdir(exist_ok=True)
        how["by"] = how.get("by") or [sys.executable]
        command: Command = start(*words, env={"TMPDIR": str(self.temporary)} | (env or {}), **how)
        return command

    def straight(self, start: Any, engine: str) -> Path:
        """Return the folder of the undisturbed run.

        Args:
            start: See `tests.e2e.conftest.commands`.
            engine: vllm or sglang.
        """
        if engine not in self._straight:
            folder = self.folder / "straight"
            command = self.start(start, *self.words(f"{engine} shm", folder, engine))
            if command.process.wait(3 * BOUND) != 0:
                raise SystemExit(f"the undisturbed run with {engine} failed:\n{command.output}")
            self._straight[engine] = folder / engine
        return self._straight[engine]


def carry_out(trial: Trial, bench: Bench, private_memory: bool) -> None:
    """Apply the fault to a run, and check what is left.

    Args:
        trial: Trial to carry out; it collects the results.
        bench: Folders of the runs.
        private_memory: Whether /dev/shm belongs to this process alone.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=bench.folder) as name, commands(Path(name)) as start:
        straight = bench.straight(start, trial.way.partition(" ")[0])
        runs = Runs(
            functools.partial(bench.start, start), functools.partial(bench.words, trial.way), straight, STEPS, None, None, BOUND
        )
        began = time.monotonic()
        try:
            HURTS[trial.hurt](runs, Path(name))
        except (AssertionError, OSError, pytest.skip.Exception) as e:
            trial.failures.append(f"{type(e).__name__}: {e}")
        trial.failures += processes_left()
        trial.failures += [f"file left: {path}" for path in left_behind(bench.temporary, Path(name), private_memory)]
        for folder in (
            bench.temporary,
            *(Path("/dev/shm").iterdir() if private_memory else ()),
        ):  # leftovers count for this trial alone
            shutil.rmtree(folder, ignore_errors=True)
    trial.seconds, trial.commit = round(time.monotonic() - began, 1), commit()


def processes_left() -> list[str]:
    """Wait for the processes that this one started or adopted; kill those that do not end, and return them."""
    deadline = time.monotonic() + LEFT_SECONDS
    while (alive := [p for p in psutil.Process().children(recursive=True) if lives(p)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    found = []
    for process in alive:
        with contextlib.suppress(psutil.Error):
            found.append(f"left over: {process.pid} {' '.join(process.cmdline())[:200]}")
            process.kill()
    return found


def main(argv: list[str] | None = None) -> int:
    """Make the trials that FILE lacks; exit status 1 if any in it failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.harness.hurt", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="minutes after which no trial is started")
    parser.add_argument("--only", default="", help="trials whose hurt and way contain this alone")
    args = parser.parse_args(argv)
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    done = [Trial(**json.loads(line)) for line in lines]
    out = args.out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    private_memory, deadline = own_shared_memory(), time.monotonic() + 60 * args.minutes
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what a run leaves behind becomes this process's child
    with tempfile.TemporaryDirectory(prefix="hurt-") as folder:
        bench = Bench(Path(folder))
        for trial in trials():
            known = trial.key in [other.key for other in done] or args.only not in f"{trial.hurt} / {trial.way}"
            if known or time.monotonic() > deadline:
                continue
            carry_out(trial, bench, private_memory)
            done.append(trial)
            with out.open("a") as file:
                file.write(json.dumps(asdict(trial)) + "\n")
            print(f"{trial.hurt} / {trial.way}: {trial.failures or 'ok'} ({trial.seconds:.0f} s)", flush=True)
    failed = [f"{trial.hurt} / {trial.way}" for trial in done if trial.failures]
    print(f"{len(done) - len(failed)} of {len(done)} trials held, {len(trials())} are planned; failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
