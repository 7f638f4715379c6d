"""What the distributed optimizer keeps on this rank, for reading and for writing.

Megatron's own way to load it into a fresh optimizer depends on which Adam is inside (0.16: with torch's it fails); here the
tensors are reached directly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Shard:
    """The range of a parameter, flattened, that this rank's optimizer owns.

    start: its first element; weight: the parameter's values there, in the model's dtype; state: by the prefix that Megatron's
    `fully_reshardable` format puts before the parameter's name, the fp32 master (where the weight is not fp32 itself) and the
    moments of Adam. All are 1-dim, of one length, and views of what the optimizer uses.
    """

    parameter: torch.nn.Parameter
    start: int
    weight: Tensor
    state: dict[str, Tensor]


def shards(optimizer: MegatronOptimizer, create: bool = False) -> Iterator[Shard]:
    """Of every parameter that this rank owns a range of.

    create: give the optimizer the moments that it lacks before its first step, to be filled; else zeros stand for them.
    """
    for part in _parts(optimizer):
        for parameter, (group, order) in part.model_param_group_index_map.items():
            main = part.optimizer.param_groups[group]["params"][order]
            here = part._get_model_param_range_map(parameter)["param"]
            moments = part.optimizer.state.get(main)
            if not moments and create:
                moments = part.optimizer.state[main] = {name: torch.zeros_like(main) for name in _MOMENTS}
            elif not moments:
                moments = dict.fromkeys(_MOMENTS, main.new_zeros(1).expand(main.numel()))  # of one element's memory
            weight = parameter.detach().view(-1)[here.start : here.end]
            state = {"param": main, **{name: moments[name] for name in _MOMENTS}}
            if main.dtype == weight.dtype:  # then the master is a view of the weight
                del state["param"]
            yield Shard(parameter, here.start, weight, {f"optimizer.state.{k}.": v.detach() for k, v in state.items()})


def tensors(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """The masters and the moments there are, of which `shards` gives views, in the order in which the optimizer holds them."""
    for part in _parts(optimizer):
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (state[name] for name in _MOMENTS if name in state)


def count(optimizer: MegatronOptimizer) -> int:
    """Steps of Adam so far."""
    counts = [0]
    for part in _parts(optimizer):
        counts += [int(group.get("step", 0)) for group in part.optimizer.param_groups]
        counts += [int(state.get("step", 0)) for state in part.optimizer.state.values()]
    return max(counts)


def set_count(optimizer: MegatronOptimizer, step: int) -> None:
    """Go on from there; the moments are there already."""
    for part in _parts(optimizer):
        for group in part.optimizer.param_groups:
            if isinstance(part.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
                for main in group["params"]:
                    part.optimizer.state[main]["step"] = torch.tensor(float(step))
            elif group["params"]:  # fused ones count per group, and not where a group is empty
                group["step"] = step


def common_state(optimizer: MegatronOptimizer) -> dict[str, Any]:
    """What Megatron's format keeps of the optimizer besides tensors, the same on all ranks. Empty before its first step."""
    if count(optimizer) == 0:  # with torch's Adam inside, Megatron asks for its step
        return {}
    state = optimizer.state_dict()
    for part in state if isinstance(state, list) else [state]:
        part["param_state_sharding_type"] = "fully_reshardable"
    return state


def _parts(optimizer: MegatronOptimizer) -> list[Any]:
    """The distributed optimizers inside: one for experts, one for the rest, or fewer."""
    return [o for o in getattr(optimizer, "chained_optimizers", [optimizer]) if not o.is_stub_optimizer]
