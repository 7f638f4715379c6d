"""Compare the predictions of `tepo plan` with runs that others published: `python -m benchmarks.plan`.

All rows use one set of assumptions (`tepo_megatron/doctor/plan/inputs.py`). `note` says what a source leaves out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tepo_megatron.base.hardware import GPUS
from tepo_megatron.config import Config
from tepo_megatron.config.io import validate
from tepo_megatron.doctor.plan.activations import Recompute
from tepo_megatron.doctor.plan.command import read_model
from tepo_megatron.doctor.plan.inputs import PlannedModel, Workload
from tepo_megatron.doctor.plan.roofline import Predictor

DGXC = "NVIDIA/dgxc-benchmarking, llama3.1/README_{}.md, commit 143b90d"
BRIDGE = "NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md, commit 00b7660"
NEMO_RL = "NVIDIA-NeMo/RL, docs/about/performance-summary.md, commit 06beed9"


@dataclass(frozen=True)
class PublishedRun:
    """One published run."""

    what: str
    source: str
    seconds: float
    model: str
    parallel: Mapping[str, Any]
    batch: int
    sequence: int  # largest length of a sequence in tokens
    tokens: int
    precision: str = "bf16"
    recompute: Recompute = "none"
    rollout: Mapping[str, Any] | None = None  # keys of that section of the config; None: plain training on full sequences
    updates: int = 1
    mean: tuple[int, int] = (0, 0)  # mean tokens of prompts and responses
    note: str = ""
    server: Mapping[str, Any] = field(default_factory=dict)


_8B = {"cp": 2, "dp": 4}
_70B = {"tp": 4, "pp": 4, "cp": 2, "vpp": 5, "dp": 2, "sequence_parallel": True}
_FP8 = "fp8-blockwise"
_GRPO = {"prompts_per_step": 64, "samples_per_prompt": 32, "colocate": True}
ROWS = [
    PublishedRun("Llama 3.1 8B, training, BF16, 8 H100", DGXC.format("8b"), 12.91, "Llama-3.1-8B", _8B, 128, 8192, 8192),
    PublishedRun("Llama 3.1 8B, training, FP8, 8 H100", DGXC.format("8b"), 9.67, "Llama-3.1-8B", _8B, 128, 8192, 8192, _FP8),
    PublishedRun("Llama 3.1 70B, training, BF16, 64 H100", DGXC.format("70b"), 14.72, "Llama-3.1-70B", _70B, 128, 8192, 8192),
    PublishedRun(
        "Llama 3.1 70B, training, FP8, 64 H100", DGXC.format("70b"), 11.01, "Llama-3.1-70B", _70B, 128, 8192, 8192, _FP8,
    ),
    PublishedRun(
        "Qwen3-30B-A3B, training, FP8, 16 H100", BRIDGE, 24.85, "Qwen3-30B-A3B",
        {"pp": 2, "vpp": 24, "ep": 8, "dp": 8}, 512, 4096, 8192, _FP8,
        note="512 x 4096 tokens / (5275 tokens/s/GPU x 16); `Assumptions.experts` was chosen with this row",
    ),
    PublishedRun(
        "Llama 3.1 8B, GRPO, BF16, 16 H100", NEMO_RL, 97.7, "Llama-3.1-8B", {"pp": 2, "dp": 8}, 512, 4096, 4096,
        recompute="full", rollout=_GRPO | {"servers": 16}, updates=4, mean=(100, 960),
        note="packed to 4096 tokens; prompts of 100 tokens assumed",
    ),
    PublishedRun(
        "Qwen3-32B, GRPO, BF16, 32 H100", NEMO_RL, 393.0, "Qwen3-32B",
        {"tp": 4, "pp": 4, "dp": 2, "sequence_parallel": True}, 512, 4096, 4096,
        rollout=_GRPO | {"servers": 8}, server={"tp": 4}, updates=4, mean=(100, 3106),
        note="packed to 4096 tokens; prompts of 100 tokens assumed",
    ),
    PublishedRun(
        "Qwen3-30B-A3B, GRPO, BF16, 32 H100", NEMO_RL, 225.0, "Qwen3-30B-A3B",
        {"tp": 2, "ep": 8, "dp": 16, "sequence_parallel": True}, 512, 4096, 4096,
        rollout=_GRPO | {"servers": 8}, server={"tp": 4}, updates=4, mean=(100, 3054),
        note="packed to 4096 tokens; prompts of 100 tokens assumed",
    ),
]  # fmt: skip


def config_of(row: PublishedRun) -> Config:
    """Return the row as a config of ours."""
    rollout = dict(row.rollout or {"prompts_per_step": row.batch // 2, "samples_per_prompt": 2})
    samples = rollout["samples_per_prompt"]
    return validate({
        "name": "published",
        "model": {"path": row.model, "precision": row.precision},
        "data": {"train": "unused", "max_prompt_tokens": max(1, row.mean[0])},
        "parallel": dict(row.parallel),
        "rollout": rollout | {
            "max_response_tokens": row.sequence - max(1, row.mean[0]),
            "server": dict(row.server) | {"concurrency": 1024},
        },
        "training": {
            "epochs": 1, "minibatch_prompts": row.batch // samples, "max_tokens_per_microbatch": row.tokens,
        },
        "objective": {"ref_kl": {"beta": 0.01} if row.rollout else None},  # NeMo-RL's default
        "sync": {"transport": {"folder": "weights"}},
    })  # fmt: skip


def predicted_seconds(row: PublishedRun) -> float:
    """Return the predicted seconds of a step, with the common assumptions."""
    family, arch = read_model(row.model)
    work = Workload(*row.mean, row.sequence - row.mean[0]) if row.rollout else Workload(0, row.sequence, row.sequence)
    predictor = Predictor(config_of(row), PlannedModel(family, arch, recompute=row.recompute), GPUS["H100"], work)
    if row.rollout is not None:
        return predictor.step().seconds
    update = predictor.pass_seconds([row.sequence] * row.batch, 1, row.tokens, backward=True)
    return update + sum(predictor.optimizer_seconds())


def main() -> None:
    """Print the table in docs/plan.md."""
    print("| what | published, s | predicted, s | predicted / published | source |", "|---|---:|---:|---:|---|", sep="\n")
    for row in ROWS:
        seconds = predicted_seconds(row)
        print(f"| {row.what} | {row.seconds:g} | {seconds:.1f} | {seconds / row.seconds:.2f} | {row.source} |")


if __name__ == "__main__":
    main()
