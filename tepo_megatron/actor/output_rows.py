"""Only the response rows reach the output layer: prompt rows and padding cost no vocabulary-sized work."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor


class OutputRows:
    """A forward pre-hook on a GPTModel's output layer that keeps the rows in `current`.

    keep_hidden: the layer then gives these rows, [R, 1, H], instead of their logits, and `weight` holds what it would have
    multiplied them with (tied or its own), for whoever fuses the product with what comes after it.

    Under sequence parallelism the rows are picked after the gather over tp, whose backward is a reduce-scatter; the layer's
    own gather and its own all-reduce of the input gradient are then switched off (with the latter on, the gradient would be
    summed twice over tp).
    """

    def __init__(self, output_layer: torch.nn.Module, keep_hidden: bool = False) -> None:
        self.current: Tensor | None = None
        self.weight: Tensor | None = None
        self._gather = bool(output_layer.sequence_parallel)
        if self._gather:
            output_layer.sequence_parallel = False
            output_layer.disable_grad_reduce = True
        output_layer.register_forward_pre_hook(self._keep_rows, with_kwargs=True)
        if keep_hidden:
            self._own_weight = output_layer.weight
            output_layer.forward = self._pass_on

    def _keep_rows(self, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        hidden, *rest = args  # [S, 1, hidden], S / tp under sequence parallelism
        if self.current is None:
            raise RuntimeError("OutputRows.current was not set before the forward pass")
        if self._gather:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        return (hidden.index_select(0, self.current), *rest), kwargs

    def _pass_on(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        self.weight = self._own_weight if weight is None else weight
        return hidden, None
