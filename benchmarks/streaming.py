"""Measure what `training.stream` saves of a step whose responses have the lengths of DAPO, against the other ways to overlap.

    python -m benchmarks.streaming [--steps 8] [--loads 3] [--out FILE]

Everything but the engine is real: the rollout service, grading, one training rank, updates, weights. The engine is simulated: a
response is random text and a boxed answer, and takes the time of its tokens. Lengths are lognormal (sigma 0.7), cut off at 4
times their mean, which stands for the 20,480 tokens of DAPO at a hundredth of the size. DAPO, too, has 16 samples a prompt and
16 minibatches a batch (arXiv 2503.14476, Section 4.1). The seconds of a token are set so that sampling takes a given multiple
of training, which is measured first.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import ROOT, commit, machine
from tepo_megatron.config import Config
from tepo_megatron.config.io import validate
from tepo_megatron.observability import run_dir
from tepo_megatron.observability.sinks import read_metrics
from tepo_megatron.platform import activate
from tepo_megatron.types import Prompt, Rollout, SamplingParams
from tests.e2e.scripted_worker import ScriptedEngine
from tests.tiny import tiny_qwen3

OUT = ROOT / "benchmarks/results/streaming.md"
PROMPTS, SAMPLES, MINIBATCH = 32, 16, 2
MEDIAN, LONGEST, SIGMA = 42, 204, 0.7  # tokens of a response; the mean is 53
WARM_UP = 2  # steps
TARGET = 0.75
# name -> keys of the config
WAYS: dict[str, dict[str, Any]] = {
    "whole batches": {},
    "streamed by prompt": {"training": {"stream": "prompt"}},
    "streamed by arrival": {"training": {"stream": "arrival"}},
    "one step ahead": {"rollout": {"max_staleness": 1}},
    "one step ahead, streamed by arrival": {"rollout": {"max_staleness": 1}, "training": {"stream": "arrival"}},
}
# name -> (sampling over training, share of the samples that are sampled at once)
LOADS = {
    "sampling takes 7/3 of training, all at once": (7 / 3, 1.0),
    "sampling takes 7/3 of training, a quarter at once": (7 / 3, 0.25),
    "sampling takes as long as training, all at once": (1.0, 1.0),
}


class TimedGroups:
    """A `GroupStream` that returns a group once its longest response would be complete.

    Args:
        token_seconds: Seconds of a token.
    """

    def __init__(self, engine: TimedEngine, token_seconds: float, slots: int) -> None:
        self._engine, self._token_seconds = engine, token_seconds
        self._free = [0.0] * slots  # when each slot is free
        self._groups: list[tuple[float, int, list[Rollout]]] = []

    def add(self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> None:
        """See `GroupStream.add`."""
        now = time.monotonic()
        for prompt in prompts:
            group = [self._engine.respond(prompt, f"{seed}/{prompt.id}/{i}") for i in range(sampling.samples)]
            ends = []
            for rollout in group:
                start = max(now, heapq.heappop(self._free))
                ends.append(start + rollout.response_length * self._token_seconds)
                heapq.heappush(self._free, ends[-1])
            heapq.heappush(self._groups, (max(ends), prompt.id, group))

    def next(self) -> list[Rollout] | None:
        """See `GroupStream.next`."""
        if not self._groups:
            return None
        there, _, group = heapq.heappop(self._groups)
        time.sleep(max(0.0, there - time.monotonic()))
        return group

    def close(self) -> None:
        """See `GroupStream.close`."""
        self._groups = []


class TimedEngine(ScriptedEngine):
    """An engine whose responses are random text. Its log-probs are those of no model.

    Args:
        token_seconds, slots: See `TimedGroups`.
    """

    def __init__(self, cfg: Config, token_seconds: float, slots: int) -> None:
        super().__init__(cfg)
        self._token_seconds, self._slots = token_seconds, slots

    def open(self) -> Any:
        """Return the stream of groups."""
        return TimedGroups(self, self._token_seconds, self._slots)

    def respond(self, prompt: Prompt, seed: str) -> Rollout:
        """Return a response, right in half of the cases."""
        draw = random.Random(seed)
        answer = f"\\boxed{{{prompt.answer if draw.random() < 0.5 else '99'}}}"
        end = [*self._tokenizer.encode(answer, add_special_tokens=False), self._tokenizer.eos_token_id]
        length = response_tokens(draw)
        text = [draw.randrange(30, 60) for _ in range(max(0, length - len(end)))]
        ids = torch.tensor([*prompt.token_ids, *text, *end])
        mask = torch.arange(ids.numel()) >= len(prompt.token_ids)
        return Rollout(prompt.id, ids, mask, -4.0 * mask, self.version, "stop", prompt.answer)


def main() -> None:
    """Make the runs of all loads, print the table and write it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.streaming", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=8, help="steps of a run; the first two are not counted")
    parser.add_argument("--loads", type=int, default=len(LOADS), help="number of loads, from the first on")
    parser.add_argument("--out", type=Path, default=OUT, help=f"the file; default {OUT.relative_to(ROOT)}")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_inputs(Path(folder) / "model")
        training = run(model, Path(folder) / "training", args.steps, {}, 1e-6, 1.0)["training"]
        found: dict[str, dict[str, dict[str, float]]] = {}
        for load, (ratio, share) in itertools.islice(LOADS.items(), args.loads):
            token_seconds = ratio * training / tokens_in_turn(share)
            for number, (way, keys) in enumerate(WAYS.items()):
                place = Path(folder) / f"{len(found)}-{number}"
                found.setdefault(load, {})[way] = run(model, place, args.steps, keys, token_seconds, share)
                print(load, way, json.dumps(found[load][way]), flush=True)
    text = markdown(found, training)
    args.out.write_text(text)
    print(text)


