"""A model with experts for the scripted engine, and its choice of experts: recorded on one network, replayed on another."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig

from tepo_megatron.base.types import NO_EXPERT
from tests.tiny import VOCAB_SIZE, tiny_model

LAYERS, NUMBER = 2, 4


def write_model(dense: Path) -> Path:
    """Write a model with experts in every layer next to a model with datasets, which are copied."""
    path = dense.with_name(f"{dense.name}-experts")
    if not path.exists():
        tiny_model(path, Qwen3MoeConfig(
            vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=256, moe_intermediate_size=96, num_hidden_layers=LAYERS,
            num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=NUMBER, num_experts_per_tok=2,
            norm_topk_prob=True, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            tie_word_embeddings=False,
        ))  # fmt: skip
        for data in dense.glob("*.jsonl"):
            (path / data.name).write_bytes(data.read_bytes())
    return path


def fused(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the tensors of a checkpoint as the modules of transformers hold them: the experts of a layer in one tensor."""
    if not any(".mlp.experts." in name for name in state):
        return state
    out = {name: tensor for name, tensor in state.items() if ".mlp.experts." not in name}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.mlp.experts"

        def all_of(part: str, prefix: str = prefix) -> Tensor:
            return torch.stack([state[f"{prefix}.{i}.{part}_proj.weight"] for i in range(NUMBER)])

        out[f"{prefix}.gate_up_proj"] = torch.cat((all_of("gate"), all_of("up")), dim=1)
        out[f"{prefix}.down_proj"] = all_of("down")
    return out


def routers(model: nn.Module) -> list[Any]:
    """Return the routers of a model, by layer."""
    return [module for name, module in model.named_modules() if name.endswith(".mlp.gate")]


def record_choices(model: nn.Module) -> list[Tensor]:
    """Return a list to which each router appends its choices in a forward pass: int64 [tokens, per token]."""
    chosen: list[Tensor] = []
    for router in routers(model):

        def recording(hidden: Tensor, forward: Any = router.forward) -> Any:
            out = forward(hidden)
            chosen.append(out[2])
            return out

        router.forward = recording
    return chosen


def tell_choices(model: nn.Module) -> list[Tensor]:
    """Return a list of choices; in every forward pass each router takes the first one instead of its own choice."""
    choices: list[Tensor] = []
    for router in routers(model):

        def obeying(hidden: Tensor, router: Any = router) -> Any:
            logits, index = torch.nn.functional.linear(hidden, router.weight), choices.pop(0)
            weights = logits.softmax(-1).gather(1, index)  # as the module itself has it, bit for bit
            return logits, weights / weights.sum(-1, keepdim=True), index

        router.forward = obeying
    return choices


def experts_of(chosen: list[Tensor]) -> Tensor:
    """Return `Rollout.experts_LKT` of a sequence whose tokens were all put through the network."""
    experts_LKT = torch.stack(chosen, dim=1).to(torch.int16)
    experts_LKT[-1] = NO_EXPERT
    return experts_LKT
