"""Token statistics of a microbatch from the output of the model's last stage."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor

from tepo_megatron.base.types import PackedMicrobatch, SamplingMask, TokenStats, Truncation
from tepo_megatron.dist.parallel import ParallelDims
from tepo_megatron.ops.output_layer import output_layer_stats
from tepo_megatron.ops.token_statistics.teacher import TeacherRows
from tepo_megatron.ops.vocab_parallel import token_stats


class OutputRows:
    """A forward pre-hook on a GPTModel's output layer that passes only the rows in `current`.

    Under sequence parallelism the rows are selected after a gather over tp, whose backward is a reduce-scatter. The layer's own
    gather and its own all-reduce of the input gradient are then switched off; with the latter on, the gradient would be summed
    twice over tp.
    """

    def __init__(self, gather: bool, own_weight: Tensor | None) -> None:
        self.current: Tensor | None = None  # int64, `rows_R` of the microbatch. It must be set before each forward pass.
        # With `keep_hidden`, the weight (tied or the layer's own) of the product that the layer skipped
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


Visit = Callable[[PackedMicrobatch, Tensor], None]  # is called with each microbatch and the output of the last stage


@dataclass(frozen=True)
class OutputStats:
    """Computes the token statistics of microbatches on the last pipeline stage."""

    temperature: float
    vocab_size: int
    groups: ParallelDims
    rows: OutputRows | None  # has the output layer's weight under training.logits_budget_mib
    budget_mib: int | None
    sums_hidden_gradient: bool  # see `output_layer_stats`

    def __call__(
        self,
        microbatch: PackedMicrobatch,
        output: Tensor,
        mask: SamplingMask | None = None,
        recompute: Truncation | None = None,
        teacher: TeacherRows | None = None,
    ) -> TokenStats:
        """Return the statistics of the microbatch's rows.

        Args:
            output: Logits [R, V / tp], or hidden states [R, H] under training.logits_budget_mib
            mask: The batch's sampling masks, on the device. None: the whole vocabulary.
            teacher: The teacher's rows, for the KL to it. Only under training.logits_budget_mib. None: no teacher.
        """
        labels_R, temperature, group = microbatch.labels_R, self.temperature, self.groups.tp.group
        mask_RK = None if mask is None else mask.rows(microbatch.token_R)
        if self.budget_mib is None:
            assert teacher is None, "the config is checked: a teacher needs hidden states"
            return token_stats(output, labels_R, temperature, group, self.vocab_size, mask_RK=mask_RK, recompute=recompute)
        assert self.rows is not None
        return output_layer_stats(
            output,
            self.rows.weight,
            labels_R,
            temperature,
            group,
            self.vocab_size,
            mask_RK=mask_RK,
            recompute=recompute,
            teacher=teacher,
            logits_budget=self.budget_mib * 2**20,
            sum_hidden_gradient=self.sums_hidden_gradient,
        )