def tokens_in_turn(share: float) -> float:
    """Return the mean over some batches of the tokens that the last slot to finish samples one after the other."""
    found = []
    for seed in range(20):
        draw, free = random.Random(seed), [0] * slots_of(share)
        for _ in range(PROMPTS * SAMPLES):
            heapq.heappush(free, heapq.heappop(free) + response_tokens(draw))
        found.append(max(free))
    return statistics.mean(found)


def slots_of(share: float) -> int:
    """Return the number of responses that are sampled at once."""
    return max(1, round(share * PROMPTS * SAMPLES))


def response_tokens(draw: random.Random) -> int:
    """Draw the length of a response."""
    return min(LONGEST, round(draw.lognormvariate(0, SIGMA) * MEDIAN))


def write_inputs(folder: Path) -> Path:
    """Write a model with its prompts, and return its folder."""
    tiny_qwen3(folder, layers=4, hidden_size=96, intermediate_size=192)
    rows = [{"prompt": f"{i}+5=", "answer": str(i + 5)} for i in range(PROMPTS)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(model: Path, folder: Path, steps: int, keys: dict[str, Any], token_seconds: float, share: float) -> dict[str, float]:
    """Make one run; return the medians of its seconds per step, and the mean staleness of its samples.

    Args:
        token_seconds: Seconds of a token.
    """
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": str(model), "precision": "fp32"},
        "data": {"train": str(model / "train.jsonl"), "max_prompt_tokens": 16},
        "rollout": {
            "prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES, "max_response_tokens": LONGEST + 20,
            "filter_uniform_groups": False,
        },
        "objective": {"name": "grpo"},
        "training": {"steps": steps, "epochs": 1, "minibatch_prompts": MINIBATCH, "max_tokens_per_microbatch": 2048},
        "sync": {"max_logprob_diff": 1e9},
        "logging": {"noise_floor_every": 0},
    }  # fmt: skip
    for section, changes in keys.items():
        tree[section] |= changes
    cfg = validate({"name": "run", "output": str(folder), "platform": "cpu", "export_hf": False, **tree})
    run_dir.prepare(cfg)
    activate("cpu")  # before Megatron-Core is imported
    from tests.worlds import run_world

    run_world(1, _rank, cfg, token_seconds, slots_of(share), timeout=1800.0)
    rows: list[Any] = read_metrics(cfg.run_dir)[WARM_UP:]

    def median(*phases: str) -> float:
        return statistics.median(sum(row[f"seconds/{phase}"] for phase in phases) for row in rows)

    staleness = statistics.mean(row["rollout/staleness"] for row in rows)
    return {
        "step": median("total"), "sampling": median("rollout"), "training": median("old_stats", "update"),
        "wait": median("wait"), "staleness": staleness,
    }  # fmt: skip


def _rank(rank: int, cfg: Config, token_seconds: float, slots: int) -> None:
    import contextlib
    import io
    import os

    from tepo_megatron.train import train

    os.environ["TEPO_TEST_ENGINE"] = "good"
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()):
        make_engine: Any = functools.partial(TimedEngine, token_seconds=token_seconds, slots=slots)
        train(cfg, activate("cpu"), make_engine)


def markdown(found: dict[str, dict[str, dict[str, float]]], training: float) -> str:
    """Return the table.

    Args:
        training: Seconds of training a step, measured alone.
    """
    around = machine()
    lines = [
        "# Streamed minibatches",
        "",
        f"`python -m benchmarks.streaming`, on {around['cores']} cores ({around['cpu']}), at {commit()}.",
        f"The engine is simulated. Training alone takes {training:.2f} s a step. All times are medians in seconds.",
        f"The goal is a step of at most {TARGET} of that of whole batches, with a staleness of at most 1.",
        "",
    ]
    for load, ways in found.items():
        lines += [
            f"## {load[0].upper()}{load[1:]}",
            "",
            "| | step | of whole batches | sampling | training | waited | staleness |",
        ]
        lines.append("| --- | --- | --- | --- | --- | --- | --- |")
        whole = ways["whole batches"]["step"]
        for way, seconds in ways.items():
            lines.append(
                f"| {way} | {seconds['step']:.2f} | {seconds['step'] / whole:.2f} | {seconds['sampling']:.2f} | "
                f"{seconds['training']:.2f} | {seconds['wait']:.2f} | {seconds['staleness']:.2f} |"
            )
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
