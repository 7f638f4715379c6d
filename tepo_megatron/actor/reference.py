"""The reference policy: keep its weights in host memory, and swap them in for a forward pass."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tepo_megatron.base.types import PackedMicrobatch, TrainBatch
from tepo_megatron.dist.platform.memory import HostArena
from tepo_megatron.ops.planning import Plan
from tepo_megatron.ops.token_statistics.teacher import TeacherRows

if TYPE_CHECKING:
    from tepo_megatron.actor.actor import Actor


class HostWeights:
    """A copy of parameters in host memory (`arena`)."""

    def __init__(self, parameters: Sequence[Tensor], kept: Sequence[Tensor], arena: HostArena) -> None:
        self._parameters, self._kept, self.arena = parameters, kept, arena

    @classmethod
    def copied(cls, parameters: Sequence[Tensor]) -> "HostWeights":
        """Return a copy of the current values of the parameters."""
        arena = HostArena(parameters[0].device if parameters else torch.device("cpu"))
        pieces = arena.pieces([p.nbytes for p in parameters])
        kept = [piece.view(p.dtype).view(p.shape) for piece, p in zip(pieces, parameters, strict=True)]
        copy = cls(parameters, kept, arena)
        copy.capture()
        return copy

    @torch.no_grad()
    def capture(self) -> None:
        """Copy the current values of the parameters over the kept ones."""
        for parameter, kept in zip(self._parameters, self._kept, strict=True):
            kept.copy_(parameter.detach())

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap the kept values into the parameters within the context, one at a time, and back afterwards, bit for bit."""
        self.exchange()
        try:
            yield
        finally:
            self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap parameters and kept values."""
        for parameter, kept in zip(self._parameters, self._kept, strict=True):
            current = parameter.detach().clone()
            parameter.copy_(kept)
            kept.copy_(current)


@dataclass
class Teacher:
    """The teacher's side of an update's microbatches, on a rank of the last pipeline stage; nothing on other ranks."""

    hidden: deque[Tensor]  # [R, H] of each microbatch in the order of the update, in host memory. `take` removes them.
    weight: Tensor | None  # this rank's rows of the teacher's output layer, on the device. None: another stage.

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
