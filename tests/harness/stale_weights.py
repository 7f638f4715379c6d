"""Plant wrong weights in an engine, in every mode of a run, and see at which step the gate stops it.

Ranks, loop, grading, delivery and updates are the product's; the engine is `FaultyEngine`, which knows how far, in nats, its
fault moves each log-prob. A fault is above the detection limit in a step where, for some server and version of n tokens, the
mean of that is above `allowed_difference(n)`, or that of all tokens of the step above `sync.max_logprob_diff`; plus
NOISE. The first such step is the first possible one: the run must end in it.
"""

import contextlib
import functools
import io
import json
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tepo_megatron import report
from tepo_megatron.base.processes import quiet_upstream
from tepo_megatron.config import Config
from tepo_megatron.monitor import run_dir
from tepo_megatron.rollout import record
from tepo_megatron.trainer.gate import allowed_difference
from tests.harness import experts
from tests.harness.faulty_engine import Fault, FaultyEngine, tokens_of
from tests.parallel import resume_worlds as w
from tests.services import train_here
from tests.worlds import run_world

NOISE = {"fp32": 1e-6, "bf16": 0.02}  # nats: mean |engine - actor| of healthy steps is less
LIMIT = {"fp32": 1e-5, "bf16": 0.05}
ONE_UPDATE = {"epochs": 1, "minibatch_prompts": 4}
REPLAYED = {"engine": "sglang", "replay_experts": True}
FUNCTION = f"{Path(__file__).with_name('two_turns.py')}:two_turns"
# name -> sections of the config
TURNS: dict[str, dict[str, Any]] = {
    "sync": {},
    "sync, one update": {"training": ONE_UPDATE},
    "sync, old_logprobs rollout": {"training": {"old_logprobs": "rollout"}, "objective": {"name": "grpo", "beta": None}},
    "colocated": {"rollout": {"colocate": True}},
    "ahead": {"rollout": {"max_staleness": 1}},
    "ahead, one update": {"rollout": {"max_staleness": 1}, "training": ONE_UPDATE},
    "ahead, tp 2": {"rollout": {"max_staleness": 1}, "parallel": {"tp": 2}},
    "ahead, pp 2": {"rollout": {"max_staleness": 1}, "parallel": {"pp": 2}},
    "3 ahead, finish": {"rollout": {"max_staleness": 3}},
    "3 ahead, continue": {"rollout": {"max_staleness": 3, "on_weight_update": "continue", "oversample": 1.5}},
    "3 ahead, restart": {"rollout": {"max_staleness": 3, "on_weight_update": "restart", "oversample": 1.5}},
}
# other transports of weights, and other ways of sampling
WAYS: dict[str, dict[str, Any]] = {
    "group": {"sync": {"transport": "group"}},
    "group, ahead": {"rollout": {"max_staleness": 1}, "sync": {"transport": "group"}},
    "group, pp 2": {"parallel": {"pp": 2}, "sync": {"transport": "group"}},
    "group, colocated": {"rollout": {"colocate": True}, "sync": {"transport": "group"}},
    "group, 3 ahead, continue": {
        "rollout": {"max_staleness": 3, "on_weight_update": "continue", "oversample": 1.5},
        "sync": {"transport": "group"},
    },
    "delta": {"sync": {"delta": True}},
    "delta, ahead": {"rollout": {"max_staleness": 1}, "sync": {"delta": True}},
    "ipc": {"sync": {"transport": "ipc"}},
    "ipc, delta, colocated": {"rollout": {"colocate": True}, "sync": {"transport": "ipc", "delta": True}},
    "function": {"rollout": {"function": FUNCTION}},
    "function, ahead": {"rollout": {"max_staleness": 1, "function": FUNCTION}},
    "function, 3 ahead, continue": {
        "rollout": {"max_staleness": 3, "on_weight_update": "continue", "oversample": 1.5, "function": FUNCTION}
    },
    "temperature 0.3": {"rollout": {"temperature": 0.3}},
    "experts": {},
    "experts, ahead": {"rollout": {"max_staleness": 1}},
    "experts replayed": {"rollout": REPLAYED},
    "experts replayed, ahead": {"rollout": REPLAYED | {"max_staleness": 1}},
}
MODES = TURNS | WAYS
SERVERS = 4


