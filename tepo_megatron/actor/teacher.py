"""The teacher of full-vocabulary distillation: its hidden states for the microbatches of one update, and its output layer."""

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tepo_megatron.ops.planning import Plan
from tepo_megatron.ops.token_statistics.teacher import TeacherRows
from tepo_megatron.types import PackedMicrobatch, TrainBatch

if TYPE_CHECKING:
    from tepo_megatron.actor.actor import Actor


@dataclass
class Teacher:
    """The teacher's side of an update's microbatches, on a rank of the last pipeline stage; nothing on other ranks.

    Attributes:
        hidden: [R, H] of each microbatch in the order of the update, in host memory. `take` removes them.
        weight: This rank's rows of the teacher's output layer, on the device. None: another stage.
    """

    hidden: deque[Tensor]
    weight: Tensor | None

    @classmethod
    @torch.no_grad()
    def visit(cls, actor: "Actor", batch: TrainBatch, plan: Plan) -> "Teacher":
        """Run the reference policy over the microbatches of an update, in the place of the policy's weights.

        Its hidden states cross the pipeline as in any forward pass; no rank gets those of another one's rows. Its own routers
        choose experts.
        """
        assert actor.reference is not None, "keep_reference comes first"
        hidden: deque[Tensor] = deque()
        actor.finish_step()
        with actor.reference.in_place():
            actor.schedule.forward(
                actor.packer.pack(batch, plan, replays=False), lambda _, output: hidden.append(output.to("cpu"))
            )
            rows = actor.rows
            weight = None if rows is None or rows.weight is None else rows.weight.detach().clone()
        return cls(hidden, weight)

    def take(self, microbatch: PackedMicrobatch) -> TeacherRows:
        """Return the teacher's rows of the next microbatch, on the device."""
        assert self.weight is not None, "only the last stage has output rows"
        hidden_R = self.hidden.popleft()
        if hidden_R.size(0) != microbatch.labels_R.numel():
            raise RuntimeError(
                f"the teacher's pass has {hidden_R.size(0)} rows where the update has {microbatch.labels_R.numel()}: the "
                "microbatches came in another order"
            )
        return TeacherRows(hidden_R.to(self.weight.device, non_blocking=True), self.weight)
