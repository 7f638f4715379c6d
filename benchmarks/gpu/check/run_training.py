"""Part `training`: two optimizer steps of one rank, in each precision, against the fp64 reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.check.lines import Check, Skip
from benchmarks.gpu.check.parts import FP8, WITHOUT_LOGITS
from benchmarks.gpu.check.worlds import TrainingJob, World, train
from tepo_megatron.actor import kernels, precision
from tests.parallel import cases

# sizes of the FP8 model: multiples of 128
WIDE: dict[str, Any] = {"scale": 1.0, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def prepare(check: Check) -> tuple[cases.Case, World]:
    """Start the rank, and compute the reference's results while it imports."""
    world, folder = World(check.folder, 1, staged=False), check.folder / "training"
    folder.mkdir(exist_ok=True)
    return cases.make_case(folder, tied=True), world


def run(check: Check, prepared: tuple[cases.Case, World]) -> None:
    """Train in each precision that runs here."""
    case, world = prepared
    fused = {"logits_budget_mib": 0}
    jobs = [TrainingJob(name, case, {}, name, {}) for name in ("fp32", "bf16")]
    jobs += [TrainingJob(f"{name}, {WITHOUT_LOGITS}", case, {}, name, fused) for name in ("fp32", "bf16")]
    train(check, jobs + _fp8(check, check.folder / "training/wide"), staged=False, world=world)


def _fp8(check: Check, folder: Path) -> list[TrainingJob]:
    """Return the jobs of the presets that run here, and report the others."""
    here = kernels.hardware(torch.device(check.platform))
    names = []
    for name in FP8:
        reason = precision.refusal(name, here)  # type: ignore[arg-type]
        with check.line(name):
            if reason is not None:
                raise Skip(reason)
            names.append(name)
    if not names:
        return []
    folder.mkdir(exist_ok=True)
    case = cases.make_case(folder, tied=True, **WIDE)
    return [TrainingJob(name, case, {}, name, {}) for name in names]
