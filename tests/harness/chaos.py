"""Kill processes of short runs at random, resume, and compare with runs that nobody disturbed.

    python -m tests.harness.chaos --trials 100 --out FILE [--engines vllm,sglang] [--seed 0] [--minutes 60]

Every trial is one JSON line in FILE; a trial that FILE holds already is skipped, so that the command can be interrupted and
called again. Trial n depends on (seed, n) alone, but for when its victims die. A trial kills one or two victims (or all
processes) of one run of STEPS steps, with SIGKILL, or with SIGSTOP and SIGKILL later; if that ends the run, it is resumed.
Checked afterwards:

* nothing lives on after the end of a run, within LEFT_SECONDS;
* no temporary file, no segment of shared memory, and no unfinished file in the run's folder at the end;
* sync: metrics and exported weights equal those of the undisturbed run, bit for bit; ahead: every prompt was used exactly once.

As root, /dev/shm is a file system of the harness alone; else only what this run was seen to hold there is looked at.
"""

import argparse
import contextlib
import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.results import commit
from tepo_megatron.rollout import record
from tests.e2e.conftest import Command, commands, settings, write_model
from tests.living_folder import paths_below
from tests.parallel.resume_worlds import records, weights
from tests.recorded import steps_taken

STEPS, SAMPLES = 6, 4
LEFT_SECONDS = 60.0
RUN_SECONDS = 900.0
ROLES = ("launcher", "rank 0", "rank 1", "service", "guard", "server", "engine", "grader", "all")
PHASES = ("start", "step", "save", "sync", "export")
MODES = ("sync", "ahead")
IGNORED = ("torchinductor",)  # a cache of all runs
OF_WANDB = ("wandb-artifacts", "wandb-media")  # empty; Megatron-Core imports it where it is installed, and a kill leaves them
_CLONE_NEWNS = 0x00020000
_SCORE = "def score(prompt, response, answer):\n    return float(sum(map(ord, response)) % 2)\n"
RUN: dict[str, Any] = {
    "training__steps": STEPS, "training__minibatch_prompts": 4, "rollout__prompts_per_step": 6, "parallel__tp": 2,
    "rollout__samples_per_prompt": SAMPLES, "rollout__max_response_tokens": 12, "rollout__record": "true",
    "rollout__filter_uniform_groups": "false", "rollout__server__kv_cache_gib": 0.25, "rollout__server__restarts": 9,
    "rollout__server__heartbeat_timeout": 20, "optimizer__warmup_steps": 0, "optimizer__lr": "1e-4", "checkpoint__every": 2,
    "evaluation__max_problems": 8, "sync__max_logprob_diff": "1e-3",
}  # fmt: skip


