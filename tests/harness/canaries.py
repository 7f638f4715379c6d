"""Plant wrong weights in a server that answers canaries, and see from which size on the answer gives them away.

    python -m tests.harness.canaries --out build/canaries.jsonl --table benchmarks/results/canaries.md

The actor, its updates, the canaries and the test of the answers are the product's. The server is the same model in PyTorch,
which rounds in another order than the actor; its faults are those of the stale-weights gate (`faulty_engine.py`) and
others. Each version is asked about once without a fault, and once with each fault; a fault is not learned from.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

# isort: off
import tests.conftest  # noqa: F401  chooses the CPU platform, before anything imports Megatron-Core
# isort: on

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tepo_megatron.config import Config
from tepo_megatron.controller.canaries import CanarySync, make_canaries
from tepo_megatron.inference.servers.likelihood import CanaryJudge
from tepo_megatron.types import Canaries, CanaryAnswer, Rollout, TrainBatch
from tepo_megatron.weight_sync.mismatch import allowed_difference
from tests.harness.faulty_engine import FAULTS, State
from tests.harness.faulty_engine import load_weights as load
from tests.parallel import resume_worlds as w
from tests.server.test_canaries import trainer
from tests.worlds import run_world

COUNT = 8
RATES = (1e-9, 1e-8, 1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 1e-3)  # learning rates
LIMIT = 0.05  # sync.max_logprob_diff, the default
# name -> precision of the actor, rollout.server.precision
KINDS: dict[str, tuple[str, str | None]] = {
    "fp32": ("fp32", None),
    "bf16": ("bf16", None),
    "fp32, served in bf16": ("fp32", "bf16"),
}
EDGES = (0, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 64, float("inf"))
EXPLANATION = """\
Made by `make canaries` (`python -m tests.harness.canaries`). Actor, updates, canaries and judge are the product's; the server
is the same model in PyTorch, on a CPU. The learning rates are 1e-9 to 1e-3. The limit is the detection limit that
`likelihood.py` states: for a version that is stale as a whole, a multiple of the noise by which the actor's log-probs of the
two versions differ; for a part or the prefix cache, the limit on the mean difference plus the noise. Below it an answer counts
as right, and the second table has the power."""
SCALED, SHARDS = "model.layers.0.mlp.up_proj.weight", 2
PREFIX = "KV prefix one version old"


def _one_layer(now: State, history: list[State], first: int) -> State:
    """Serve one layer one version old."""
    return {name: (history[-2] if ".layers.1." in name else now)[name] for name in now}


def _one_vocabulary_shard(now: State, history: list[State], first: int) -> State:
    """Serve the second half of the vocabulary one version old."""
    out = dict(now)
    for name, tensor in now.items():
        if "embed_tokens" in name or "lm_head" in name:
            half = tensor.shape[0] // SHARDS
            out[name] = torch.cat((tensor[:half], history[-2][name][half:]))
    return out


def _shard(now: State, history: list[State], first: int) -> State:
    """Serve the second half of the rows of each layer matrix one version old."""
    return FAULTS["one TP shard stale"](now, history[-2:], 1)


def _scaled(factor: float) -> Callable[[State, list[State], int], State]:
    """Return a fault that multiplies one tensor, as a wrong FP8 scale would."""
    return lambda now, history, first: {**now, SCALED: now[SCALED] * factor}


PLANTED: dict[str, Callable[[State, list[State], int], State]] = {
    "one version old": FAULTS["one version old"],
    "two versions old": FAULTS["two versions old"],
    "first version": lambda now, history, first: history[0],
    "one layer one version old": _one_layer,
    "one TP shard one version old": _shard,
    "one vocabulary shard one version old": _one_vocabulary_shard,
    "every other tensor one version old": FAULTS["every other tensor old"],
    "two layers swapped": FAULTS["two layers swapped"],
    "one tensor scaled by 1.002": _scaled(1.002),
    "one tensor scaled by 1.125": _scaled(1.125),
}
WHOLE = ("one version old", "two versions old", "first version")


@dataclass(frozen=True)
class Row:
    """One question to a server.

    Attributes:
        kind: A name in KINDS.
        rate: Learning rate of the run.
        fault: A name in PLANTED, PREFIX, or "none".
        moved: Size of the fault, mean nats. For a version that is stale as a whole, by which the actor's log-probs of it differ
            from those of the expected one; else by which the fault moved the server's log-probs.
        noise: Mean |server - actor| of right answers, nats; for PREFIX |with cache - without|.
        limit: Detection limit of the fault, nats.
        found: The answer was called wrong.
        named: The judge named what is served: the version, or the prefix cache. None: it has no name, or was not found.
    """

    kind: str
    rate: float
    fault: str
    moved: float
    noise: float
    limit: float
    found: bool
    named: bool | None


@dataclass(frozen=True)
class Asked:
    """Questions to two healthy servers of an engine: their number, that of false alarms, and the largest mean in nats."""

    engine: str
    checks: int = 0
    wrong: int = 0
    worst: float = 0.0


class Server:
    """The model in PyTorch."""

    def __init__(self, cfg: Config) -> None:
        served = cfg.rollout.server.precision or cfg.model.precision
        dtype = torch.float32 if served == "fp32" else torch.bfloat16
        self._model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(cfg.model.path)).to(dtype).eval()

    @torch.no_grad()
    def answer(self, canaries: Canaries, state: State, prefix: State | None = None) -> CanaryAnswer:
        """Return the answer under the weights of `state`.

        Args:
            canaries: The canaries.
            state: The served weights.
            prefix: Weights that the cached prefixes were computed with. None: those of `state`.
        """
        cuts = list(zip(canaries.sequences, canaries.cached_from, strict=True))
        load(self._model, state if prefix is None else prefix)
        caches = [self._model(torch.tensor([ids[: cut - 1]]), use_cache=True).past_key_values for ids, cut in cuts]
        load(self._model, state)
        whole = [self._logprobs(self._model(torch.tensor([ids])).logits, ids[1:]) for ids, _ in cuts]
        cached = [
            self._logprobs(self._model(torch.tensor([ids[cut - 1 :]]), past_key_values=cache).logits, ids[cut:])
            for (ids, cut), cache in zip(cuts, caches, strict=True)
        ]
        targets = [canaries.target(k, i) for k, (ids, cut) in enumerate(cuts) for i in range(cut, len(ids))]
        return CanaryAnswer(np.concatenate(whole), np.concatenate(cached), np.array(targets))

    def _logprobs(self, logits: Tensor, targets: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float64]]:
        logprobs = logits[0, : len(targets)].float().log_softmax(-1)
        return logprobs.gather(1, torch.tensor(targets)[:, None])[:, 0].double().numpy()


def batch_of(step: int, vocab_size: int) -> TrainBatch:
    """Return random sequences with random advantages, for an update that moves the weights.

    Args:
        step: Seed of the batch.
        vocab_size: Number of token ids.
    """
    generator = torch.Generator().manual_seed(step)
    rollouts = [
        Rollout(
            i // 2, torch.randint(4, vocab_size, (24,), generator=generator), torch.arange(24) >= 8, torch.zeros(24), 0, "stop"
        )
        for i in range(8)
    ]
    return TrainBatch.build(rollouts, torch.randn(8, generator=generator))


def ask(rank: int, cfg: Config, versions: int) -> list[dict[str, Any]]:
    """Return the rows of a run of `versions` updates.

    Args:
        rank: Rank of the world of one.
        cfg: Config of the run.
        versions: Number of updates.
    """
    from tepo_megatron.actor.actor import Actor
    from tepo_megatron.distributed import parallel
    from tepo_megatron.losses import build_objective
    from tepo_megatron.platform import activate
    from tepo_megatron.weights.gather import iterate_hf

    groups = parallel.initialize(cfg.parallel, activate("cpu"), cfg.seed)
    actor, objective, server = Actor.open(cfg, groups), build_objective(cfg.objective), Server(cfg)
    canaries = make_canaries(COUNT, 254, actor.arch.vocab_size, cfg.seed)
    scores = CanarySync(None, actor, None, canaries, groups).scores  # type: ignore[arg-type]
    judge = CanaryJudge(
        canaries, partial(allowed_difference, cfg=cfg.sync), same_precision=cfg.rollout.server.precision is None
    )
    history: list[State] = []
    rows: list[Row] = []
    for version in range(versions + 1):
        if version:
            actor.start_step(version)
            actor.update(replace(batch_of(version, actor.arch.vocab_size), update=0), objective)
        history.append({name: tensor.clone() for name, tensor in iterate_hf(actor.bindings, actor.arch, groups.tp)})
        for _ in range(1 if version else 2):
            judge.expect(version, scores())
        rows += questions(judge, server, canaries, history)
    kind = next(
        name
        for name, (trained, served) in KINDS.items()
        if (trained, served) == (cfg.model.precision, cfg.rollout.server.precision)
    )
    return [asdict(replace(row, kind=kind, rate=cfg.optimizer.lr)) for row in rows]


def questions(judge: CanaryJudge, server: Server, canaries: Canaries, history: list[State]) -> Iterator[Row]:
    """Ask a server with each fault, and then a healthy one, which the judge learns from.

    Args:
        judge: Judges the answers.
        server: Answers.
        canaries: The canaries.
        history: Weights of all versions; the last is the one that should be served.
    """
    version = len(history) - 1
    right, noise, cached_noise = server.answer(canaries, history[-1]), judge.noise, judge.cached_noise
    level, size = noise.level or 0.0, canaries.num_tokens
    if version > 2:
        ages = {"one version old": 1, "two versions old": 2, "first version": version}
        for name, plant in PLANTED.items():
            answer = server.answer(canaries, plant(history[-1], history, 1))
            moved, limit = float(np.abs(answer.logprobs_N - right.logprobs_N).mean()), noise.limit(size) + level
            verdict = copy.deepcopy(judge).examine("server", answer, version)
            named = None
            if name in ages:
                moved, limit = judge.distance(version, version - ages[name]), judge.distinct * level
                named = None if verdict.right else verdict.found == version - ages[name]
            yield Row("", 0.0, name, moved, level, limit, not verdict.right, named)
        answer = server.answer(canaries, history[-1], prefix=history[-2])
        moved, level = float(np.abs(answer.cached_M - right.cached_M).mean()), cached_noise.level or 0.0
        verdict = copy.deepcopy(judge).examine("server", answer, version)
        limit = cached_noise.limit(answer.cached_M.size) + level
        yield Row("", 0.0, PREFIX, moved, level, limit, not verdict.right, None if verdict.right else verdict.cached)
    verdict = judge.examine("server", right, version)
    yield Row("", 0.0, "none", verdict.diff, noise.level or 0.0, verdict.limit, not verdict.right, None)


def config(kind: str, rate: float, model: Path, folder: Path) -> Config:
    """Return the config of a run.

    Args:
        kind: A name in KINDS.
        rate: Learning rate, which determines how far versions are apart.
        model: Directory of the model.
        folder: Parent of the run's folder.
    """
    precision, served = KINDS[kind]
    sections: dict[str, dict[str, Any]] = {
        "optimizer": {"lr": rate, "warmup_steps": 0},
        "sync": {"max_logprob_diff": LIMIT},
        "training": {"max_tokens_per_microbatch": 256},
        "rollout": {"server": {"precision": served}},
    }
    cfg = w.run_config(model, folder, objective={"name": "grpo", "beta": None}, **sections)
    return replace(cfg, model=replace(cfg.model, precision=precision))


def trial(kind: str, rate: float, versions: int, model: Path, folder: Path) -> list[Row]:
    """Return the rows of one run.

    Args:
        kind, rate, model, folder: See `config`.
        versions: Number of updates.
    """
    found = run_world(1, ask, config(kind, rate, model, folder), versions, timeout=1800.0)[0]
    return [Row(**row) for row in found]


def ask_engine(engine: str, checks: int, folder: Path) -> Asked:
    """Ask two healthy servers of an engine at least this many times, at each update and in between.

    Args:
        engine: vllm or sglang.
        checks: Number of questions.
        folder: Folder of model and logs.
    """
    found = Asked(engine)
    folder.mkdir(mode=0o700)  # servers read weights from folders of this mode alone
    with trainer(engine, folder, {"kind": "", "first": 0}, canary_every=0.1) as it:
        for size in itertools.cycle((1e-6, 1e-4, 1e-2, 0.0)):
            metrics = it.fleet.canary_metrics()
            worst = max(found.worst, metrics.get("canary/diff_worst", 0.0))
            found = Asked(
                engine, found.checks + int(metrics["canary/checks"]), found.wrong + int(metrics["canary/wrong"]), worst
            )
            if found.checks >= checks:
                return found
            it.change(size)
            it.deliver()
            time.sleep(0.5)
    raise AssertionError("the cycle has no end")


def table(rows: list[Row], engines: list[Asked]) -> str:
    """Return the results as tables of Markdown.

    Args:
        rows: Results with the model in PyTorch.
        engines: Results with real engines.
    """
    lines = ["| precision | fault | above the limit | found | below | found | named rightly |", "|---|---|---|---|---|---|---|"]
    for kind in KINDS:
        for fault in (*PLANTED, PREFIX):
            of_it = [row for row in rows if (row.kind, row.fault) == (kind, fault)]
            above, below = ([r.found for r in of_it if (r.moved > r.limit) == is_above] for is_above in (True, False))
            named = [row.named for row in of_it if row.named is not None]
            counts = f"{len(above)} | {sum(above)} | {len(below)} | {sum(below)} | {sum(named)} of {len(named)}"
            lines.append(f"| {kind} | {fault} | {counts} |")
    lines += ["", "Found of planted, by the size of the fault over the noise:", ""]
    lines += [
        "| size / noise | " + " | ".join(f"{kind}: {what}" for kind in KINDS for what in ("stale", "in part", "prefix")) + " |"
    ]
    lines += ["|---" * (1 + 3 * len(KINDS)) + "|"]
    for low, high in itertools.pairwise(EDGES):
        cells = []
        for kind in KINDS:
            in_bin = [r for r in rows if r.kind == kind and r.fault != "none" and r.noise and low <= r.moved / r.noise < high]
            parts = [name for name in PLANTED if name not in WHOLE]
            for faults in (WHOLE, parts, (PREFIX,)):
                found = [row.found for row in in_bin if row.fault in faults]
                cells.append(f"{sum(found)} of {len(found)}" if found else "")
        lines.append(f"| {low:g} to {high:g} | {' | '.join(cells)} |")
    lines += [""]
    for kind in KINDS:
        healthy = [row for row in rows if (row.kind, row.fault) == (kind, "none")]
        if healthy:
            worst, alarms = max(row.moved for row in healthy), sum(row.found for row in healthy)
            lines.append(f"* Healthy, {kind}: {len(healthy)} checks, {alarms} false alarms, largest mean {worst:.1e} nats.")
    for asked in engines:
        name = {"vllm": "vLLM", "sglang": "SGLang"}[asked.engine]
        result = f"{asked.checks} checks, {asked.wrong} false alarms, largest mean {asked.worst:.1e} nats"
        lines.append(f"* Healthy, two real servers of {name}, fp32: {result}.")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, help="JSON lines, one for each question; it goes on after the runs in it"
    )
    parser.add_argument("--table", type=Path, help="Markdown file that the tables are written to")
    parser.add_argument("--versions", type=int, default=35, help="updates of each run")
    parser.add_argument("--checks", type=int, default=500, help="questions to healthy servers of each engine")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    said = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    rows = [Row(**line) for line in said if "kind" in line]
    engines = [Asked(**line) for line in said if "engine" in line]
    done = {(row.kind, row.rate) for row in rows} | {(asked.engine, 0.0) for asked in engines}
    with tempfile.TemporaryDirectory(prefix="canaries-") as name, args.out.open("a") as file:
        model = w.write_inputs(Path(name) / "model")
        for number, (kind, rate) in enumerate(itertools.product(KINDS, RATES)):
            if (kind, rate) not in done:
                rows += (found := trial(kind, rate, args.versions, model, Path(name) / str(number)))
                file.writelines(json.dumps(asdict(row)) + "\n" for row in found)
                file.flush()
        for engine in ("vllm", "sglang"):
            if (engine, 0.0) not in done:
                engines.append(ask_engine(engine, args.checks, Path(name) / engine))
                file.write(json.dumps(asdict(engines[-1])) + "\n")
    if args.table is not None:
        args.table.write_text(f"# Canaries: power against planted faults\n\n{EXPLANATION}\n\n{table(rows, engines)}")
    print(table(rows, engines))
    missed = [row for row in rows if row.fault != "none" and row.moved > row.limit and not row.found]
    alarms = [row for row in rows if row.fault == "none" and row.found]
    for row in missed + alarms:
        print("MISSED" if row in missed else "FALSE ALARM", row)
    return int(bool(missed or alarms or any(asked.wrong for asked in engines)))


if __name__ == "__main__":
    sys.exit(main())
