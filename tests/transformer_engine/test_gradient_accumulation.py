"""`megatron.transformer.gradient_accumulation_fusion` where Transformer Engine is installed and Apex is not.

That is the default of `platform: cuda`. Megatron's own output layer asks for Apex's extension then;
`actor/modules.py` replaces it. test_training.py checks the gradients.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tepo_megatron.config import Config
from tests.transformer_engine import models
from tests.worlds import run_world


def _built(rank: int, cfg: Config) -> dict[str, bool]:
    """Return, by type of module, whether it adds gradients inside its products."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from tepo_megatron.distributed import parallel
    from tepo_megatron.platform import activate

    groups = parallel.initialize(cfg.parallel, activate("cpu"), cfg.seed)
    chunks: list[Any] = models.actor(cfg, replace(groups, device=torch.device("cuda", 0))).chunks
    found = {type(m).__name__: m.fuse_wgrad_accumulation for m in models.linear_modules(chunks)}
    megatrons = [m for chunk in chunks for m in chunk.modules() if isinstance(m, ColumnParallelLinear)]
    return found | {type(m).__name__: m.gradient_accumulation_fusion for m in megatrons}


def test_every_linear_module_fuses_by_default(tmp_path: Path) -> None:
    """Transformer Engine's in every stage, and Megatron's output layer in the last."""
    path = models.write("qwen3_moe", tmp_path)
    first, last = run_world(2, _built, models.config(path, {"pp": 2}, "bf16"))
    modules = {
        "TELayerNormColumnParallelLinear", "TERowParallelLinear", "TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"
    }  # fmt: skip
    assert first == dict.fromkeys(modules, True)
    assert last == dict.fromkeys(modules | {"ColumnParallelLinear"}, True)
