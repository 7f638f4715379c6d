"""Access the tensors of the distributed optimizer on this rank, to read them and to write them.

Megatron's own way to load state into a fresh optimizer depends on which Adam it wraps (0.16: it fails with torch's). Here the
tensors are accessed directly.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class OptimizerShard:
    """The range of a flattened parameter that this rank's optimizer owns.

    All tensors are 1-dim, of the same length, and views of what the optimizer uses.
    """

    parameter: torch.nn.Parameter
    start: int  # index of the range's first element in the flattened parameter
    weight: Tensor  # the parameter's values in the range, in the model's dtype
    # the fp32 master (unless the weight is fp32 itself) and Adam's moments, by the prefix that Megatron's `fully_reshardable`
    # format puts before the parameter's name
    state: dict[str, Tensor]


def shards(optimizer: MegatronOptimizer, create: bool = False) -> Iterator[OptimizerShard]:
    """Yield the shard of every parameter of which this rank owns a range."""
    for part in _parts(optimizer):
        for parameter, main in _mains(part):
            here = part._get_model_param_range_map(parameter)["param"]
            moments = part.optimizer.state.get(main)
            if not moments and create:
                moments = part.optimizer.state[main] = {name: torch.zeros_like(main) for name in _MOMENTS}
            elif not moments:
                moments = dict.fromkeys(_MOMENTS, main.new_zeros(1).expand(main.numel()))  # it takes the memory of one element
            weight = parameter.detach().view(-1)[here.start : here.end]
            state = {"param": main, **{name: moments[name] for name in _MOMENTS}}
            if main.dtype == weight.dtype:  # then the master is a view of the weight
                del state["param"]
            yield OptimizerShard(parameter, here.start, weight, {f"optimizer.state.{k}.": v.detach() for k, v in state.items()})


def tensors(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Yield the masters and the moments that exist, in the order of the optimizer. `shards` yields views of these."""
    for part in _parts(optimizer):
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (state[name] for name in _MOMENTS if name in state)


def adam_steps(optimizer: MegatronOptimizer) -> int:
    """Return the number of Adam steps so far."""
    counts = [0]
    for part in _parts(optimizer):
        counts += [int(group.get("step", 0)) for group in part.optimizer.param_groups]
        counts += [int(state.get("step", 0)) for state in part.optimizer.state.values()]
    return max(counts)


def set_adam_steps(optimizer: MegatronOptimizer, step: int) -> None:
    """Set the number of Adam steps so far. The moments must exist."""
    for part in _parts(optimizer):
        for group in part.optimizer.param_groups:
            if isinstance(part.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
                for main in group["params"]:
                    part.optimizer.state[main]["step"] = torch.tensor(float(step))
            elif group["params"]:  # fused optimizers count per group, and have no count for an empty one
                group["step"] = step


def common_state(optimizer: MegatronOptimizer) -> dict[str, Any]:
    """Return what Megatron's format stores of the optimizer in addition to tensors; it is the same on all ranks."""
    if adam_steps(optimizer) == 0:  # with torch's Adam inside, `state_dict` reads its step, which is missing then
        return {}
    state = optimizer.state_dict()
    for part in state if isinstance(state, list) else [state]:
        part["param_state_sharding_type"] = "fully_reshardable"
    return state


def _mains(part: Any) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
    """Yield every parameter of a distributed optimizer with the tensor that Adam updates in its place.

    A group of Adam has the fp32 parameters first and the masters of the others behind them. Megatron's
    `model_param_group_index_map` counts in the order of its buffers instead, and names another tensor where a model has both
    (0.16 to 0.19).
    """
    groups = zip(part.optimizer.param_groups, part.model_fp32_groups, part.model_float16_groups, strict=True)
    for group, whole, half in groups:
        yield from zip((*whole, *half), group["params"], strict=True)


def _parts(optimizer: MegatronOptimizer) -> list[Any]:
    return [o for o in getattr(optimizer, "chained_optimizers", [optimizer]) if not o.is_stub_optimizer]
