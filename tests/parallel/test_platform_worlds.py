"""Unmodified Megatron-Core on the CPU platform: checkpoints across layouts, experts, recomputation, random state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.config import ParallelConfig
from tepo_megatron.distributed import parallel
from tepo_megatron.platform import activate
from tests.marks import full_but
from tests.worlds import run_world

VOCAB, LENGTH, MICROBATCHES = 64, 16, 2
RECOMPUTE = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
}


# -- models ----------------------------------------------------------------------------------------------------------


class Trainer:
    """A tiny GPT of Megatron's own modules under DDP, the schedules and the distributed optimizer."""

    def __init__(self, layout: dict[str, int], **changes: Any) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        cfg = ParallelConfig(**layout)
        self.groups = parallel.initialize(cfg, activate("cpu"), seed=11)
        config = gpt_config(cfg, changes)
        config.finalize_model_grads_func = finalize_model_grads
        self.model = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
            gpt(config, self.groups),
        )
        dtype = config.params_dtype
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=1e-2, adam_eps=1e-4, clip_grad=1.0, use_distributed_optimizer=True,
                params_dtype=dtype, bf16=dtype == torch.bfloat16,
            ),
            [self.model],
        )  # fmt: skip

    def step(self) -> tuple[float, float]:
        """Take one optimizer step on the fixed batch; return (loss, grad norm). Only the last stage knows the loss."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        losses: list[float] = []

        def forward(data: Any, model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            tokens = next(data)
            output = model(tokens, torch.arange(LENGTH)[None], None, labels=tokens.roll(-1, 1))

            def loss(per_token: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                losses.append(per_token.mean().item())
                return per_token.mean(), {}

            return output, loss

        generator = torch.Generator().manual_seed(3)
        batch = torch.randint(VOCAB, (MICROBATCHES, 1, LENGTH), generator=generator)
        mine = batch.chunk(self.groups.dp.size)[self.groups.dp.rank]
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward, data_iterator=iter(mine), model=self.model, num_microbatches=len(mine),
            seq_length=LENGTH, micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        mean = torch.tensor(sum(losses) / len(mine))
        dist.all_reduce(mean, group=self.groups.dp_cp.group)
        self.groups.broadcast_from_last_stage(mean)
        _, grad_norm, _ = self.optimizer.step()
        return mean.item() / self.groups.dp_cp.size, grad_norm

    def save(self, folder: Path, optimizer: bool) -> None:
        from megatron.core import dist_checkpointing

        dist_checkpointing.save(self._state(optimizer, is_loading=False), str(folder))

    def load(self, folder: Path, optimizer: bool) -> None:
        from megatron.core import dist_checkpointing

        loaded = dist_checkpointing.load(self._state(optimizer, is_loading=True), str(folder))
        self.model.module.load_state_dict(loaded["model"])
        if optimizer:
            self.optimizer.load_state_dict(loaded["optimizer"])
        else:
            self.optimizer.reload_model_params()

    def _state(self, optimizer: bool, is_loading: bool) -> dict[str, Any]:
        state = {"model": self.model.module.sharded_state_dict()}
        if optimizer:
            state["optimizer"] = self.optimizer.sharded_state_dict(
                state["model"],
                is_loading=is_loading,
                metadata={"distrib_optim_sharding_type": "fully_reshardable"},
            )
        return state


def gpt_config(cfg: ParallelConfig, changes: dict[str, Any]) -> Any:
    from megatron.core.transformer import TransformerConfig

    settings = {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 8,
        "ffn_hidden_size": 64, "attention_dropout": 0.0, "hidden_dropout": 0.0, "add_bias_linear": False,
        "normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": torch.nn.functional.silu,
        "params_dtype": torch.float32, "pipeline_dtype": torch.float32, "use_cpu_initialization": True,
        "tensor_model_parallel_size": cfg.tp, "pipeline_model_parallel_size": cfg.pp,
        "expert_model_parallel_size": cfg.ep, "moe_token_dispatcher_type": "alltoall",
        "sequence_parallel": cfg.sequence_parallel, "bias_dropout_fusion": False, "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False, "bias_activation_fusion": False,
    }  # fmt: skip
    return TransformerConfig(**(settings | changes))


def gpt(config: Any, groups: parallel.ParallelDims) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from tepo_megatron.actor.attention import SDPACoreAttention
    from tepo_megatron.actor.layer_spec import RMSNorm

    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        layer.submodules.self_attention.submodules.core_attention = SDPACoreAttention
    spec.layer_norm = RMSNorm
    return GPTModel(
        config, spec, vocab_size=VOCAB, max_sequence_length=LENGTH, position_embedding_type="rope",
        pre_process=groups.pp.rank == 0, post_process=groups.is_last_stage,
    )  # fmt: skip


# -- checkpoints -----------------------------------------------------------------------------------------------------


def train_and_save(rank: int, layout: dict[str, int], folder: Path, changes: dict[str, Any]) -> list[tuple[float, float]]:
    trainer = Trainer(layout, **changes)
    done = [trainer.step() for _ in range(2)]
    trainer.save(folder, optimizer=True)
    return [*done, trainer.step(), trainer.step()]


def load_and_train(rank: int, layout: dict[str, int], folder: Path, changes: dict[str, Any]) -> list[tuple[float, float]]:
    trainer = Trainer(layout, **changes)
    trainer.load(folder, optimizer=True)
    return [trainer.step(), trainer.step()]


@pytest.mark.full
def test_checkpoint_continues_on_another_layout(tmp_path: Path) -> None:
    """Weights, Adam's moments and its step: the second step after the load depends on all of them."""
    first = run_world(4, train_and_save, {"tp": 2, "dp": 2}, tmp_path, {})[0]
    second = run_world(2, load_and_train, {"pp": 2}, tmp_path, {})[0]
    assert first[0][0] > first[3][0] + 0.1
    torch.testing.assert_close(torch.tensor(second), torch.tensor(first[2:]), rtol=2e-6, atol=0)


