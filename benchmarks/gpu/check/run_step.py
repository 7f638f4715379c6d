"""Part `step`: a training step of a random Qwen3 of 1.7 B parameters, with and without training.logits_budget_mib.

Its seconds and its memory are reported next to the prediction of `tepo plan`.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import yaml

from benchmarks.gpu.check.lines import Check
from benchmarks.gpu.check.model import LENGTHS, random_model, run_tree
from benchmarks.gpu.step import OLD, PLANNED, UPDATES, measured
from tepo_megatron.config.io import load_config
from tepo_megatron.plan.command import PlanRequest, predictor_of
from tepo_megatron.plan.gpus import GIB, GPUS
from tepo_megatron.plan.memory import TrainerMemory

BUDGETS = {"logits kept": "null", "logits_budget_mib 512": "512"}
NOT_ALLOCATED = ("fragmentation", "context, NCCL")  # parts of the plan that PyTorch's allocator does not count as tensors


def run(check: Check) -> None:
    """Measure the step with each budget."""
    config = check.folder / "step.yaml"
    config.write_text(yaml.safe_dump(run_tree(check, random_model(check))))
    prompt, response, *_ = LENGTHS[check.platform]
    gpu = plan_name(torch.cuda.get_device_name(0)) if check.on_gpu else "H100"
    args = argparse.Namespace(
        config=str(config), prompt=prompt, response=response, steps=2, gpu=gpu, timeout=check.left / len(BUDGETS)
    )
    for name, budget in BUDGETS.items():
        with check.line(*(f"{what}, {name}" for what in (OLD, UPDATES, "memory"))):
            _step(check, name, args, ["--training.logits_budget_mib", budget])


def plan_name(device: str) -> str:
    """Return the GPU in the plan's table that matches the device's name; H100 for other devices."""
    return next((name for name in GPUS if name in device), "H100")


def _step(check: Check, name: str, args: argparse.Namespace, overrides: list[str]) -> None:
    found = measured(args, overrides, "bf16")
    rate = found.tokens / sum(found.seconds.values())
    for phase in PLANNED:
        why = f"planned {found.planned[phase]:.3g} s on an {args.gpu}; {rate:.0f} tokens/s in both phases"
        more: dict[str, Any] = {"planned": found.planned[phase], "tokens": found.tokens, "noise": found.noise}
        check.report(f"{phase}, {name}", "measured", found.seconds[phase], "s", why, **more)
    cfg = load_config(args.config, [*overrides, "--model.precision", "bf16"])
    predictor = predictor_of(cfg, PlanRequest(gpu=args.gpu, prompt=args.prompt, response=args.response))
    parts = TrainerMemory.of(cfg, predictor.model).state().parts
    planned = sum(size for part, size in parts.items() if part not in NOT_ALLOCATED) / GIB
    why = f"allocated at most; planned {planned:.3g} GiB without {' and '.join(NOT_ALLOCATED)}"
    line = f"memory, {name}"
    if found.peak_gib is None:
        check.report(line, "skipped", unit="GiB", why=f"only on a GPU; {why}", planned=planned)
    else:
        check.report(line, "measured", found.peak_gib, "GiB", why, planned=planned)
