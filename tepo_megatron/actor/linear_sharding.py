"""Describe the parameters of a gated delta net for Megatron's checkpoints, so that a checkpoint does not depend on tp.

The rows of `in_proj` and of the convolution belong to several kinds of heads, and a tensor-parallel rank has its part of each
kind. A checkpoint therefore stores each kind as a tensor of its own, as Megatron does with gate and up projections.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor

# The kinds of rows; the names are those of Megatron-Core's own gated delta net.
_KINDS = ("query", "key", "value", "z", "beta", "alpha")
_SPLIT_OVER_TP = {"A_log": 0, "dt_bias": 0, "conv_weight": 0}


def sharded_parameters(
    layer: MegatronModule,
    sections: Sequence[int],
    prefix: str,
    sharded_offsets: tuple[Any, ...],
    metadata: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return the sharded state dict of a `GatedDeltaNet`."""
    metadata = ensure_metadata_has_dp_cp_group(metadata)
    own = dict(layer.named_parameters(recurse=False))
    state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
        own, prefix, _SPLIT_OVER_TP, sharded_offsets, tp_group=layer.tp_group, dp_cp_group=metadata["dp_cp_group"]
    )
    for name, module in layer.named_children():
        state |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=layer.tp_group)
    for name, rows in (("in_proj.weight", sections), ("conv_weight", sections[:3])):
        state[prefix + name] = _by_kind(state[prefix + name], rows)
    return state


def _by_kind(whole: ShardedTensor, rows: Sequence[int]) -> ShardedTensorFactory:
    template = whole.without_data()
    at = whole.prepend_axis_num  # the dimension of the rows in the global tensor

    @torch.no_grad()
    def build(key: str, parameter: Tensor, replica_id: Any, flattened_range: slice | None) -> list[ShardedTensor]:
        assert flattened_range is None, "checkpoints of flattened parameters are not supported"
        parts, parallel = [], template.axis_fragmentations[at]
        for kind, n, data in zip(_KINDS, rows, parameter.split(list(rows)), strict=False):
            shape, offset = list(template.global_shape), list(template.global_offset)
            rank = offset[at] // parameter.size(0)
            shape[at], offset[at] = n * parallel, n * rank
            part = replace(
                template, key=f"{key}.{kind}", data=data, dtype=data.dtype, local_shape=tuple(data.shape),
                global_shape=tuple(shape), global_offset=tuple(offset), replica_id=replica_id,
            )  # fmt: skip
            parts.append(part)
        return parts

    return ShardedTensorFactory(whole.key, whole.data, build, _joined, whole.replica_id)


@torch.no_grad()
def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts)
