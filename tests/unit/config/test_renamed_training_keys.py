"""Old keys of objective, optimizer, training, parallel and model give the config of their new names, and say these."""

from __future__ import annotations

from typing import Any

import pytest

from tepo_megatron.config.io import set_key, validate, with_overrides
from tepo_megatron.config.layers import Layers
from tepo_megatron.config.renamed_keys import RENAMED
from tepo_megatron.errors import ConfigError
from tepo_megatron.losses import build_objective
from tepo_megatron.losses.objective import Objective

BASE = {"name": "run", "model": {"path": "model"}, "data": {"train": "train.jsonl"}}
SECTIONS = ("objective", "optimizer", "training", "parallel", "model")

# old keys -> new keys
SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"objective.name": "clip_cov", "objective.cov_share": 0.1, "objective.cov_low": 0.5, "objective.cov_high": 7.0},
        {"objective.name": "clip_cov", "objective.weighting": {"share": 0.1, "low": 0.5, "high": 7.0}},
    ),
    (
        {"objective.name": "kl_cov", "objective.cov_beta": 0.5},
        {"objective.name": "kl_cov", "objective.weighting.beta": 0.5},
    ),
    (
        {"objective.weighting": "steer", "objective.steer_lambda_min": 0.5},
        {"objective.weighting": {"type": "steer", "lambda_min": 0.5}},
    ),
    (
        {"objective.correction": "mis", "objective.correction_low": 0.8, "objective.correction_high": 1.3},
        {"objective.correction": {"type": "geometric_mask", "low": 0.8, "high": 1.3}},
    ),
    ({"objective.correction.type": "mis"}, {"objective.correction.type": "geometric_mask"}),
    (
        {
            "objective.ref_beta": 0.1, "objective.ref_kl": "k2", "objective.ref_kl_in": "reward", "model.reference": "other",
        },
        {"objective.ref_kl": {"beta": 0.1, "estimator": "k2", "where": "reward", "path": "other"}},
    ),
    ({"objective.kl": "k3_reverse"}, {"objective.kl": "k3_importance_weighted"}),
    ({"objective.ref_beta": 0.0}, {"objective.ref_kl": None}),
    (
        {"objective.name": "dapo", "objective.dynamic_sampling": False},
        {"objective.name": "dapo", "rollout.max_generation_rounds": 1},
    ),
    (
        {"objective.name": "grpo", "objective.dynamic_sampling": True},
        {"objective.name": "grpo", "rollout.max_generation_rounds": 10},
    ),
    ({"objective.overlong_shaping": False}, {"reward.overlong_buffer_tokens": 0}),
    (
        {"parallel.overlap_grad_reduce": True, "parallel.overlap_param_gather": False, "parallel.bucket_parameters": 7},
        {"megatron.ddp": {"overlap_grad_reduce": True, "overlap_param_gather": False, "bucket_size": 7}},
    ),
    (
        {
            "parallel.tp": 2, "parallel.sequence_parallel": True, "parallel.tp_comm_overlap": True,
            "training.fixed_length": True, "training.max_tokens_without_grad": None,
        },
        {"parallel": {"tp": 2, "sequence_parallel": True}, "megatron.transformer.tp_comm_overlap": True},
    ),
    ({"training.fixed_length": False}, {}),
    ({"training.fuse_gradient_accumulation": False}, {"megatron.transformer.gradient_accumulation_fusion": False}),
    (
        {"model.precision": "fp8-current", "model.bf16_end_layers": 2},
        {
            "model.precision": "fp8-current", "megatron.transformer.first_last_layers_bf16": True,
            "megatron.transformer.num_layers_at_start_in_bf16": 2, "megatron.transformer.num_layers_at_end_in_bf16": 2,
        },
    ),
    ({"model.bf16_end_layers": 0}, {"megatron.transformer.first_last_layers_bf16": False}),
    (
        {"optimizer.beta1": 0.8, "optimizer.beta2": 0.99, "optimizer.eps": 1e-6},
        {"megatron.optimizer": {"adam_beta1": 0.8, "adam_beta2": 0.99, "adam_eps": 1e-6}},
    ),
    (
        {"optimizer.weight_decay": 0.1, "optimizer.clip_grad": 0.5},
        {"megatron.optimizer": {"weight_decay": 0.1, "clip_grad": 0.5}},
    ),
    ({"optimizer.moments": "fp8"}, {"megatron.optimizer": {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}}),
    ({"optimizer.offload": 0.5}, {"megatron.optimizer.optimizer_offload_fraction": 0.5}),
]  # fmt: skip


