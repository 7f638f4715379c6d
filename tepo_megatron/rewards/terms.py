"""The interface of reward terms, and the weighted sum of several terms."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from tepo_megatron.types import Rollout

Decode = Callable[[Sequence[int]], str]
UNSETTLED = frozenset({"timeout", "died"})


class Response:
    """A rollout as a reward term sees it."""

    def __init__(self, rollout: Rollout, decode: Decode) -> None:
        """Store the rollout; texts are decoded when they are first used.

        Args:
            rollout: Sequence to grade.
            decode: Turns token ids into text, leaving out special tokens.
        """
        self._rollout, self._decode = rollout, decode

    @cached_property
    def text(self) -> str:
        """Text that the policy wrote; what tools wrote in between is left out."""
        return self._decode(self._rollout.response_ids)

    @cached_property
    def prompt(self) -> str:
        """Text before the first token that the policy chose."""
        first = int(self._rollout.response_mask_L.int().argmax())
        return self._decode(self._rollout.token_ids_L[:first].tolist())

    @property
    def answer(self) -> str:
        """Gold answer."""
        return self._rollout.answer

    @property
    def tokens(self) -> int:
        """Number of tokens that the policy chose, |y|."""
        return self._rollout.response_length


@dataclass(frozen=True)
class Verdict:
    """One term's grade of one response.

    Attributes:
        value: Value in units of the reward.
        status: Reason for the value.
    """

    value: float
    status: str


class RewardTerm(Protocol):
    """One part of a reward. It may hold processes or connections."""

    def grade(self, responses: Sequence[Response]) -> list[Verdict]:
        """Return one verdict for each response, in order.

        A bad response gives a status, never an error. Raises RewardError if the term cannot work.
        """

    def close(self) -> None:
        """Release processes and connections. A second call does nothing."""


class WeightedReward(contextlib.AbstractContextManager["WeightedReward"]):
    """A `Reward` that is a weighted sum of terms.

    The first term is the verdict: its unweighted value is the `score` that filters and accuracies use, and its status is the
    rollout's. The other terms only shape the `reward`. If any term was not settled (timeout, died), the rollout has that
    status.
    """

    def __init__(self, terms: Sequence[tuple[float, RewardTerm]], decode: Decode) -> None:
        """Store the terms.

        Args:
            terms: (weight, term) of each; the first is the verdict.
            decode: Turns token ids into text, leaving out special tokens.
        """
        self.terms, self._decode = tuple(terms), decode

    def score(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return one graded rollout for each given rollout; see `Reward.score`."""
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
        """Close all terms; see `Reward.close`."""
        for _, term in self.terms:
            term.close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()
