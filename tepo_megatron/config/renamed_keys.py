"""The table of the config keys that were renamed or removed. `config/renamed.py` applies it."""

from collections.abc import Mapping
from typing import Any

from tepo_megatron.config.renamed import Renamed


def _bf16_layers(number: int) -> dict[str, Any]:
    """Return the fields of TransformerConfig that keep this number of layers at both ends in bf16."""
    if not number:
        return {"first_last_layers_bf16": False}
    return {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": number, "num_layers_at_end_in_bf16": number}


_MOMENTS = ("exp_avg_dtype", "exp_avg_sq_dtype")
_OVERLONG = "set reward.overlong_buffer_tokens to the number of last tokens that are penalized"
_REVERSE = "it weighs by pi / pi_ref, and nothing is sampled from pi_ref; k3_importance_weighted weighs by pi / pi_old"
_LENGTH = "all microbatches have one length where megatron.transformer.tp_comm_overlap is on, and only there"
_WITHOUT_GRAD = "passes without gradient take twice training.max_tokens_per_microbatch; logits_budget_mib bounds their logits"


def _transport_has(*types: str) -> Any:
    """Return a test that a layer names a transport, and none of these, so that the old key has no effect."""

    def unused(value: Any, layer: Mapping[str, Any]) -> bool:
        transport = layer.get("sync", {}).get("transport")
        kind = transport.get("type") if isinstance(transport, Mapping) else transport
        return kind is not None and kind not in types

    return unused


def _is_half(value: Any, layer: Mapping[str, Any]) -> bool:
    """Return whether the processor time is half of the wall time that the same layer sets, as it always is now."""
    hard = layer.get("reward", {}).get("hard_seconds")
    return isinstance(hard, int | float) and value == hard / 2


def _names_terms(value: Any, layer: Mapping[str, Any]) -> bool:
    """Return whether the layer also lists terms, which replaced the default type."""
    return value == "math" and layer.get("reward", {}).get("terms") is not None


_FREE_PORT = "each server takes a free port"
_HALF = "a worker gives up after half of reward.timeout_seconds of processor time"
_LIMITS = "the limits of grading are fixed except reward.timeout_seconds"

RENAMED: tuple[Renamed, ...] = (
    # the sections objective, optimizer, training, megatron and model
    Renamed("objective.cov_share", "objective.weighting.share"),
    Renamed("objective.cov_low", "objective.weighting.low"),
    Renamed("objective.cov_high", "objective.weighting.high"),
    Renamed("objective.cov_beta", "objective.weighting.beta"),
    Renamed("objective.steer_lambda_min", "objective.weighting.lambda_min"),
    Renamed(
        "objective.correction.type",
        "objective.correction.type",
        lambda value: "geometric_mask",
        lambda value: value == "mis",
        note="objective.correction.type mis is now objective.correction.type geometric_mask (published: sequence_mis)",
    ),
    Renamed("objective.correction_low", "objective.correction.low"),
    Renamed("objective.correction_high", "objective.correction.high"),
    Renamed(
        "objective.kl",
        "objective.kl",
        lambda value: "k3_importance_weighted",
        lambda value: value == "k3_reverse",
        note="objective.kl k3_reverse is now objective.kl k3_importance_weighted",
    ),
    Renamed("objective.ref_kl", "objective.ref_kl.estimator", applies=lambda value: isinstance(value, str)),
    Renamed("objective.ref_kl_in", "objective.ref_kl.where"),
    Renamed("objective.ref_kl.estimator", None, applies=lambda value: value == "k3_reverse", why=_REVERSE),
    Renamed("model.reference", "objective.ref_kl.path"),
    # 0 meant no penalty
    Renamed("objective.ref_beta", "objective.ref_kl", convert=lambda beta: {"beta": beta} if beta else None),
    Renamed("objective.dynamic_sampling", "rollout.max_generation_rounds", convert=lambda wanted: 10 if wanted else 1),
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
    Renamed("optimizer.weight_decay", "megatron.optimizer.weight_decay"),
    Renamed("optimizer.clip_grad", "megatron.optimizer.clip_grad"),
    Renamed("optimizer.moments", "megatron.optimizer", convert=lambda kind: dict.fromkeys(_MOMENTS, kind)),
    Renamed("optimizer.offload", "megatron.optimizer.optimizer_offload_fraction"),
    # the sections rollout, sync, reward, data, checkpoint, evaluation and logging
    Renamed("rollout.in_flight", "rollout.on_weight_update"),
    Renamed("rollout.max_refills", "rollout.max_generation_rounds", convert=lambda refills: refills + 1),
    Renamed("rollout.server.silent_seconds", "rollout.server.heartbeat_timeout"),
    Renamed("parallel.silent_seconds", "parallel.heartbeat_timeout"),
    Renamed("rollout.attempts", None, constant=3, why="a prompt is sampled up to three times"),
    Renamed("rollout.max_sequence_tokens", None, why="the limits are data.max_prompt_tokens and rollout.max_response_tokens"),
    Renamed("rollout.server.port", None, constant=0, why=_FREE_PORT),
    Renamed("rollout.server.backoff_seconds", None, constant=1.0, why="the pause before the first restart is 1 second"),
    Renamed("sync.folder", "sync.transport.folder", unused=_transport_has("shm")),
    Renamed("sync.address", "sync.transport.address", unused=_transport_has("group")),
    Renamed("sync.timeout_seconds", "sync.transport.timeout_seconds", unused=_transport_has("group")),
    Renamed("sync.join_seconds", None, why="groups are formed within 30 seconds on cpu and 300 on cuda"),
    Renamed("reward.soft_seconds", None, constant=2, unused=_is_half, why=_HALF),
    Renamed("reward.hard_seconds", "reward.timeout_seconds"),
    Renamed("reward.max_answer_chars", None, constant=512, why=_LIMITS),
    Renamed("reward.memory_mib", None, constant=1024, why=_LIMITS),
    Renamed("reward.overlong_penalty", None, constant=0.5, why="the largest penalty is half of a right answer"),
    Renamed("reward.type", "reward.terms", convert=lambda kind: [{"type": kind}], unused=_names_terms),
    Renamed("reward.terms[].attempts", None, constant=4, why="a batch is sent up to four times"),
    Renamed("reward.terms[].backoff_seconds", None, constant=1.0, why="the pause before the second attempt is 1 second"),
    Renamed("data.deduplicate", None, constant=True, why="a prompt is always taken once"),
    Renamed("checkpoint.timeout_seconds", None, constant=1800.0, why="a checkpoint has 1800 seconds to be written"),
)