def tree(keys: dict[str, Any]) -> dict[str, Any]:
    """A plain config with these keys."""
    found: dict[str, Any] = {}
    for key, value in (BASE | keys).items():
        if isinstance(value, dict) and key in found:
            found[key] |= value
        elif "." in key:
            set_key(found, key, value)
        else:
            found[key] = dict(value) if isinstance(value, dict) else value
    return found


@pytest.mark.parametrize(("old", "new"), SAME, ids=lambda keys: ", ".join(keys))
def test_old_keys_are_the_new_ones(old: dict[str, Any], new: dict[str, Any]) -> None:
    cfg = validate(tree(old))
    assert cfg == validate(tree(new))
    layers = Layers()
    layers.add(tree(old), "old.yaml")
    assert with_overrides(layers, [], "old.yaml") == cfg
    renamed = {key.old: key for key in RENAMED}
    for key in old.keys() & renamed.keys():
        if key in ("objective.weighting", "objective.correction"):
            continue
        (said,) = [line for line in layers.messages if line.startswith(f"old.yaml: {key} ")]
        names = [each.new for each in RENAMED if each.old == key and each.new is not None]
        assert "was removed" in said or any(f"is now {name}" in said for name in names)


def test_every_renamed_key_of_these_sections_is_tried() -> None:
    tried = {key for old, _ in SAME for key in old} | {"parallel.silent_seconds", "objective.ref_kl.estimator"}
    assert {key.old for key in RENAMED if key.old.partition(".")[0] in SECTIONS} <= tried


def test_the_reverse_estimator_of_a_reference_kl_is_refused_with_the_fix() -> None:
    with pytest.raises(ConfigError, match=r"objective\.ref_kl\.estimator='k3_reverse': .* k3_importance_weighted weighs by pi"):
        layers = Layers()
        layers.add(tree({"objective.ref_kl": {"beta": 0.1, "estimator": "k3_reverse"}}), "old.yaml")


def test_each_key_of_the_command_line_is_a_layer() -> None:
    layers = Layers()
    layers.add(tree({"objective.name": "clip_cov", "objective.correction": "tis"}), "run.yaml")
    words = ["--objective.cov_share", "0.1", "--objective.correction_high", "3", "--optimizer.beta2", "0.9"]
    cfg = with_overrides(layers, words, "run.yaml")
    assert cfg.objective.weighting == {"share": 0.1} and cfg.objective.correction == {"type": "tis", "high": 3}
    assert cfg.megatron.known_optimizer.adam_beta2 == 0.9
    assert layers.messages == [
        "command line: objective.cov_share is now objective.weighting.share; the old name works for one release",
        "command line: objective.correction_high is now objective.correction.high; the old name works for one release",
        "command line: optimizer.beta2 is now megatron.optimizer.adam_beta2; the old name works for one release",
    ]
    objective: Objective = build_objective(cfg.objective)
    assert (objective.weighting.type, objective.correction.type) == ("clip_cov", "tis")


def test_another_type_replaces_the_section_below() -> None:
    layers = Layers()
    layers.add(tree({"objective.correction": {"type": "mis", "low": 0.9}}), "run.yaml")
    assert with_overrides(layers, ["--objective.correction", "tis"], "run.yaml").objective.correction == {"type": "tis"}
    assert with_overrides(layers, ["--objective.correction.high", "3"], "").objective.correction == {"type": "tis", "high": 3}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"objective.overlong_shaping": True}, r"this key was removed \(set reward\.overlong_buffer_tokens to"),
        ({"training.max_tokens_without_grad": 32768}, r"max_tokens_without_grad=32768: this key was removed \(passes without"),
        ({"training.fixed_length": 3}, r"training\.fixed_length=3: this key was removed"),
        (
            {"optimizer.beta1": 0.9, "megatron.optimizer.adam_beta1": 0.9},
            r"optimizer\.beta1 and its new name megatron\.optimizer\.adam_beta1 are both set; remove the first",
        ),
    ],
)  # fmt: skip
def test_what_has_no_new_name_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        validate(tree(keys))
