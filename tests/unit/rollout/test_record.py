"""Recorded rollouts come back bit for bit."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tepo_megatron.base.errors import DataError
from tepo_megatron.base.types import Rollout, SamplingMask
from tepo_megatron.monitor.metrics import Metrics
from tepo_megatron.rollout import record


def rollouts() -> list[Rollout]:
    generator = torch.Generator().manual_seed(0)
    out = []
    for i, n in enumerate((3, 9, 2)):
        logprobs = torch.randn(n, generator=generator)
        logprobs[0] = 0.0
        mask = torch.arange(n) > 1
        servers = ((0, "server 0"), (2, "server 1")) if n > 2 else ()
        out.append(
            Rollout(
                prompt_id=i // 2,
                token_ids_L=torch.arange(n) + i,
                response_mask_L=mask,
                rollout_logprobs_L=logprobs,
                policy_version=7,
                stop_reason="stop",
                answer="1/3",
                reward=0.1 + i,
                score=float(i % 2),
                status="exact",
                servers=servers,
            )
        )
    return out


def same(a: Rollout, b: Rollout) -> bool:
    return vars(a).keys() == vars(b).keys() and all(
        torch.equal(x, vars(b)[k]) and x.dtype == vars(b)[k].dtype if isinstance(x, torch.Tensor) else x == vars(b)[k]
        for k, x in vars(a).items()
    )


def test_sampling_masks_come_back_if_every_rollout_has_them(tmp_path: Path) -> None:
    several = torch.tensor([[3, -1], [9, 4], [5, 6], [6, -1], [4, 7], [-1, 8], [9, 0]])
    masks = [SamplingMask.from_rows(ids) for ids in (torch.tensor([[7, 2, 5]]), several, torch.empty(0, 1).long())]
    given = [replace(r, sampling_mask=mask) for r, mask in zip(rollouts(), masks, strict=True)]
    record.write(tmp_path, 1, given, Metrics())
    for rollout, mask in zip(record.read(tmp_path, 1)[0], masks, strict=True):
        assert rollout.sampling_mask is not None
        assert torch.equal(rollout.sampling_mask.ids_M, mask.ids_M)
        assert torch.equal(rollout.sampling_mask.counts_N, mask.counts_N)
    record.write(tmp_path, 2, [*given[:2], rollouts()[2]], Metrics())
    assert all(r.sampling_mask is None for r in record.read(tmp_path, 2)[0])
    for wrong in (torch.tensor([[7, 6, 5]]), torch.arange(100)[None]):  # without the sampled token 2; too wide
        record.write(tmp_path, 3, [replace(given[0], sampling_mask=SamplingMask.from_rows(wrong)), *given[1:]], Metrics())
        with pytest.raises(DataError, match="record them again"):
            record.read(tmp_path, 3)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_rollouts_and_metrics_come_back_bit_for_bit(tmp_path: Path, count: int) -> None:
    metrics = Metrics()
    metrics.add("reward/mean", 0.1, 3.0)
    metrics.add("reward/mean", 0.2, 1.0)
    record.write(tmp_path, 4, rollouts()[:count], metrics)
    found, read_metrics = record.read(tmp_path, 4)
    assert len(found) == count and all(same(a, b) for a, b in zip(found, rollouts(), strict=False))
    assert read_metrics.pairs() == metrics.pairs() and math.isclose(read_metrics.means()["reward/mean"], 0.075)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000004.safetensors"]