@pytest.mark.full
def test_bf16_checkpoint_keeps_the_masters(tmp_path: Path) -> None:
    bf16 = {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16, "bf16": True}
    first = run_world(2, train_and_save, {"dp": 2}, tmp_path, bf16)[0]
    assert run_world(2, load_and_train, {"dp": 2}, tmp_path, bf16)[0] == first[2:]


# -- experts ---------------------------------------------------------------------------------------------------------

EXPERTS = {
    "num_moe_experts": 4, "moe_ffn_hidden_size": 32, "moe_router_topk": 2, "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
}  # fmt: skip


def save_experts(rank: int, folder: Path) -> dict[str, Any]:
    trainer = Trainer({}, **EXPERTS)
    trainer.save(folder, optimizer=False)
    return step_with_gradients(trainer)


def load_experts(rank: int, layout: dict[str, int], folder: Path) -> dict[str, Any]:
    trainer = Trainer(layout, **EXPERTS)
    trainer.load(folder, optimizer=False)
    return step_with_gradients(trainer)


def step_with_gradients(trainer: Trainer) -> dict[str, Any]:
    """Loss, grad norm, and the part that this rank holds of the gradients after reduction, under the experts' global names."""
    captured: dict[str, Tensor] = {}
    step = trainer.optimizer.step

    def capture() -> Any:
        local = EXPERTS["num_moe_experts"] // trainer.groups.ep.size
        for group in (*trainer.model.bucket_groups, *trainer.model.expert_parallel_bucket_groups):
            dp = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:  # the distributed optimizer leaves each rank a shard
                shard = bucket.grad_data.chunk(dp.size())[dp.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, shard, group=dp)
        for name, parameter in trainer.model.module.named_parameters():
            if "local_experts." in name:
                head, tail = name.split("local_experts.")
                index, leaf = tail.split(".", 1)
                name = f"{head}experts.{int(index) + local * trainer.groups.ep.rank}.{leaf}"
            captured[name] = parameter.main_grad.clone()
        return step()

    trainer.optimizer.step = capture
    loss, grad_norm = trainer.step()
    return {"loss": loss, "grad_norm": grad_norm, "gradients": captured}


@pytest.mark.full
def test_experts_over_ranks_equal_experts_on_one(tmp_path: Path) -> None:
    (whole,) = run_world(1, save_experts, tmp_path)
    ranks = run_world(2, load_experts, {"dp": 2, "ep": 2}, tmp_path)
    gradients = ranks[0]["gradients"] | ranks[1]["gradients"]
    assert gradients.keys() == whole["gradients"].keys()
    for name, expected in whole["gradients"].items():
        assert expected.norm() > 0, name
        assert (gradients[name] - expected).norm() <= 1e-5 * expected.norm(), name
    assert ranks[0]["loss"] == pytest.approx(whole["loss"], rel=1e-6)


@pytest.mark.full
def test_experts_over_experts_and_tensors(tmp_path: Path) -> None:
    """Expert tensor parallelism (2, as tp) gathers the tokens of the ranks in lists of unequal sizes."""
    (whole,) = run_world(1, save_experts, tmp_path)
    for r in run_world(4, load_experts, {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True}, tmp_path):
        assert (r["loss"], r["grad_norm"]) == pytest.approx((whole["loss"], whole["grad_norm"]), rel=1e-5)


# -- recomputation and random state ----------------------------------------------------------------------------------


def train_twice(rank: int, changes: dict[str, Any]) -> list[tuple[float, float]]:
    trainer = Trainer({"tp": 2, "sequence_parallel": True}, **changes)
    return [trainer.step(), trainer.step()]


@pytest.mark.parametrize("dropout", full_but([0.1], [], [0.0, 0.1]))
def test_recomputation_changes_nothing(dropout: float) -> None:
    """With dropout, the second forward pass must draw the numbers of the first, so random states are saved and restored."""
    kept = run_world(2, train_twice, {"hidden_dropout": dropout})
    for how, changes in RECOMPUTE.items():
        assert run_world(2, train_twice, {"hidden_dropout": dropout} | changes) == kept, how


def random_states(rank: int) -> dict[str, list[float]]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    parallel.initialize(ParallelConfig(tp=2), activate("cpu"), seed=4)
    before = torch.rand(2).tolist()
    torch.cuda.manual_seed(7)
    reference = torch.rand(4).tolist()
    torch.cuda.manual_seed(7)
    shared = torch.rand(2).tolist()
    with get_cuda_rng_tracker().fork():
        own = torch.rand(2).tolist()
    return {"before": before, "reference": reference, "shared": shared + torch.rand(2).tolist(), "own": own}


def test_parallel_random_states() -> None:
    first, second = run_world(2, random_states)
    assert first["before"] == second["before"]  # data-parallel state: the same on all tensor-parallel ranks
    assert first["own"] != second["own"]  # model-parallel state
    assert first["shared"] == first["reference"]  # untouched by the fork
