"""What grades a response, and the weighted sum of several that do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, Self

from tepo_megatron.types import Rollout

Decode = Callable[[Sequence[int]], str]
UNSETTLED = frozenset({"timeout", "died"})


class Response:
    """A rollout as a term sees it. decode: token ids -> text without special tokens, called when a text is asked for."""

    def __init__(self, rollout: Rollout, decode: Decode) -> None:
        self._rollout, self._decode = rollout, decode

    @cached_property
    def text(self) -> str:
        """What the policy wrote; what tools wrote in between is left out."""
        return self._decode(self._rollout.response_ids)

    @cached_property
    def prompt(self) -> str:
        """What stood before it."""
        first = int(self._rollout.response_mask_L.int().argmax())
        return self._decode(self._rollout.token_ids_L[:first].tolist())

    @property
    def answer(self) -> str:
        """The gold answer."""
        return self._rollout.answer

    @property
    def tokens(self) -> int:
        """|y|: tokens that the policy chose."""
        return self._rollout.response_length


@dataclass(frozen=True)
class Verdict:
    """value: in units of the reward; status: why."""

    value: float
    status: str


class Term(Protocol):
    """One part of a reward; it may hold processes or connections."""

    def grade(self, responses: Sequence[Response]) -> list[Verdict]:
        """One verdict for each response, in order. A bad response is a status; RewardError if the term cannot work."""
        ...

    def close(self) -> None:
        """Give back what it holds. A second call does nothing."""
        ...


class WeightedReward:
    """See `rewards.Reward`: a weighted sum of terms.

    The first term is the verdict: its value, unweighted, is the `score` that filters and accuracies use, its status the
    rollout's; the others shape the `reward` only. One of them that was not settled (timeout, died) is seen in the status.
    """

    def __init__(self, terms: Sequence[tuple[float, Term]], decode: Decode) -> None:
        self.terms, self._decode = tuple(terms), decode

    def score(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """See `Reward.score`."""
        responses = [Response(rollout, self._decode) for rollout in rollouts]
        columns = [term.grade(responses) for _, term in self.terms]
        graded = []
        for rollout, verdicts in zip(rollouts, zip(*columns, strict=True), strict=True):
            reward = sum(weight * verdict.value for (weight, _), verdict in zip(self.terms, verdicts, strict=True))
            unsettled = [verdict.status for verdict in verdicts if verdict.status in UNSETTLED]
            status = (unsettled or [verdicts[0].status])[0]
            graded.append(dataclasses.replace(rollout, reward=reward, score=verdicts[0].value, status=status))
        return graded

    def close(self) -> None:
        """See `Reward.close`."""
        for _, term in self.terms:
            term.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
