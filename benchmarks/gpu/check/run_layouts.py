"""Part `layouts`: each parallel layout of at most 4 ranks, all ranks on one device, against the fp64 reference."""

from __future__ import annotations

from benchmarks.gpu.check.lines import Check
from benchmarks.gpu.check.parts import LAYOUTS, WITHOUT_LOGITS
from benchmarks.gpu.check.worlds import TrainingJob, World, train
from tests.parallel import cases

RANKS = 4  # of the largest layout


def prepare(check: Check) -> tuple[cases.Case, World]:
    """Start the ranks, and compute the reference's results while they import."""
    world, folder = World(check.folder, RANKS, staged=True), check.folder / "layouts"
    folder.mkdir(exist_ok=True)
    return cases.make_case(folder, tied=True), world


def run(check: Check, prepared: tuple[cases.Case, World]) -> None:
    """Train every layout in fp32 and in bf16."""
    case, world = prepared
    jobs = [TrainingJob(f"fp32, {name}", case, cases.LAYOUTS[name], "fp32", {}) for name in LAYOUTS]
    jobs += [TrainingJob(f"fp32, DP2, {WITHOUT_LOGITS}", case, cases.LAYOUTS["DP2"], "fp32", {"logits_budget_mib": 0})]
    overlaps = {"overlap_grad_reduce": True, "overlap_param_gather": True}  # as on `cuda`
    jobs += [TrainingJob("fp32, DP2, overlapped", case, cases.LAYOUTS["DP2"], "fp32", {}, overlaps)]
    jobs += [TrainingJob(f"bf16, {name}", case, cases.LAYOUTS[name], "bf16", {}) for name in LAYOUTS]
    train(check, jobs, staged=True, world=world)