@dataclass(frozen=True)
class Trial:
    """A run with a fault. With `one_server`, only the third of SERVERS has it."""

    mode: str
    fault: str
    one_server: bool = False
    rate: float = 1e-3
    precision: str = "fp32"
    steps: int = 5


@dataclass(frozen=True)
class Verdict:
    """The result of a trial.

    Attributes:
        first: First step with rollouts whose fault is above the limit. None: no step.
        stopped: Step in which the gate ended the run. None: it did not.
        largest: Mean nats by which the fault moved the log-probs of a server and version in a step, minus the difference that
            is allowed for this number of tokens; the largest of all steps.
        worst_healthy: Largest mean |engine - actor| of healthy steps. None: there was none.
    """

    first: int | None
    stopped: int | None
    largest: float
    worst_healthy: float | None


def config(trial: Trial, model: Path, folder: Path) -> Config:
    if "expert" in trial.mode:
        model = experts.write_model(model)
    sections: dict[str, Any] = {name: dict(section) for name, section in MODES[trial.mode].items()}
    common: dict[str, dict[str, Any]] = {
        "rollout": {"record": True, "filter_uniform_groups": False, "max_generation_rounds": 1},
        "training": {"steps": trial.steps},
        "optimizer": {"lr": trial.rate, "warmup_steps": 0},
        "evaluation": {"every": 0},
        "data": {"eval": None},
        "logging": {"noise_floor_every": 0},
        "sync": {"max_logprob_diff": LIMIT[trial.precision]},
    }
    if trial.one_server:
        common["rollout"]["servers"] = SERVERS
    for name, section in common.items():
        sections[name] = section | sections.get(name, {})
    cfg = w.run_config(model, folder, export_hf=False, **sections)
    return replace(cfg, model=replace(cfg.model, precision=trial.precision))


def noise(cfg: Config) -> float:
    """Return the rounding noise in nats: rounding is of logits, which the temperature divides."""
    return NOISE[cfg.model.precision] / min(1.0, cfg.rollout.temperature)


def run(trial: Trial, model: Path, folder: Path) -> Verdict:
    """Run the trial.

    Raises:
        AssertionError: The run ended for another reason than the gate.
    """
    cfg, book = config(trial, model, folder), folder / "book.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    book.touch()
    fault = Fault(trial.fault, first=1, server=2 if trial.one_server else None)
    run_dir.prepare(cfg)
    stopped = False
    try:
        run_world(cfg.parallel.world_size, _rank, cfg, fault, book, timeout=240.0)
    except AssertionError as e:
        if "sync.max_logprob_diff" not in str(e):
            raise
        stopped = True
    return _verdict(cfg, book, stopped)


def _rank(rank: int, cfg: Config, fault: Fault, book: Path) -> None:
    quiet_upstream()
    report.write_report = lambda folder: folder / "report.png"
    with contextlib.redirect_stdout(io.StringIO()):
        train_here(cfg, functools.partial(FaultyEngine, fault=fault, book=book))


def _verdict(cfg: Config, book: Path, stopped: bool) -> Verdict:
    planted = {name: moved for line in book.read_text().splitlines() for name, moved in json.loads(line)}
    metrics = [json.loads(line) for line in (cfg.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert stopped == (len(metrics) < cfg.training.steps)
    folder = cfg.run_dir / record.FOLDER
    first, largest = None, 0.0
    for step in record.steps(folder):
        if step > len(metrics) + stopped:
            break  # sampled ahead, and never trained on
        sums: dict[tuple[int, str], tuple[float, int]] = defaultdict(lambda: (0.0, 0))
        for rollout in record.read(folder, step)[0]:
            for name, source in tokens_of(rollout):
                before = sums[source]
                sums[source] = before[0] + planted[name], before[1] + 1
        whole = sum(total for total, _ in sums.values()) / sum(n for _, n in sums.values())
        found = [(whole, cfg.sync.max_logprob_diff)]
        found += [(total / n, allowed_difference(n, cfg.sync)) for total, n in sums.values()]
        largest = max(largest, *(mean / limit for mean, limit in found))
        if first is None and any(mean - noise(cfg) > limit for mean, limit in found):
            first = step
    healthy = [m["gate/logprob_diff_worst"] for m in metrics if largest == 0 and m["gate/logprob_diff_worst"] is not None]
    return Verdict(first, len(metrics) + 1 if stopped else None, largest, max(healthy, default=None))
