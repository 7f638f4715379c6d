"""The recipes of distillation with a real server: a student that was shaken comes back to its teacher, whatever its rewards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.conftest import Command, settings

pytestmark = [pytest.mark.server, pytest.mark.e2e, pytest.mark.full]
STEPS = 10


def shaken(base: Path, folder: Path) -> Path:
    """Return a copy of the base model with noise on its matrices."""
    shutil.copytree(base, folder)
    generator, (path,) = torch.Generator().manual_seed(0), folder.glob("*.safetensors")
    tensors = load_file(path)
    for tensor in tensors.values():
        if tensor.dim() > 1:
            tensor.add_(0.5 * tensor.std() * torch.randn(tensor.shape, generator=generator))
    save_file(tensors, path, {"format": "pt"})
    return folder


@pytest.mark.parametrize("recipe", ["distill", "distill_full"])
def test_the_student_comes_back_to_its_teacher(tepo: Callable[..., Command], base: Path, tmp_path: Path, recipe: str) -> None:
    student, run = shaken(base, tmp_path / "student"), tmp_path / "runs" / "distilled"
    keys = {
        "output": run.parent, "name": "distilled", "objective__ref_kl__path": base, "training__steps": STEPS,
        "optimizer__lr": 3e-4, "optimizer__warmup_steps": 0, "evaluation__max_problems": 16,
    }  # fmt: skip
    command = tepo("train", f"examples/{recipe}.yaml", *settings(student, **keys))
    assert command.wait(240) == 0, command.output
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    assert all(r["rollout/kept_groups"] == 32 for r in records), "no group is dropped for its rewards"
    first, last = (sum(r["loss/ref_kl"] for r in part) / 2 for part in (records[:2], records[-2:]))
    assert last < 0.6 * first
