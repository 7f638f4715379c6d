"""Let the ranks of a run connect and measure their all-reduces: `python -m tepo_megatron.doctor.ranks CONFIG` per rank."""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tepo_megatron.config import Config
from tepo_megatron.config.io import load_config, plain
from tepo_megatron.dist.platform import Platform
from tepo_megatron.trainer.worker import run_rank

RESULT = "ranks.json"
NUMEL, ROUNDS = 4 * 2**20, 5  # fp32 elements; repetitions after the first


def measure(cfg: Config, platform: Platform) -> None:
    """Measure all-reduces over every mesh axis with more than one rank; rank 0 writes bytes per second by axis to RESULT.

    The bytes are those that each rank sends in a ring: 2 (n - 1) / n of the tensor.
    """
    from tepo_megatron.dist import parallel

    groups = parallel.initialize(cfg.parallel, platform, cfg.seed, config=plain(cfg))
    axes = {"tp": groups.tp, "pp": groups.pp, "cp": groups.cp, "dp": groups.dp, "ep": groups.ep}
    bandwidths = {name: _bandwidth(axis, groups.device) for name, axis in axes.items() if axis.size > 1}
    if groups.is_main:
        (Path(cfg.run_dir) / RESULT).write_text(json.dumps(bandwidths))
    parallel.shutdown()


def _bandwidth(axis: object, device: torch.device) -> float:
    from tepo_megatron.dist.parallel import Axis

    assert isinstance(axis, Axis)
    x = torch.ones(NUMEL, device=device)
    best = float("inf")
    for _ in range(ROUNDS + 1):
        dist.barrier(group=axis.group)
        start = time.perf_counter()
        dist.all_reduce(x, group=axis.group)
        float(x[0])  # on a GPU this waits for the result
        best = min(best, time.perf_counter() - start)
    return 4 * NUMEL * 2 * (axis.size - 1) / axis.size / best


if __name__ == "__main__":
    sys.exit(run_rank(load_config(sys.argv[1]), work=measure))
