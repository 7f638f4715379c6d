"""Runs that are killed and resumed: real loop, grading and checkpoints, and an engine that follows the weights it receives."""

import contextlib
import functools
import importlib
import io
import json
import os
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tepo_megatron import report
from tepo_megatron.base.processes import quiet_upstream
from tepo_megatron.base.records import is_evaluation
from tepo_megatron.base.save_requests import STOP
from tepo_megatron.base.seeding import derive_seed
from tepo_megatron.base.types import Prompt, Rollout, SamplingParams
from tepo_megatron.config import Config
from tepo_megatron.config.io import validate
from tepo_megatron.engines.engine import INITIAL_VERSION
from tepo_megatron.monitor import run_dir
from tests.e2e.scripted_service import ScriptedEngine
from tests.recorded import step_records
from tests.services import train_here
from tests.tiny import tensors, tiny_qwen3
from tests.worlds import run_world

STEPS, PROMPTS = 5, 13  # an epoch ends in the middle of a step


@dataclass(frozen=True)
class Kill:
    """SIGKILL for one rank in the `call`-th call of a function since step `step` began (0: since the start of the attempt).

    Attributes:
        where: "module:name", as the caller looks it up.
        step: Step from which on calls count.
        call: Number of the call.
        after: Whether the kill comes after the call has returned, instead of before it begins.
    """

    where: str
    step: int = 0
    call: int = 1
    after: bool = False
    rank: int = 0

    def __str__(self) -> str:
        when = f"{'after' if self.after else 'before'} {self.where.partition(':')[2]}"
        return f"{when}, call {self.call} from step {self.step} on, rank {self.rank}"

    def __post_init__(self) -> None:
        for where in self.where.split():
            owner, name = self.place(where)
            assert hasattr(owner, name), f"{where}: there is no such function; follow its new name"

    @staticmethod
    def place(where: str) -> tuple[Any, str]:
        """Return the module or class that holds the function `where`, and the function's name."""
        module, _, path = where.partition(":")
        *owners, name = path.split(".")
        return functools.reduce(getattr, owners, importlib.import_module(module)), name

    def arm(self, journal: Path) -> None:
        """Arm the kill in the process that is to die; the kill is written to the journal."""
        from tepo_megatron.service.main_driver import MainDriver
        from tepo_megatron.trainer.schedule import Schedule

        now, calls = 0, 0

        def note_step(original: Callable[..., Any]) -> Callable[..., Any]:
            def with_step(self: Any, step: int, *args: Any) -> Any:
                nonlocal now
                now = step
                return original(self, step, *args)

            return with_step

        # the rank and the rollout service each count for themselves
        Schedule.next_parts = note_step(Schedule.next_parts)  # type: ignore[method-assign]
        MainDriver.collect = note_step(MainDriver.collect)  # type: ignore[method-assign]
        owner, name = self.place(self.where)
        original = getattr(owner, name)

        @functools.wraps(original)
        def deadly(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += now >= self.step
            due = now >= self.step and calls == self.call
            if due and not self.after:
                self.die(journal, *args)
            out = original(*args, **kwargs)
            if due and self.after:
                self.die(journal, *args)
            return out

        setattr(owner, name, deadly)

    def die(self, journal: Path, *args: Any) -> None:
        """Write the kill to the journal, and end this process as a power cut would."""
        with journal.open("a") as f:
            f.write(json.dumps({"killed": str(self)}) + "\n")
        os.kill(os.getpid(), signal.SIGKILL)


class HalfALine(Kill):
    """A kill that comes when half of a record is in metrics.jsonl."""

    def die(self, journal: Path, log: Any, step: int, *_: Any) -> None:  # type: ignore[override]
        with (log.run_dir / "metrics.jsonl").open("ab") as file:
            file.write(b'{"step": ')
        super().die(journal)


@dataclass(frozen=True)
class Request(Kill):
    """A request for a checkpoint in place of a kill. It is a file in the run's folder, which lies next to the journal."""

    name: str = STOP

    def die(self, journal: Path, *args: Any) -> None:
        with journal.open("a") as f:
            f.write(json.dumps({"killed": str(self)}) + "\n")
        (journal.parent / "run" / self.name).touch()


class FollowingEngine(ScriptedEngine):
    """An engine that writes its requests to the journal.

    Its answers depend on (prompt, seed) and, if `exact`, on every bit of the weights received.
    """

    exact = True

    def __init__(self, cfg: Config, journal: Path, attempt: int) -> None:
        os.environ["TEPO_TEST_ENGINE"] = "good"
        super().__init__(cfg)
        self._journal, self._attempt = journal, attempt
        self.update_weights(sorted(Path(cfg.model.path).glob("*.safetensors")), INITIAL_VERSION)

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> list[Rollout]:
        assert not self.asleep
        asked = {"attempt": self._attempt, "version": self.version, "seed": seed, "prompts": [p.id for p in prompts]}
        with self._journal.open("a") as f:
            f.write(json.dumps(asked) + "\n")
        return [self._answer(p, seed, i) for p in prompts for i in range(sampling.samples)]

    def _answer(self, prompt: Prompt, seed: int, i: int) -> Rollout:
        right = self._sample(prompt, right=True)
        dice = random.Random(f"{seed}/{prompt.id}/{i}/{right.rollout_logprobs_L.tolist() if self.exact else ''}")
        return right if dice.random() < 0.5 else self._sample(prompt, right=False)


def write_inputs(folder: Path) -> Path:
    tiny_qwen3(folder, layers=2)
    for name, count in (("train", PROMPTS), ("eval", 4)):
        rows = [{"prompt": f"{i}+{len(name)}=", "answer": str(i + len(name))} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def run_config(model: Path, output: Path, **sections: Any) -> Config:
    """Return the config of a run of STEPS steps with two updates each, refills, evaluations, and a changing learning rate."""
    tree: dict[str, Any] = {
        "name": "run", "output": str(output), "platform": "cpu", "seed": 3,
        "model": {"path": str(model), "precision": "fp32"},
        "data": {"train": str(model / "train.jsonl"), "eval": str(model / "eval.jsonl"), "max_prompt_tokens": 16},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, "max_response_tokens": 16, "max_generation_rounds": 2},
        "reward": {"workers": 1, "timeout_seconds": 30.0},
        "objective": {"name": "tepo", "beta": 0.1},
        "optimizer": {"lr": 1e-3, "warmup_steps": 3},
        "training": {"steps": STEPS, "epochs": 1, "minibatch_prompts": 2, "max_tokens_per_microbatch": 64},
        "evaluation": {"every": 2},
        "logging": {"noise_floor_every": 2},
    }  # fmt: skip
    for name, value in sections.items():
        tree[name] = {**tree.get(name, {}), **value} if isinstance(value, dict) else value
    return validate(tree)


def attempt(cfg: Config, journal: Path, number: int = 0, kill: Kill | None = None) -> None:
    """Run `tepo train` in forked ranks.

    Raises:
        AssertionError: A rank ended before its time.
    """
    if run_dir.finished(cfg):
        return
    run_dir.prepare(cfg)
    run_world(cfg.parallel.world_size, run_rank, cfg, journal, number, kill, timeout=240.0)


def run_rank(rank: int, cfg: Config, journal: Path, number: int, kill: Kill | None) -> None:
    quiet_upstream()
    if kill is None or not kill.where.endswith("write_report"):
        without_report()
    if kill is not None and kill.rank == rank:
        kill.arm(journal)
    with contextlib.redirect_stdout(io.StringIO()):
        train_here(cfg, functools.partial(FollowingEngine, journal=journal, attempt=number))


def without_report() -> None:
    """Write no report in this process: half of the seconds of such a run."""
    report.write_report = lambda folder: folder / "report.png"


def lineage(cfg: Config, journal: Path, *kills: Kill, all_happen: bool = True) -> None:
    """Run to the end: kill the run as `kills` say and resume it after each. Assert that no record vanishes in between."""
    recorded: list[str] = []
    for number, kill in enumerate(kills):
        try:
            attempt(replace(cfg, resume=number > 0), journal, number, kill)
        except AssertionError:
            killed = [row["killed"] for row in journal_rows(journal) if "killed" in row]
            assert len(killed) == number + 1, f"it did not come to the kill {kill}"
        else:
            assert number > 0 and not all_happen, f"the run ended before the kill {kill}"
        recorded += _lines(cfg.run_dir / "metrics.jsonl")
    attempt(replace(cfg, resume=bool(kills)), journal, len(kills))
    kept = set(_lines(cfg.run_dir / "metrics.jsonl")) | set(_lines(cfg.run_dir / "metrics.lost.jsonl"))
    assert set(recorded) <= kept


@dataclass(frozen=True)
class Outcome:
    """The result of a finished run, without its seconds.

    `prompts` holds by step the requests of the attempt whose step counts: seed and prompt ids of each round.
    """

    records: list[dict[str, Any]]
    accuracies: list[dict[str, Any]]  # records of evaluations
    summary: dict[str, Any]
    evaluation: str
    weights: dict[str, torch.Tensor]
    prompts: dict[int, list[Any]]


def outcome(cfg: Config, journal: Path) -> Outcome:
    evaluations = {derive_seed(cfg.seed, "evaluation")}
    evaluations |= {derive_seed(cfg.seed, "benchmark", name) for name in cfg.evaluation.benchmarks}
    asked = [row for row in journal_rows(journal) if "seed" in row and row["seed"] not in evaluations]
    last = {row["version"]: row["attempt"] for row in asked}
    prompts: dict[int, list[Any]] = {}
    for row in asked:
        if row["attempt"] == last[row["version"]]:
            prompts.setdefault(row["version"] + 1, []).append([row["seed"], row["prompts"]])
    summary = json.loads((cfg.run_dir / "summary.json").read_text())
    seconds = summary.pop("seconds")
    assert seconds >= sum(record["seconds/total"] for record in step_records(cfg.run_dir))
    evaluation = (cfg.run_dir / "evaluation.jsonl").read_text()
    return Outcome(records(cfg.run_dir), accuracies(cfg.run_dir), summary, evaluation, weights(cfg.run_dir), prompts)


def assert_same(run: Outcome, straight: Outcome) -> None:
    """Assert that two outcomes are equal, bit for bit."""
    assert run.prompts == straight.prompts
    assert run.records == straight.records
    assert run.accuracies == straight.accuracies
    assert run.summary == straight.summary and run.evaluation == straight.evaluation
    assert run.weights.keys() == straight.weights.keys()
    for name, weight in straight.weights.items():
        assert torch.equal(run.weights[name], weight), name


def records(folder: Path) -> list[dict[str, Any]]:
    """Return the steps of metrics.jsonl, without clock measurements, their alerts, and the load and restarts of servers."""
    rows = [row for line in _lines(folder / "metrics.jsonl") if not is_evaluation(row := json.loads(line))]
    other = ("tokens_per_second", "rollout/server_restarts")
    return [
        {k: v for k, v in row.items() if not k.startswith(("seconds/", "server/", "alert/")) and k not in other} for row in rows
    ]


def accuracies(folder: Path) -> list[dict[str, Any]]:
    """Return the evaluations of metrics.jsonl."""
    return [row for line in _lines(folder / "metrics.jsonl") if is_evaluation(row := json.loads(line))]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return tensors(folder / "hf")


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def journal_rows(journal: Path) -> list[dict[str, Any]]:
    """Return the journal: requests to engines, and kills."""
    return [json.loads(line) for line in _lines(journal)]
