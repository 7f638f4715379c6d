"""The table of the config keys that were renamed or removed. `config/renamed.py` applies it."""

from __future__ import annotations

from typing import Any

from tepo_megatron.config.renamed import Renamed


def _is_text(value: Any) -> bool:
    """Return whether a value is a text."""
    return isinstance(value, str)


def _bf16_layers(number: int) -> dict[str, Any]:
    """Return the fields of TransformerConfig that keep this number of layers at both ends in bf16."""
    if not number:
        return {"first_last_layers_bf16": False}
    ends = {"num_layers_at_start_in_bf16": number, "num_layers_at_end_in_bf16": number}
    return {"first_last_layers_bf16": True, **ends}


def _moments(kind: str) -> dict[str, Any]:
    """Return the fields of OptimizerConfig that keep both moments in this type."""
    return {"exp_avg_dtype": kind, "exp_avg_sq_dtype": kind}


_OVERLONG = "set reward.overlong_buffer_tokens to the number of last tokens that are penalized"
_LENGTH = "all microbatches have one length where megatron.transformer.tp_comm_overlap is on, and only there"
_WITHOUT_GRAD = "passes without gradient take twice training.max_tokens_per_microbatch; logits_budget_mib bounds their logits"

RENAMED: tuple[Renamed, ...] = (
    # the sections objective, optimizer, training, megatron and model
    Renamed("objective.cov_share", "objective.weighting.share"),
    Renamed("objective.cov_low", "objective.weighting.low"),
    Renamed("objective.cov_high", "objective.weighting.high"),
    Renamed("objective.cov_beta", "objective.weighting.beta"),
    Renamed("objective.steer_lambda_min", "objective.weighting.lambda_min"),
    Renamed("objective.correction_low", "objective.correction.low"),
    Renamed("objective.correction_high", "objective.correction.high"),
    Renamed("objective.ref_kl", "objective.ref_kl.estimator", applies=_is_text),
    Renamed("objective.ref_kl_in", "objective.ref_kl.where"),
    Renamed("model.reference", "objective.ref_kl.path"),
    # 0 meant no penalty
    Renamed("objective.ref_beta", "objective.ref_kl", convert=lambda beta: {"beta": beta} if beta else None),
    Renamed("objective.dynamic_sampling", "rollout.max_refills", convert=lambda wanted: 9 if wanted else 0),
    Renamed("objective.overlong_shaping", None, applies=lambda wanted: bool(wanted), why=_OVERLONG),
    Renamed("objective.overlong_shaping", "reward.overlong_buffer_tokens", convert=lambda wanted: 0),
    Renamed("parallel.overlap_grad_reduce", "megatron.ddp.overlap_grad_reduce"),
    Renamed("parallel.overlap_param_gather", "megatron.ddp.overlap_param_gather"),
    Renamed("parallel.bucket_parameters", "megatron.ddp.bucket_size"),
    Renamed("parallel.tp_comm_overlap", "megatron.transformer.tp_comm_overlap"),
    Renamed("training.fuse_gradient_accumulation", "megatron.transformer.gradient_accumulation_fusion"),
    Renamed("training.fixed_length", None, applies=lambda fixed: fixed is True, constant=True, why=_LENGTH),
    Renamed("training.fixed_length", None, constant=False, why=_LENGTH),
    Renamed("training.max_tokens_without_grad", None, why=_WITHOUT_GRAD),
    Renamed("model.bf16_end_layers", "megatron.transformer", convert=_bf16_layers),
    Renamed("optimizer.beta1", "megatron.optimizer.adam_beta1"),
    Renamed("optimizer.beta2", "megatron.optimizer.adam_beta2"),
    Renamed("optimizer.eps", "megatron.optimizer.adam_eps"),
    Renamed("optimizer.moments", "megatron.optimizer", convert=_moments),
    Renamed("optimizer.offload", "megatron.optimizer.optimizer_offload_fraction"),
    # the sections rollout, sync, reward, data, checkpoint, evaluation and logging
)

# Sections whose `type` alone can be written as a text: `objective.correction: tis`.
SHORTHANDS: tuple[str, ...] = ("objective.weighting", "objective.correction")
