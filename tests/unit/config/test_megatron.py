"""The section `megatron`: what it refuses, and that its fields arrive in Megatron-Core's configs."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.actor import build, precision
from tepo_megatron.actor.passed_fields import check_passed_fields, passed_fields
from tepo_megatron.base.errors import ConfigError
from tepo_megatron.config import Config, MegatronConfig, ModelConfig, ParallelConfig, TrainingConfig
from tepo_megatron.config.io import validate
from tepo_megatron.config.megatron import CHECKED, OWNED, TESTED, untested_fields
from tepo_megatron.doctor import machine
from tepo_megatron.models.ops import Architecture, Experts
from tests.parallel import cases
from tests.parallel.cases import open_actor
from tests.worlds import run_world

BASE = {"name": "run", "model": {"path": "model"}, "data": {"train": "train.jsonl"}}
ARCH = Architecture(
    num_layers=4, hidden_size=64, ffn_size=128, num_heads=4, num_query_groups=2, head_dim=16, vocab_size=128,
    max_positions=64, norm_eps=1e-6, rotary_base=1e4, tied_embeddings=True, qk_norm=True,
)  # fmt: skip
# fields that this project neither sets nor checks
PASSED: dict[str, dict[str, Any]] = {
    "transformer": {"cross_entropy_loss_fusion": True, "rotary_interleaved": False, "attention_backend": "unfused"},
    "ddp": {"check_for_nan_in_grad": True, "bucket_size": 5000, "overlap_grad_reduce": True},
    "optimizer": {"log_num_zeros_in_grad": True, "store_param_remainders": False, "adam_beta2": 0.9},
}


def config(**sections: dict[str, Any]) -> Config:
    return validate(BASE | {"megatron": sections})


@pytest.mark.parametrize(
    ("section", "field", "owner"),
    [
        ("transformer", "tensor_model_parallel_size", "parallel.tp"),
        ("transformer", "recompute_granularity", "training.recompute"),
        ("transformer", "num_layers", "config.json in model.path"),
        ("transformer", "fp8", "model.precision"),
        ("ddp", "average_in_collective", "token count of the whole minibatch"),
        ("optimizer", "lr", "optimizer.lr"),
        ("optimizer", "overlap_param_gather", "megatron.ddp.overlap_param_gather"),
        ("optimizer", "optimizer_cpu_offload", "optimizer_offload_fraction"),
    ],
)
def test_a_field_that_the_project_sets_is_refused_with_its_owner(section: str, field: str, owner: str) -> None:
    with pytest.raises(ConfigError, match=rf"megatron\.{section}: {field} is set by this project: .*{owner}.*; remove it here"):
        config(**{section: {field: 1}})


@pytest.mark.parametrize("section", OWNED)
def test_each_owned_field_is_one_of_megatron(section: str) -> None:
    """And none of them is one that the project checks."""
    names = {f.name for f in dataclasses.fields(_classes()[section])}
    checked = {f.name for f in dataclasses.fields(CHECKED[section])}
    assert OWNED[section].keys() <= names and checked <= names and not checked & OWNED[section].keys()
    assert TESTED[section] <= checked


def _classes() -> dict[str, Any]:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizer
    from megatron.core.transformer import TransformerConfig

    return {"transformer": TransformerConfig, "ddp": DistributedDataParallelConfig, "optimizer": MegatronOptimizer}


@pytest.mark.parametrize("precision_name", precision.PRESETS)
@pytest.mark.parametrize("experts", [None, Experts(8, 2, 64, True, (1, 3))])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_every_field_that_the_project_sets_is_owned_or_checked(
    precision_name: Any, experts: Experts | None, recompute: Any
) -> None:
    """So that no config can contradict it in silence."""
    model, parallel = ModelConfig(path="model", precision=precision_name), ParallelConfig(pp=3)
    training = TrainingConfig(recompute=recompute)
    arch = dataclasses.replace(ARCH, experts=experts)
    megatron = MegatronConfig(optimizer={"optimizer_offload_fraction": 0.5})
    small = MegatronConfig(optimizer={"exp_avg_dtype": "bf16"})
    own = build.own_fields(arch, model, parallel, torch.device("cpu"), training, True, megatron) if not model.fp8 else {}
    own = own | precision.transformer_fields(model) | precision.recompute_fields(training, experts is not None)
    found = {
        "transformer": own.keys(),
        "ddp": precision.ddp_fields(megatron, "cpu").keys(),
        "optimizer": precision.optimizer_fields(model, megatron, "cpu").keys()
        | precision.optimizer_fields(model, small, "cpu").keys(),
    }
    for section, names in found.items():
        known = OWNED[section].keys() | {f.name for f in dataclasses.fields(CHECKED[section])}
        assert names <= known, section


@pytest.mark.parametrize(
    ("section", "fields", "said"),
    [
        ("transformer", {"moe_permute_fusio": True}, "no such field; did you mean moe_permute_fusion?"),
        ("ddp", {"zzzz": 1}, "no such field; see its class DistributedDataParallelConfig"),
        ("transformer", {"moe_permute_fusion": "yes"}, "moe_permute_fusion='yes': it must be true or false"),
        ("transformer", {"moe_permute_fusion": 1}, "moe_permute_fusion=1: it must be true or false"),
        ("transformer", {"attention_backend": "fastest"}, "attention_backend='fastest': it must be one of .*flash"),
        ("transformer", {"autocast_dtype": "int4"}, "autocast_dtype='int4': it must be one of fp32, bf16"),
        ("optimizer", {"sgd_momentum": "fast"}, "sgd_momentum='fast': it must be a number"),
        ("optimizer", {"sgd_momentum": None}, "sgd_momentum=None: it must be a number"),
        ("optimizer", {"timers": "x"}, "timers: it needs an object, which a config cannot hold"),
        ("transformer", {"param_sync_func": "f"}, "param_sync_func: it needs an object"),
    ],
)
def test_unknown_names_and_wrong_types_are_refused(section: str, fields: dict[str, Any], said: str) -> None:
    megatron = config(**{section: fields}).megatron
    with pytest.raises(ConfigError, match=rf"megatron\.{section}\.{said.replace('?', '.')}" if "=" in said else said):
        check_passed_fields(megatron)


def test_values_become_what_megatron_takes() -> None:
    megatron = MegatronConfig(
        transformer={"autocast_dtype": "bf16", "attention_backend": "flash", "cp_comm_type": "p2p"},
        optimizer={"sgd_momentum": 1},
    )
    found = passed_fields(megatron, "transformer")
    assert found["autocast_dtype"] is torch.bfloat16 and found["attention_backend"].name == "flash"
    assert found["cp_comm_type"] == "p2p" and passed_fields(megatron, "optimizer") == {"sgd_momentum": 1}


def test_what_no_test_trains_with_is_said() -> None:
    cfg = config(**PASSED)
    (line,) = untested_fields(cfg.megatron)
    assert line == (
        "megatron.transformer.cross_entropy_loss_fusion, megatron.transformer.rotary_interleaved, "
        "megatron.transformer.attention_backend, megatron.ddp.check_for_nan_in_grad, "
        "megatron.optimizer.log_num_zeros_in_grad, megatron.optimizer.store_param_remainders: passed to Megatron-Core, "
        "not tested here"
    )
    (found,) = machine.passed_fields(cfg.megatron)
    assert found.verdict == "warn" and line in str(found)
    tested = MegatronConfig(ddp={"bucket_size": 5}, optimizer={"adam_beta2": 0.9})
    assert untested_fields(tested) == [] and list(machine.passed_fields(tested)) == []


def _built(rank: int, cfg: Config) -> dict[str, dict[str, Any]]:
    """The passed fields as they are in the configs of a built actor."""
    actor = open_actor(cfg)
    optimizer = getattr(actor.optimizer, "chained_optimizers", [actor.optimizer])[0]
    built = {"transformer": actor.config, "ddp": actor.chunks[0].ddp_config, "optimizer": optimizer.config}
    found = {section: {name: getattr(built[section], name) for name in fields} for section, fields in PASSED.items()}
    found["transformer"]["attention_backend"] = found["transformer"]["attention_backend"].name
    return found


def test_passed_fields_arrive_in_the_built_configs(tmp_path: Path) -> None:
    case = cases.make_case(tmp_path, tied=True)
    cfg = cases.run_config(case.model, {"dp": 1})
    cfg = dataclasses.replace(cfg, megatron=MegatronConfig(**PASSED))
    assert run_world(1, _built, cfg)[0] == PASSED