@dataclass
class Trial:
    """One line of the output.

    Attributes:
        after: Seconds from the start of the phase until the victims die.
        stopped: Seconds from SIGSTOP to SIGKILL. None: SIGKILL at once.
        ended: Exit status of each start.
    """

    number: int
    engine: str
    mode: str
    victims: list[str]
    phase: str
    after: float
    stopped: float | None
    killed: list[str] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    commit: str = ""

    @classmethod
    def draw(cls, seed: int, number: int, engines: list[str]) -> "Trial":
        """Return trial `number`; every four in a row cover two engines and both modes."""
        chance = random.Random(f"{seed}/{number}")
        engine, mode = engines[number // len(MODES) % len(engines)], MODES[number % len(MODES)]
        roles = [role for role in ROLES if engine != "scripted" or role not in ("guard", "server", "engine")]
        victims = chance.sample(roles, chance.choice((1, 1, 2)))
        stopped = chance.uniform(0.1, 3.0) if chance.random() < 0.25 else None
        return cls(number, engine, mode, victims, chance.choice(PHASES), chance.uniform(0, 1.0), stopped)


def write_inputs(model: Path) -> None:
    """Write a model with random weights, with problems and a reward that it earns by chance."""
    write_model(model)
    (model / "score.py").write_text(_SCORE)


class Bench:
    """Folders of the runs, and the undisturbed run of each kind."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, folder / "model"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_inputs(self.model)
        self._straight: dict[tuple[str, str], Path] = {}

    def _words(self, trial: Trial, name: str, resume: bool) -> list[str]:
        keys = RUN | {"name": name, "output": self.folder / "runs", "rollout__max_staleness": int(trial.mode == "ahead")}
        if trial.engine != "scripted":
            keys |= {"rollout__engine": trial.engine}
            keys |= {"reward__terms": json.dumps([{"type": "custom", "function": f"{self.model / 'score.py'}:score"}])}
        keys |= {"resume": "true"} if resume else {}
        return ["train", "examples/demo.yaml", *settings(self.model, **keys)]

    def start(self, start: Any, trial: Trial, name: str, resume: bool = False) -> Command:
        """Start a run with a TMPDIR of its own, in which it may leave nothing."""
        (self.folder / "t").mkdir(exist_ok=True)
        env = {"TMPDIR": str(self.folder / "t")}
        return start(*self._words(trial, name, resume), engine="slow" if trial.engine == "scripted" else None, env=env)

    def straight(self, start: Any, trial: Trial) -> Path:
        """Return the folder of the undisturbed run."""
        key = (trial.engine, trial.mode)
        if key not in self._straight:
            name = f"straight-{trial.engine}-{trial.mode}"
            command = self.start(start, trial, name)
            if command.process.wait(RUN_SECONDS) != 0:
                raise SystemExit(f"the undisturbed run {name} failed:\n{command.output}")
            self._straight[key] = self.folder / "runs" / name
        return self._straight[key]


def roles_of(launcher: int) -> dict[str, list[psutil.Process]]:
    found: dict[str, list[psutil.Process]] = {role: [] for role in ROLES}
    with contextlib.suppress(psutil.Error):
        top = psutil.Process(launcher)
        found["launcher"] = [top]
        ranks = []
        for process in top.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = " ".join(process.cmdline())
                if "servers.guard" in words:
                    found["guard"].append(process)
                elif "rewards/grading/worker.py" in words:
                    found["grader"].append(process)
                elif process.ppid() == launcher and "service" in words:
                    found["service"].append(process)
                elif process.ppid() == launcher and "worker" in words:
                    ranks.append(process)
                elif process.ppid() in [guard.pid for guard in found["guard"]]:
                    found["server"].append(process)
                else:
                    found["engine"].append(process)
        for number, rank in enumerate(sorted(ranks, key=lambda process: process.create_time())):
            found.setdefault(f"rank {number}", []).append(rank)
        found["all"] = [top, *top.children(recursive=True)]
    return found


def _reached(trial: Trial, run: Path, started: float) -> bool:
    """Return whether the run is in the phase in which its victims are to die, with work under way that a kill could break."""
    steps = steps_taken(run)
    match trial.phase:
        case "start":
            return time.monotonic() - started > 10 * trial.after
        case "step":
            return steps >= 1 + trial.number % 4
        case "save":
            return any((run / "checkpoints").glob("*.partial")) or steps >= STEPS
        case "sync":
            return (steps >= 1 + trial.number % 4 and any(Path("/dev/shm").glob("tepo-sync-*/*"))) or steps >= STEPS
    return (run / "hf.partial").exists() or steps >= STEPS


def _disturb(trial: Trial, command: Command, run: Path) -> list[psutil.Process]:
    """Kill the victims in their phase; return the processes that the run had then."""
    started = time.monotonic()
    while command.process.poll() is None and not _reached(trial, run, started):
        if time.monotonic() - started > RUN_SECONDS:
            trial.failures.append("the phase never came")
            break
        time.sleep(0.01)
    if trial.phase != "start":
        time.sleep(trial.after if trial.phase == "step" else trial.after / 5)
    roles = roles_of(command.process.pid)
    victims = [roles[name] for name in trial.victims if roles.get(name)]
    chosen = [p for found in victims for p in (found if found is roles["all"] else found[:1])]
    trial.killed = [f"{p.pid}" for p in chosen]
    for signum in (signal.SIGSTOP, signal.SIGKILL) if trial.stopped is not None else (signal.SIGKILL,):
        for victim in chosen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim.pid, signum)
        if signum == signal.SIGSTOP:
            time.sleep(trial.stopped or 0.0)
    return roles["all"]


def lives(process: psutil.Process) -> bool:
    """Return whether the process runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _check_nothing_lives(trial: Trial, command: Command, seen: list[psutil.Process]) -> None:
    """Assert that no process of the run is left after the end of the launcher."""
    deadline = time.monotonic() + LEFT_SECONDS
    while (alive := [p for p in seen if lives(p)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    trial.failures += [f"left over: {p.pid} {p.name()}" for p in alive]
    try:
        command.assert_nothing_left(LEFT_SECONDS)
    except AssertionError as e:
        trial.failures.append(f"left over: {e}")
    for process in alive:
        process.kill()


def left_behind(temporary: Path, run: Path, private_memory: bool) -> list[str]:
    """Return the files that a run has left in its TMPDIR and in shared memory, and the unfinished files in its folder."""
    names = [path.name for path in temporary.iterdir()]
    names = [name for name in names if not name.startswith(IGNORED) and not name.endswith(OF_WANDB)]
    if private_memory:
        names += [path.name for path in Path("/dev/shm").iterdir()]
    unfinished = [path for path in paths_below(run) if ".partial" in path.name or ".deleted" in path.name]
    return names + [str(path.relative_to(run)) for path in unfinished]


def _check_outcome(trial: Trial, bench: Bench, run: Path, straight: Path, private_memory: bool) -> None:
    trial.failures += [f"file left: {name}" for name in left_behind(bench.folder / "t", run, private_memory)]
    if [row["step"] for row in records(run)] != list(range(1, STEPS + 1)):
        trial.failures.append(f"steps {[row['step'] for row in records(run)]}")
    prompts = {f: [r.prompt_id for n in range(1, STEPS + 1) for r in record.read(f / record.FOLDER, n)[0][::SAMPLES]]
               for f in (run, straight)}  # fmt: skip
    if prompts[run] != prompts[straight]:
        trial.failures.append("other prompts, or in another order")
    if trial.mode == "sync":
        if records(run) != records(straight):
            trial.failures.append("other metrics")
        ours, theirs = weights(run), weights(straight)
        if ours.keys() != theirs.keys() or not all(torch.equal(ours[name], theirs[name]) for name in ours):
            trial.failures.append("other weights")


def _carry_out(trial: Trial, bench: Bench, private_memory: bool) -> None:
    """Run, kill, resume, check."""
    began = time.monotonic()
    with commands(bench.folder) as start:
        straight = bench.straight(start, trial)
        name = f"trial-{trial.number}"
        run = bench.folder / "runs" / name
        command = bench.start(start, trial, name)
        seen = _disturb(trial, command, run)
        for _ in range(3):
            try:
                status = command.process.wait(RUN_SECONDS)
            except subprocess.TimeoutExpired:
                trial.failures.append(f"still running after {RUN_SECONDS:.0f} s: {command.output[-800:]}")
                break
            _check_nothing_lives(trial, command, seen)
            trial.ended.append(status)
            if status == 0:
                break
            if not trial.killed or len(trial.ended) > 1:
                trial.failures.append(f"ended by itself: {command.output[-1500:]}")
            command, seen = bench.start(start, trial, name, resume=True), []
        else:
            trial.failures.append(f"does not resume: {command.output[-800:]}")
        if (run / "summary.json").exists():
            _check_outcome(trial, bench, run, straight, private_memory)
        else:
            trial.failures.append("no summary")
    if trial.failures:
        print(command.output[-2000:], file=sys.stderr)
    shutil.rmtree(run, ignore_errors=True)
    shutil.rmtree(bench.folder / "t", ignore_errors=True)
    trial.seconds, trial.commit = round(time.monotonic() - began, 1), commit()


def own_shared_memory() -> bool:
    """Mount a /dev/shm of our own. Returns False where that is not allowed."""
    if os.geteuid() != 0 or ctypes.CDLL(None).unshare(_CLONE_NEWNS) != 0:
        return False
    private = ["mount", "--make-rprivate", "/"]
    mount = ["mount", "-t", "tmpfs", "-o", "size=2g", "tmpfs", "/dev/shm"]
    return all(subprocess.run(words, capture_output=True).returncode == 0 for words in (private, mount))


def main(argv: list[str] | None = None) -> int:
    """Run the trials that FILE lacks; exit status 1 if any in it failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.harness.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engines", default="vllm,sglang", help="of vllm, sglang, scripted")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="minutes after which no trial is started")
    args = parser.parse_args(argv)
    done = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    out = args.out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    private_memory, deadline = own_shared_memory(), time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        bench = Bench(Path(folder) / "b")
        for number in range(args.trials):
            if any(line["number"] == number for line in done) or time.monotonic() > deadline:
                continue
            trial = Trial.draw(args.seed, number, args.engines.split(","))
            _carry_out(trial, bench, private_memory)
            done.append(asdict(trial))
            with out.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")
            print(
                f"trial {number}: {trial.engine} {trial.mode} {trial.phase} {trial.victims}: {trial.failures or 'ok'}",
                flush=True,
            )
    failed = [line["number"] for line in done if line["failures"]]
    print(f"{len(done) - len(failed)} of {len(done)} trials held; failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
