"""Parts `training` and `layouts`: two optimizer steps against the fp64 reference.

`training` has one rank, in each precision; `layouts` each parallel layout of at most 4 ranks, all of them on one device.
"""

from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.check.lines import Check, Skip
from benchmarks.gpu.check.parts import FP8, LAYOUTS, WITHOUT_LOGITS
from benchmarks.gpu.check.worlds import TrainingJob, World, train
from tepo_megatron.actor import kernels, precision
from tests.parallel import cases

# sizes of the FP8 model: multiples of 128
WIDE: dict[str, Any] = {"scale": 1.0, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


RANKS = {"training": 1, "layouts": 4}  # of the largest layout


def prepare(check: Check) -> tuple[cases.Case, World]:
    """Start the ranks, and compute the reference's results while they import."""
    size, folder = RANKS[check.task], check.folder / check.task
    world = World(check.folder, size, staged=size > 1)
    folder.mkdir(exist_ok=True)
    return cases.make_case(folder, tied=True), world


def run(check: Check, prepared: tuple[cases.Case, World]) -> None:
    """Train in each precision that runs here, or every layout in fp32 and in bf16."""
    case, world = prepared
    jobs = _layouts(case) if check.task == "layouts" else _precisions(check, case)
    train(check, jobs, staged=check.task == "layouts", world=world)


def _layouts(case: cases.Case) -> list[TrainingJob]:
    jobs = [TrainingJob(f"fp32, {name}", case, cases.LAYOUTS[name], "fp32", {}) for name in LAYOUTS]
    jobs += [TrainingJob(f"fp32, DP2, {WITHOUT_LOGITS}", case, cases.LAYOUTS["DP2"], "fp32", {"logits_budget_mib": 0})]
    overlaps = {"overlap_grad_reduce": True, "overlap_param_gather": True}  # as on `cuda`
    jobs += [TrainingJob("fp32, DP2, overlapped", case, cases.LAYOUTS["DP2"], "fp32", {}, overlaps)]
    return jobs + [TrainingJob(f"bf16, {name}", case, cases.LAYOUTS[name], "bf16", {}) for name in LAYOUTS]


def _precisions(check: Check, case: cases.Case) -> list[TrainingJob]:
    fused = {"logits_budget_mib": 0}
    jobs = [TrainingJob(name, case, {}, name, {}) for name in ("fp32", "bf16")]
    jobs += [TrainingJob(f"{name}, {WITHOUT_LOGITS}", case, {}, name, fused) for name in ("fp32", "bf16")]
    return jobs + _fp8(check, check.folder / "training/wide")


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
