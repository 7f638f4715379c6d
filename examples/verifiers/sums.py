"""A taskset of verifiers: sums, with a reward for an answer that ends in the right number."""

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    """A sum."""

    answer: str


class SumTask(vf.Task[SumData]):
    """A sum, graded."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Return 1 if the last message ends in the answer."""
        return float(trace.last_reply.strip().endswith(self.data.answer))


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    """All sums of two digits."""

    def load(self) -> Iterable[SumTask]:
        """Yield the tasks."""
        for left in range(10):
            for right in range(10):
                data = SumData(prompt=f"{left}+{right}?", answer=str(left + right))
                yield SumTask(data, self.config.task)
