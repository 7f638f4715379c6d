"""Folders of runs as a report finds them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tepo_megatron.base.types import Rollout
from tepo_megatron.config import Config
from tepo_megatron.config.io import to_yaml, validate
from tepo_megatron.monitor.metrics import Metrics
from tepo_megatron.monitor.sinks import COLUMNS
from tepo_megatron.rollout import record

SUMMARY = {
    "accuracy_before": 0.19,
    "accuracy_after": 0.81,
    "standard_error": {"before": 0.02, "after": 0.02},
    "steps": 4,
    "seconds": 95.4,
}


def write_run(folder: Path, records: list[dict[str, Any]], **settings: Any) -> Config:
    tree: dict[str, Any] = {"name": folder.name, "model": {"path": "m/tiny", "precision": "fp32"}, "platform": "cpu"}
    cfg = validate(tree | {"data": {"train": "t.jsonl"}, "parallel": {"tp": 2}} | settings)
    (folder / "config.yaml").write_text(to_yaml(cfg))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return cfg


def records(steps: int) -> list[dict[str, Any]]:
    return [{"step": s} | {c.key: 0.1 * i + 0.01 * s for i, c in enumerate(COLUMNS)} for s in range(1, steps + 1)]


def measured(steps: int) -> list[dict[str, Any]]:
    """Return plausible records of a TEPO run: the noise floor at every third step, nothing optional."""
    rows = []
    for s in range(1, steps + 1):
        spread = 0.02 + 0.1 / s
        row: dict[str, Any] = {"step": s, "reward/mean": 0.2 + 0.01 * s, "accuracy/mean": 0.2 + 0.01 * s}
        row |= {"actor/entropy": 0.4 / s, "actor/grad_norm": 0.5, "loss/kl": 4e-5 / s, "tepo/kl_mask_share": 0.3 + 0.01 * s}
        row |= {"loss/clip_fraction_low": 0.001 / s, "loss/clip_fraction_high": 0.003 / s}
        row |= {"tepo/entropy_noise_floor": 2e-6, "tepo/mask_below_noise": 0.1} if s % 3 == 1 else {}
        row |= {f"tepo/dH_up_{q}": v * spread for q, v in (("p05", -1.0), ("p50", -0.01), ("p95", 0.3))}
        row |= {f"tepo/dH_down_{q}": v * spread for q, v in (("p05", -0.2), ("p50", 0.005), ("p95", 0.8))}
        row |= {"tepo/ratio_p01": 0.97, "tepo/ratio_p50": 1.0, "tepo/ratio_p99": 1.01}
        row |= {"rollout/logprob_diff_mean": 2e-6, "rollout/logprob_diff_max": 1e-5, "rollout/response_tokens_mean": 18.0}
        row |= {"rollout/truncated": 0.1 / s, "rollout/sampled_groups": 32 + s, "rollout/kept_groups": 30}
        row |= {"seconds/rollout": 0.6, "seconds/update": 0.9, "seconds/total": 1.6, "tokens_per_second": 5000.0}
        rows.append(row)
    return rows


def rollout(prompt: int, prompt_ids: Sequence[int], response_ids: Sequence[int], score: float, **others: Any) -> Rollout:
    length = len(prompt_ids) + len(response_ids)
    fields = {"policy_version": 0, "stop_reason": "stop", "answer": "7", "status": "exact" if score else "wrong"} | others
    return Rollout(
        prompt_id=prompt,
        token_ids_L=torch.tensor([*prompt_ids, *response_ids]),
        response_mask_L=torch.arange(length) >= len(prompt_ids),
        rollout_logprobs_L=torch.full((length,), -0.5),
        **{"reward": score, "score": score} | fields,
    )


def record_step(run: Path, step: int, rollouts: Sequence[Rollout]) -> None:
    record.write(run / record.FOLDER, step, rollouts, Metrics())
