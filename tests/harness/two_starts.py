"""Two starts of one run, one after the other: `python -m tests.harness.two_starts --out FILE`.

Each trial starts the real `tepo train` twice, with different learning rates. It asks: did exactly one run, with its own config
from the first file to the last, and was the other refused without a trace? A line per trial, with the commit, is appended to
FILE; trials that FILE holds already are skipped. The engine is scripted (tests/e2e/scripted_worker.py); launcher, ranks and
files are real.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from benchmarks.results import commit
from tests.tiny import tiny_qwen3

ROOT = Path(__file__).parents[2]
RATES = (1e-3, 2e-3)
STEPS = 4
SECONDS = 600.0  # time limit of both starts of a trial, on a busy machine
REFUSALS = ("this run is under way in another process", "holds a run already")


@dataclass(frozen=True)
class Trial:
    """Two starts.

    Attributes:
        delay: Seconds between the starts.
        overwrite: Whether both starts get `overwrite`, over a run that exists already.
        ranks: Ranks of each start.
    """

    delay: float
    overwrite: bool
    ranks: int = 2

    @property
    def key(self) -> str:
        """Name of the trial."""
        return f"{self.delay:.2f}-{'overwrite' if self.overwrite else 'new'}"


def write_inputs(path: Path) -> Path:
    """Write a model with random weights, with problems."""
    tiny_qwen3(path, layers=2)
    rows = [{"prompt": f"1+{i}?\n", "answer": str(1 + i)} for i in range(40)]
    (path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def words_of(trial: Trial, model: Path, output: Path, rate: float) -> list[str]:
    """Return the command line of a start.

    Args:
        trial: Trial of the start.
        model: Directory of the model.
        output: Parent of the run's folder.
        rate: Learning rate.
    """
    keys = {
        "name": "run", "output": output, "model.path": model, "data.train": model / "train.jsonl", "data.eval": "null",
        "parallel.tp": 1, "parallel.dp": trial.ranks, "training.steps": STEPS, "training.epochs": 1,
        "training.minibatch_prompts": 4, "rollout.prompts_per_step": 4, "rollout.samples_per_prompt": 4,
        "optimizer.warmup_steps": 0, "optimizer.lr": rate, "checkpoint.every": 1, "export_hf": "false",
        "overwrite": str(trial.overwrite).lower(),
    }  # fmt: skip
    return ["train", "examples/demo.yaml", *(word for key, value in keys.items() for word in (f"--{key}", str(value)))]


def run(trial: Trial, model: Path, folder: Path) -> dict[str, object]:
    """Run a trial and return its line: `ok`, and otherwise the faults.

    Args:
        trial: Trial to run.
        model: Directory of the model.
        folder: Folder of the trial.

    Raises:
        subprocess.TimeoutExpired: A start did not end in time.
    """
    output = folder / trial.key
    if trial.overwrite:
        leave_a_run(output / "run")
    env = {**os.environ, "TEPO_TEST_ENGINE": "slow"}
    processes, started = [], time.monotonic()
    try:
        for i, rate in enumerate(RATES):
            time.sleep(max(0.0, started + i * trial.delay - time.monotonic()))
            with (folder / f"{trial.key}-{i}.txt").open("w") as log:
                command = [sys.executable, "-m", "tests.e2e.scripted_run", *words_of(trial, model, output, rate)]
                processes.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT))
        statuses = [process.wait(SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    outputs = [(folder / f"{trial.key}-{i}.txt").read_text() for i in range(2)]
    wrong = list(faults(statuses, outputs, output / "run"))
    seconds = round(time.monotonic() - started, 1)
    return asdict(trial) | {"key": trial.key, "ok": not wrong, "wrong": wrong, "seconds": seconds, "commit": commit()}


def leave_a_run(run_dir: Path) -> None:
    """Write the run that `overwrite` replaces."""
    (run_dir / "checkpoints" / "step-00000009").mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text('{"step": 9}\n')


def faults(statuses: Sequence[int], outputs: Sequence[str], run_dir: Path) -> Iterator[str]:
    """Yield the faults in the outcome of a trial.

    Args:
        statuses: Exit status of each start.
        outputs: Output of each start.
        run_dir: Folder of the run.
    """
    if sorted(statuses) != [0, 1]:
        yield f"exit statuses {list(statuses)}: " + " / ".join(text[-800:] for text in outputs)
        return
    winner = list(statuses).index(0)
    refusal = outputs[1 - winner]
    if not any(words in refusal for words in REFUSALS) or refusal.count("tepo: error:") != 1:
        yield f"the other start was refused otherwise: {refusal[-800:]}"
    if "actor built" in refusal:
        yield "the refused start began to train"
    rates = {float(yaml.safe_load((run_dir / "config.yaml").read_text())["optimizer"]["lr"])}
    for state in run_dir.glob("checkpoints/step-*/run.json"):
        rates.add(float(json.loads(state.read_text())["run"]["config"]["optimizer"]["lr"]))
    if rates != {RATES[winner]}:
        yield f"learning rates {sorted(rates)} in config.yaml and checkpoints; start {winner} had {RATES[winner]}"
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    if [record["step"] for record in records] != list(range(1, STEPS + 1)):
        yield f"steps {[record['step'] for record in records]}"
    log = (run_dir / "log.txt").read_text()
    if "error" in log or log.count("objective ") != 1:
        yield f"the log is not that of one run: {log[-800:]}"
    if (run_dir / "run.lock").exists():
        yield "run.lock was left"


def spread(count: int) -> list[int]:
    """Return the numbers below `count` in an order whose every prefix is spread over all of them."""
    bits = max(1, (count - 1).bit_length())
    order = (int(f"{i:0{bits}b}"[::-1], 2) for i in range(2**bits))
    return [i for i in order if i < count]


def main() -> int:
    """Run the command line; the exit status is 1 if a trial failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, one per trial; trials in it are left out")
    parser.add_argument("--most", type=float, default=4.95, help="the longest delay in seconds (default: %(default)s)")
    parser.add_argument("--every", type=float, default=0.05, help="seconds between delays (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="minutes after which no trial is started")
    args = parser.parse_args()
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    done = {line["key"]: line["ok"] for line in map(json.loads, lines)}
    deadline = time.monotonic() + 60 * args.minutes
    numbers = spread(round(args.most / args.every) + 1)
    # a run of one rank starts in half the time
    trials = [Trial(round(i * args.every, 3), overwrite, 1 if i % 4 else 2) for i in numbers for overwrite in (False, True)]
    with tempfile.TemporaryDirectory(prefix="two-starts-") as name, args.out.open("a") as out:
        folder = Path(name)
        model = write_inputs(folder / "model")
        for trial in trials:
            if trial.key in done or time.monotonic() > deadline:
                continue
            line = run(trial, model, folder)
            done[trial.key] = bool(line["ok"])
            out.write(json.dumps(line) + "\n")
            out.flush()
            print(json.dumps(line), flush=True)
    print(f"{sum(done.values())} of {len(done)} trials went as they must; {len(trials)} are planned")
    return 0 if all(done.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
