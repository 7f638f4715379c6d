"""Restrict the output layer to the response rows, so that prompt rows and padding cost no vocabulary-sized work."""

from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor


class OutputRows:
    """A forward pre-hook on a GPTModel's output layer that passes only the rows in `current`.

    Under sequence parallelism the rows are selected after a gather over tp, whose backward is a reduce-scatter. The layer's own
    gather and its own all-reduce of the input gradient are then switched off; with the latter on, the gradient would be summed
    twice over tp.

    Attributes:
        current: int64, `rows_R` of the microbatch. It must be set before each forward pass.
        weight: With `keep_hidden`, the weight (tied or the layer's own) of the product that the layer skipped.
    """

    def __init__(self, gather: bool, own_weight: Tensor | None) -> None:
        self.current: Tensor | None = None
        self.weight: Tensor | None = None
        self._gather, self._own_weight = gather, own_weight

    @classmethod
    def install(cls, output_layer: torch.nn.Module, keep_hidden: bool = False) -> "OutputRows":
        """Change the output layer of the last model chunk, and return its hook.

        `keep_hidden`: make the layer return the selected hidden states, [R, 1, H], instead of their logits, for code that fuses
        the product with the token statistics.
        """
        rows = cls(bool(output_layer.sequence_parallel), output_layer.weight)
        if rows._gather:
            output_layer.sequence_parallel = False
            output_layer.disable_grad_reduce = True
        output_layer.register_forward_pre_hook(rows._keep_rows, with_kwargs=True)
        if keep_hidden:
            output_layer.forward = rows._pass_on
        return rows

    def _keep_rows(self, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        hidden, *rest = args  # [S, 1, H], and S / tp rows under sequence parallelism
        if self.current is None:
            raise RuntimeError("OutputRows.current was not set before the forward pass")
        if self._gather:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        return (hidden.index_select(0, self.current), *rest), kwargs

    def _pass_on(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        self.weight = self._own_weight if weight is None else weight
        return hidden, None
