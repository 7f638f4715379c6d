"""The actor on GPUs, ranks over NCCL: the optimizer steps of tests/parallel/test_layouts.py on every layout that this machine
has GPUs for, against the independent fp64 reference. In fp32 as on the CPU, but for the order in which a GPU adds up; in bf16
near it. Not run so far.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.config import Config
from tepo_megatron.config.io import plain, validate
from tests.parallel import cases
from tests.processes import run_processes

TOLERANCE = 1e-4  # for fp32, per tensor


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> cases.Case:
    return cases.make_case(tmp_path_factory.mktemp("case"), tied=True)


def config(case: cases.Case, layout: str, **model: Any) -> Config:
    tree = plain(cases.run_config(case.model, cases.LAYOUTS[layout])) | {"platform": "cuda"}
    tree["model"] |= model
    cfg = validate(tree)
    if cfg.parallel.world_size > torch.cuda.device_count():
        pytest.skip(f"{layout} takes {cfg.parallel.world_size} GPUs, and {torch.cuda.device_count()} are here")
    return cfg


def trained(case: cases.Case, cfg: Config, folder: Path) -> list[list[dict[str, Any]]]:
    return run_processes(cfg.parallel.world_size, cases.train_steps, cfg, case.batches, folder=folder)


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_fp32_equals_the_reference(case: cases.Case, layout: str, tmp_path: Path) -> None:
    cfg = config(case, layout, precision="fp32", attention="sdpa")
    name, most = cases.worst_of(cases.errors(trained(case, cfg, tmp_path), case.steps))
    assert most <= TOLERANCE, f"{name} differ by {most:.1e}"


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_bf16_is_near_it(case: cases.Case, layout: str, tmp_path: Path) -> None:
    """Transformer Engine's modules are used where it is installed."""
    ranks = trained(case, config(case, layout, precision="bf16"), tmp_path)
    apart, norm = cases.nearness(ranks, case.steps)
    assert apart < 0.05 and norm < 0.1
