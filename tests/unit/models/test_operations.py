"""The operations of a model, by which the utilization of GPUs is reported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tepo_megatron.base.hardware import GPUS
from tepo_megatron.base.types import Rollout, TrainBatch
from tepo_megatron.models.families import find_family, read_config
from tepo_megatron.models.ops import forward_operations
from tepo_megatron.monitor.tracer import Clock
from tepo_megatron.trainer.learning import BatchUpdates
from tests.tiny import tiny_qwen3


def test_operations_are_those_that_torch_counts_and_mfu_is_their_share_of_the_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counter counts all scores of attention, causal attention needs half of them."""
    model, length = tiny_qwen3(tmp_path), 24
    model.set_attn_implementation("eager")  # whose products the counter sees
    config = read_config(tmp_path)
    architecture = find_family(config).architecture(config)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.ones(1, length, dtype=torch.int64))
    scores = 2 * architecture.num_heads * architecture.head_dim * architecture.num_layers * length**2
    counted = counter.get_total_flops()
    assert forward_operations(architecture, [(length, length)]) == pytest.approx(counted - scores, rel=1e-3)

    class Groups:
        device, world_size = torch.device("cpu"), 4

    class FourRanks:
        groups, arch = Groups, architecture

    monkeypatch.setattr("tepo_megatron.trainer.learning.device_name", lambda device: "NVIDIA H100 80GB HBM3")
    clock = Clock()
    clock.seconds |= {"old_stats": 1.0, "reference": 0.5, "update": 2.5, "rollout": 9.0}
    everything = torch.arange(length)
    rollout = Rollout(0, everything, everything > 0, torch.zeros(length), 0, "stop")
    updates = BatchUpdates(1, FourRanks, None, None, None, clock, None, False, None)  # type: ignore[arg-type]
    batch = TrainBatch.build([rollout], torch.zeros(1))
    updates.count(batch, passes=1)
    updates.count(batch, passes=3)
    operations = forward_operations(architecture, [(length, length - 1)])
    assert operations is not None
    assert updates.utilization() == pytest.approx(4 * operations / (4.0 * 4 * GPUS["H100"].peak[2]))
    monkeypatch.setattr("tepo_megatron.trainer.learning.device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    assert BatchUpdates(1, FourRanks, None, None, None, clock, None, False, None).utilization() is None  # type: ignore[arg-type]
