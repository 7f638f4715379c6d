"""Divide the groups of a step into minibatches while they arrive (`training.stream`)."""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Literal, NamedTuple

from tepo_megatron.base.types import Rollout
from tepo_megatron.base.types.batch import minibatch_orders


class Minibatch(NamedTuple):
    """The groups of one minibatch. `ids`: index of each rollout in the rollout batch; see `TrainBatch.ids_B`."""

    rollouts: list[Rollout]
    ids: list[int]


class OrderedGroups:
    """Adds groups to a stream in the order in which they arrived, each as soon as it and those before it are graded."""

    def __init__(self, stream: "MinibatchStream", useful: Callable[[Future[list[Rollout]]], Sequence[list[Rollout]]]) -> None:
        self._stream, self._useful = stream, useful
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._submitted: deque[tuple[int, Future[list[Rollout]]]] = deque()

    def submit(self, place: int, grading: Future[list[Rollout]]) -> None:
        """Take over a group that is being graded. It is added by the thread that ends its grading."""
        with self._lock:
            self._submitted.append((place, grading))
        grading.add_done_callback(lambda _: self._add())

    def add_graded(self) -> None:
        """Add all groups that can be added now. Raises the first error of adding one, or of its grading."""
        self._add()
        if self._error is not None:
            raise self._error

    def _add(self) -> None:
        with self._lock:
            try:
                while self._error is None and self._submitted and self._submitted[0][1].done():
                    place, grading = self._submitted.popleft()
                    for group in self._useful(grading):
                        self._stream.add(place, group)
            except Exception as e:  # an error in a callback would be lost
                self._error = e


class MinibatchStream:
    """The minibatches of one step. Each is handed out as soon as it is complete, except the last one: `finish` returns it."""

    def __init__(
        self,
        how: Literal["prompt", "arrival"],
        groups: int,
        minibatch_prompts: int,
        seed: int,
        hand_out: Callable[[Minibatch], object],
    ) -> None:
        self._how, self._hand_out = how, hand_out
        self._minibatch_prompts, self._seed = minibatch_prompts, seed
        self._order = self._divided(groups)  # places of the groups of each minibatch
        self._handed_out = 0
        self._groups: dict[int, list[Rollout]] = {}  # place in the rollout batch -> group

    def expect(self, groups: int) -> None:
        """Divide another number of groups, of which none was added: a recorded step may have fewer. No effect for `arrival`."""
        if self._how == "prompt":
            self._order = self._divided(groups)

    def add(self, place: int, group: Sequence[Rollout]) -> None:
        """Add a graded group, and hand out the minibatches that it completes."""
        self._groups[place if self._how == "prompt" else len(self._groups)] = list(group)
        while self._handed_out < len(self._order) - 1 and self._groups.keys() >= set(self._order[self._handed_out]):
            self._hand_out(self._minibatch(self._order[self._handed_out]))
            self._handed_out += 1

    def finish(self) -> Minibatch:
        handed_out = {place for places in self._order[: self._handed_out] for place in places}
        if self._handed_out == len(self._order) - 1 and self._groups.keys() >= set(self._order[-1]):
            return self._minibatch(self._order[-1])
        return self._minibatch(sorted(self._groups.keys() - handed_out))

    @property
    def rollouts(self) -> list[Rollout]:
        """Return the rollouts of all groups in the order of the rollout batch."""
        return [rollout for place in sorted(self._groups) for rollout in self._groups[place]]

    @property
    def prompts(self) -> list[list[int]]:
        """Return the prompt ids of each minibatch, in the order in which the minibatches are trained on."""
        handed_out = [[self._groups[place][0].prompt_id for place in places] for places in self._order[: self._handed_out]]
        return [*handed_out, list(dict.fromkeys(rollout.prompt_id for rollout in self.finish().rollouts))]

    def _divided(self, groups: int) -> list[list[int]]:
        order = list(minibatch_orders(groups, self._minibatch_prompts, 1, self._seed))
        if self._how == "prompt":
            return order
        ends = itertools.accumulate(map(len, order))
        return [list(range(end - len(places), end)) for places, end in zip(order, ends, strict=True)]

    def _minibatch(self, places: Sequence[int]) -> Minibatch:
        ids = [self._first_id(place) + i for place in places for i in range(len(self._groups[place]))]
        return Minibatch([rollout for place in places for rollout in self._groups[place]], ids)

    def _first_id(self, place: int) -> int:
        """Return the number of rollouts of the groups before this one. Groups that are missing count as large as this one."""
        return sum(len(self._groups.get(before, self._groups[place])) for before in range(place))
