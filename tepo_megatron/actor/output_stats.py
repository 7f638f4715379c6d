"""Token statistics of a microbatch from the output of the model's last stage."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tepo_megatron.actor.output_rows import OutputRows
from tepo_megatron.distributed.parallel import ParallelDims
from tepo_megatron.ops.output_layer import output_layer_stats
from tepo_megatron.ops.token_statistics.teacher import TeacherRows
from tepo_megatron.ops.vocab_parallel import token_stats
from tepo_megatron.types import PackedMicrobatch, SamplingMask, TokenStats, Truncation

Visit = Callable[[PackedMicrobatch, Tensor], None]  # is called with each microbatch and the output of the last stage


@dataclass(frozen=True)
class OutputStats:
    """Computes the token statistics of microbatches on the last pipeline stage.

    Attributes:
        rows: Has the output layer's weight under training.logits_budget_mib.
        sums_hidden_gradient: See `output_layer_stats`.
    """

    temperature: float
    vocab_size: int
    groups: ParallelDims
    rows: OutputRows | None
    budget_mib: int | None
    sums_hidden_gradient: bool

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
            output: Logits [R, V / tp], or hidden states [R, H] under training.logits_budget_mib.
            mask: The batch's sampling masks, on the device. None: the whole vocabulary.
            teacher: The teacher's rows, for the KL to it. Only under training.logits_budget_mib. None: no teacher.
        """
        rest = (microbatch.labels_R, self.temperature, self.groups.tp.group, self.vocab_size)
        mask_RK = None if mask is None else mask.rows(microbatch.token_R)
        if self.budget_mib is None:
            assert teacher is None, "the config is checked: a teacher needs hidden states"
            return token_stats(output, *rest, mask_RK=mask_RK, recompute=recompute)
        assert self.rows is not None
        return output_layer_stats(
            *(output, self.rows.weight, *rest),
            mask_RK=mask_RK,
            recompute=recompute,
            teacher=teacher,
            logits_budget=self.budget_mib * 2**20,
            sum_hidden_gradient=self.sums_hidden_gradient,
        )
