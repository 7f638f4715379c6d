"""Disturb one long run at random while it streams minibatches and samples ahead, and check that nothing was lost.

    python -m tests.harness.long_chaos --out FILE [--steps 100] [--engine vllm] [--seed 0] [--every 12]

The trainer is on one host and `tepo serve` with two servers on another: network namespaces of this machine, whose link can be
cut (`tests/hosts.py`). About every `--every` seconds one of FAULTS happens: a process is killed with SIGKILL, or the link is
cut for some seconds. If a fault ends the run, it is resumed.

Checked: the run ends; each step is there once; every prompt was used exactly once in an epoch; every token is of a version that
its step may learn from, and agrees with it (`gate/logprob_diff_worst`) where it is compared; a step comes at least every
HANG_SECONDS; no process is left at the end. The result is one JSON line in FILE.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results import commit
from tepo_megatron.rollout import decisions, record
from tests import hosts
from tests.e2e.conftest import Command, commands, settings
from tests.harness.chaos import write_inputs
from tests.hosts import Host

# part of the command line of the process that is killed; "" cuts the link
FAULTS = {
    "rank 0": "launcher.worker", "another rank": "launcher.worker", "service": "controller.service", "server": "entrypoints",
    "guard": "servers.guard", "grader": "grading/worker.py", "launcher": "", "partition": "",
}  # fmt: skip
OF_SERVE = ("server", "guard")
HANG_SECONDS, LEFT_SECONDS, END_SECONDS = 420.0, 60.0, 240.0
PROMPTS, SAMPLES, STALENESS, DATASET, LIMIT = 8, 4, 2, 40, 1e-3
RUN: dict[str, Any] = {
    "training__minibatch_prompts": 2, "training__stream": "arrival", "rollout__prompts_per_step": PROMPTS,
    "rollout__samples_per_prompt": SAMPLES, "rollout__max_response_tokens": 24, "rollout__record": "true",
    "rollout__filter_uniform_groups": "false", "rollout__max_staleness": STALENESS, "rollout__on_weight_update": "continue",
    "rollout__servers": 2, "rollout__server__restarts": 1000, "rollout__server__kv_cache_gib": 0.25,
    "rollout__server__heartbeat_timeout": 20, "rollout__server__request_seconds": 60, "parallel__tp": 1, "parallel__dp": 2,
    "optimizer__warmup_steps": 0, "optimizer__lr": "1e-4", "checkpoint__every": 5, "evaluation__every": 0,
    "evaluation__max_problems": 4, "sync__max_logprob_diff": LIMIT, "objective__correction": "tis",
}  # fmt: skip


@dataclass
class Report:
    """The line of the output.

    Attributes:
        faults: [step, name] of each fault.
        starts: Number of starts of the trainer.
        hung: Seconds of the longest time without a step.
        uncompared: Steps none of whose tokens could be compared: after a restart no rank has weights before the checkpoint.
        failures: What did not hold.
    """

    engine: str
    steps: int
    seed: int
    faults: list[tuple[int, str]] = field(default_factory=list)
    starts: int = 0
    hung: float = 0.0
    uncompared: list[int] = field(default_factory=list)
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    commit: str = ""


class LongRun:
    """The run and its servers.

    Args:
        folder: Folder of everything that it writes.
        two: The hosts of the trainer and of the servers.
        report: What is found.
        start: See `tests.e2e.conftest.commands`.
    """

    def __init__(self, folder: Path, two: tuple[Host, Host], report: Report, start: Callable[..., Command]) -> None:
        self._folder, self._two, self._report, self._start = folder, two, report, start
        self.run_dir = folder / "runs" / "long"
        write_inputs(folder / "model")
        self._serve = self._started("serve", two[1])
        self._train = self._started("train", two[0])

    def _started(self, command: str, host: Host, resume: bool = False) -> Command:
        model, shared = self._folder / "model", self._folder
        keys = RUN | {
            "name": "long", "output": shared / "runs", "training__steps": self._report.steps,
            "rollout__engine": self._report.engine, "rollout__server__rendezvous": shared / "rendezvous",
            "sync__transport__folder": shared / "weights",
            "reward__terms": json.dumps([{"type": "custom", "function": f"{model / 'score.py'}:score"}]),
        }  # fmt: skip
        keys |= {"resume": "true"} if resume else {}
        first = [command, "examples/demo.yaml"] + (["--host", host.address] if command == "serve" else [])
        environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "VLLM_HOST_IP": host.address}
        self._report.starts += command == "train"
        by = [*host.enter, sys.executable]
        return self._start(*first, *settings(model, **keys), by=by, env=environment if command == "serve" else None)

    @property
    def steps(self) -> int:
        """Return the number of steps in the metrics."""
        path = self.run_dir / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def endure(self, draw: random.Random, every: float) -> None:
        """Disturb the run until it has ended.

        Args:
            draw: Chooses the faults.
            every: Mean seconds between two faults.
        """
        seen, since, due = 0, time.monotonic(), time.monotonic() + every
        while True:
            now, steps = time.monotonic(), self.steps
            if steps != seen:
                self._report.hung = max(self._report.hung, now - since)
                seen, since = steps, now
            if now - since > HANG_SECONDS:
                self._report.failures.append(
                    f"no step for {HANG_SECONDS:.0f} s after step {steps}: {self._train.output[-1500:]}"
                )
                return
            if (status := self._train.process.poll()) is not None:
                if status == 0:
                    return
                self._train = self._started("train", self._two[0], resume=True)
            elif seen and since > due - every and now > due:
                self._disturb(draw)
                due = time.monotonic() + draw.uniform(0.5, 1.5) * every
            time.sleep(0.1)

    def _disturb(self, draw: random.Random) -> None:
        name = draw.choice(list(FAULTS))
        self._report.faults.append((self.steps, name))
        if name == "partition":
            self._two[1].link("down")
            time.sleep(draw.uniform(1, 12))
            self._two[1].link("up")
            return
        command = self._serve if name in OF_SERVE else self._train
        found = sorted(int(line.split()[0]) for line in command.left_over() if FAULTS[name] and FAULTS[name] in line)
        if name == "launcher":
            found = [int(line.split()[0]) for line in command.left_over() if " train examples" in line and "tepo" in line]
        elif name in ("rank 0", "another rank"):
            found = found[:1] if name == "rank 0" else found[1:]
        if found:
            try:
                os.kill(draw.choice(found), signal.SIGKILL)
            except ProcessLookupError:
                self._report.faults[-1] = (self.steps, f"{name}, gone")

    def check(self) -> None:
        """Check what the run has left behind."""
        failures, steps = self._report.failures, self._report.steps
        rows = [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]
        if [row["step"] for row in rows] != list(range(1, steps + 1)):
            failures.append(f"steps {[row['step'] for row in rows]}")
        differences = {row["step"]: row["gate/logprob_diff_worst"] for row in rows}
        self._report.uncompared = [step for step, worst in differences.items() if worst is None]
        if wrong := [step for step, worst in differences.items() if worst is not None and not worst <= LIMIT]:
            failures.append(f"tokens of the steps {wrong} differ from their version")
        used: list[int] = []
        for step in range(1, steps + 1):
            rollouts, _ = record.read(self.run_dir / record.FOLDER, step)
            counts = Counter(r.prompt_id for r in rollouts)
            if set(counts.values()) != {SAMPLES}:
                failures.append(f"step {step}: samples by prompt {dict(counts)}")
            used += sorted(counts)
            versions = {v for r in rollouts for v in (r.policy_version, *(v for _, v in r.later_versions))}
            if not versions <= set(range(max(0, step - 1 - STALENESS), step)):
                failures.append(f"step {step}: versions {sorted(versions)}")
        for first in range(0, len(used) - DATASET + 1, DATASET):
            if sorted(used[first : first + DATASET]) != list(range(DATASET)):
                failures.append(f"the epoch from prompt {first} on does not have each prompt once")
        history = decisions.read_history(self.run_dir)
        if sorted(history.steps) != list(range(1, steps + 1)) or history.faults:
            failures.append(f"decisions of steps {sorted(history.steps)}, {history.faults}")

    def end(self) -> None:
        """End the servers, and check that nothing lives on."""
        os.kill(self._serve.process.pid, signal.SIGTERM)
        for command in (self._train, self._serve):
            try:
                command.process.wait(END_SECONDS)
                command.assert_nothing_left(LEFT_SECONDS)
            except Exception as e:
                self._report.failures.append(f"left over: {e}")


def main() -> int:
    """Make the run; exit status 1 if something did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.harness.long_chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--engine", default="vllm", choices=("vllm", "sglang"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=12.0, help="mean seconds between faults")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if why := hosts.missing():
        raise SystemExit(why)
    report, began = Report(args.engine, args.steps, args.seed, commit=commit()), time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="long-chaos-") as folder,
        hosts.two_hosts() as two,
        commands(Path(folder)) as start,
    ):
        run = LongRun(Path(folder), two, report, start)
        run.endure(random.Random(args.seed), args.every)
        try:
            run.check()
        except Exception as e:
            report.failures.append(f"cannot be checked: {e!r}")
        run.end()
    report.seconds = round(time.monotonic() - began, 1)
    with args.out.open("a") as file:
        file.write(json.dumps(asdict(report)) + "\n")
    print(f"{len(report.faults)} faults in {args.steps} steps, {report.starts} starts of the trainer, ", end="")
    print(f"at most {report.hung:.0f} s without a step: {report.failures or 'all holds'}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
