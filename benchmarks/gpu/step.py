"""Measure a config's training step on this machine's GPUs, in several precisions, next to the prediction of `tepo plan`.

    python -m benchmarks.gpu.step CONFIG [--precisions bf16 fp8-current fp8-blockwise] [--steps 3] [--gpu NAME]
        [--prompt TOKENS] [--response TOKENS] [--out benchmarks/results/gpu_step.json] [--section.key VALUE ...]

model.path is a Hugging Face checkpoint; its weights matter only for log-probs. Sequences are random tokens, of the lengths that
`tepo plan` assumes for the config, and no engine runs. Each precision has a world of its own, with as many ranks as the
layout has. One step is not timed. The columns:

    old log-probs, updates   median seconds of a step, and in brackets the plan's prediction
    tokens/s                 of prompts and responses, over both phases
    memory                   peak GiB allocated, on the rank with the largest peak
    log-prob                 |difference| to the first precision under the same weights: mean and largest, in nats
    noise of dH              99 % of the entropies change by less if the sequences are packed differently

It has not been run on a GPU so far. It also runs on platform cpu, which tests it (tests/parallel/test_bench_gpu_step.py).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks._ranks import Ranks
from benchmarks.gpu._step_rank import OLD, UPDATES
from benchmarks.gpu.check.machine import card_of
from benchmarks.results import ROOT, surroundings
from tepo_megatron.actor.kernels import choose, installed
from tepo_megatron.config.io import load_config
from tepo_megatron.plan.command import PlanRequest, predictor_of
from tepo_megatron.plan.gpus import GIB, GPUS
from tepo_megatron.plan.memory import TrainerMemory

PRECISIONS = ("bf16", "fp8-current", "fp8-blockwise")
NOT_ALLOCATED = ("fragmentation", "context, NCCL")  # parts of the plan that PyTorch's allocator does not count as tensors
PLANNED = {OLD: ("old log-probs",), UPDATES: ("forward and backward", "gradients and weights over dp", "optimizer")}


@dataclass(frozen=True)
class StepResult:
    """The result of one precision.

    Attributes:
        planned: Predicted seconds by phase; None for a GPU that `tepo plan` does not know.
        planned_gib: Predicted memory without NOT_ALLOCATED.
        peak_gib: Peak memory; None without a GPU.
        noise: Noise of dH in nats.
    """

    seconds: dict[str, float]
    planned: dict[str, float] | None
    planned_gib: float
    tokens: int
    peak_gib: float | None
    noise: float | None
    logprobs_N: Tensor


def measured(args: argparse.Namespace, overrides: Sequence[str], precision: str) -> StepResult:
    """Run the ranks. Raises CalledProcessError if they fail; their output has been shown then."""
    words = overrides_here(args.config, [*overrides, "--model.precision", precision], installed())
    cfg = load_config(args.config, words)
    gpu = args.gpu or gpu_here(cfg.platform)
    predictor = predictor_of(cfg, PlanRequest(gpu=gpu or next(iter(GPUS)), prompt=args.prompt, response=args.response))
    asked = {
        "config": args.config, "overrides": words, "prompt": args.prompt, "response": args.response, "steps": args.steps,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="step-") as folder:
        words = ["-m", "benchmarks.gpu._step_rank", str(os.getpid()), json.dumps(asked | {"folder": folder})]
        with Ranks(cfg.parallel.world_size, words) as ranks:
            ranks.wait(args.timeout)
        found_json = json.loads(Path(folder, "found.json").read_text())
        logprobs_N = torch.load(Path(folder, "logprobs.pt"))
    phases, memory = predictor.step().phases, TrainerMemory.of(cfg, predictor.model).state().parts
    return StepResult(
        seconds={name: statistics.median(taken) for name, taken in found_json["seconds"].items()},
        planned={name: sum(phases[phase] for phase in PLANNED[name]) for name in PLANNED} if gpu else None,
        planned_gib=sum(size for part, size in memory.items() if part not in NOT_ALLOCATED) / GIB,
        tokens=found_json["tokens"],
        peak_gib=found_json["peak_gib"],
        noise=found_json["noise"],
        logprobs_N=logprobs_N,
    )


def overrides_here(config: str, overrides: list[str], found: frozenset[str]) -> list[str]:
    """Return the overrides, with PyTorch's attention where the layers are PyTorch's: `tepo plan` takes `auto` for the images'
    Transformer Engine, whose attention needs less memory.
    """
    cfg = load_config(config, overrides)
    layers = choose(cfg.model, cfg.megatron, cfg.platform, found, cp=cfg.parallel.cp).layers
    return [*overrides, *(["--model.attention", "sdpa"] if layers == "torch" else [])]


def gpu_here(platform: str) -> str | None:
    """Return the GPU of the plan's table that is here, None for another one. On platform cpu, which tests this, any will do."""
    return card_of(torch.cuda.get_device_name(0)) if platform == "cuda" else next(iter(GPUS))


def as_object(found: StepResult, first: StepResult) -> dict[str, Any]:
    """Return the result as it is written to JSON."""
    apart = (found.logprobs_N - first.logprobs_N).abs()
    return {
        "seconds": found.seconds, "planned": found.planned, "tokens_per_second": found.tokens / sum(found.seconds.values()),
        "peak_gib": found.peak_gib, "noise": found.noise,
        "logprob_mean": apart.mean().item(), "logprob_max": apart.max().item(),
    }  # fmt: skip


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return the results as a Markdown table."""
    rows = [["", OLD, UPDATES, "tokens/s", "memory, GiB", "log-prob: mean", "largest", "noise of dH"]]
    rows.append(["---"] * len(rows[0]))
    for name, x in results.items():
        planned = {phase: f" ({x['planned'][phase]:.3g})" if x["planned"] else "" for phase in PLANNED}
        seconds = [f"{x['seconds'][phase]:.3g} s{planned[phase]}" for phase in PLANNED]
        memory, noise = ("-" if x[k] is None else f"{x[k]:.3g}" for k in ("peak_gib", "noise"))
        apart = [f"{x[k]:.1e}" for k in ("logprob_mean", "logprob_max")]
        rows.append([name, *seconds, f"{x['tokens_per_second']:.0f}", memory, *apart, noise])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    """Measure each precision, print the table and write the file."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--gpu", help="of the plan (default: the one that is here)")
    parser.add_argument("--prompt", type=int, help="tokens of a prompt (default: as `tepo plan` assumes)")
    parser.add_argument("--response", type=int, help="tokens of a response on average (default: as `tepo plan` assumes)")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds of a precision (default: %(default)g)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu_step.json")
    args, overrides = parser.parse_known_args()
    found = {name: measured(args, overrides, name) for name in args.precisions}
    results = {name: as_object(x, found[args.precisions[0]]) for name, x in found.items()}
    print(table(results))
    args.out.write_text(
        json.dumps({"config": args.config, "overrides": overrides, "results": results} | surroundings(), indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
