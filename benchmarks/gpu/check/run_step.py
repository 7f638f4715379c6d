"""Part `step`: a training step of a random Qwen3 of 1.7 B parameters, with and without training.logits_budget_mib.

Its seconds and its memory are reported next to the prediction of `tepo plan`.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import yaml

from benchmarks.gpu.check.lines import Check
from benchmarks.gpu.check.machine import unknown_card
from benchmarks.gpu.check.model import LENGTHS, random_model, run_tree
from benchmarks.gpu.step import NOT_ALLOCATED, OLD, PLANNED, UPDATES, gpu_here, measured

BUDGETS = {"logits kept": "null", "logits_budget_mib 512": "512"}


def run(check: Check) -> None:
    """Measure the step with a budget."""
    with check.line(*(f"{what}, {check.task}" for what in (OLD, UPDATES, "memory"))):
        config = check.folder / f"step-{BUDGETS[check.task]}.yaml"
        config.write_text(yaml.safe_dump(run_tree(check, random_model(check))))
        prompt, response, *_ = LENGTHS[check.platform]
        gpu = gpu_here(check.platform)
        args = argparse.Namespace(config=str(config), prompt=prompt, response=response, steps=2, gpu=gpu, timeout=check.left)
        step = measured(args, ["--training.logits_budget_mib", BUDGETS[check.task]], "bf16")
        rate = f"{step.tokens / sum(step.seconds.values()):.0f} tokens/s in both phases"
        for phase in PLANNED:
            planned = step.planned[phase] if step.planned else None
            why = unknown_card(torch.cuda.get_device_name(0)) if planned is None else f"planned {planned:.3g} s on an {gpu}"
            more: dict[str, Any] = {"planned": planned, "tokens": step.tokens, "noise": step.noise}
            check.report(f"{phase}, {check.task}", "measured", step.seconds[phase], "s", f"{why}; {rate}", **more)
        why = f"allocated at most; planned {step.planned_gib:.3g} GiB without {' and '.join(NOT_ALLOCATED)}"
        line = f"memory, {check.task}"
        if step.peak_gib is None:
            check.report(line, "skipped", unit="GiB", why=f"only on a GPU; {why}", planned=step.planned_gib)
        else:
            check.report(line, "measured", step.peak_gib, "GiB", why, planned=step.planned_gib)
