"""The interface of reward terms, the grading queue, which sums up several terms, and the penalty of overlong responses.

The penalty grows as a response nears the length limit (DAPO, arXiv 2503.14476, Eq. 13).
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.base.loop import LoopFuture, LoopThread
from tepo_megatron.base.types import Rollout, split_samples
from tepo_megatron.rewards.pool import GradingPool
from tepo_megatron.rewards.process import Field

Decode = Callable[[Sequence[int]], str]
UNSETTLED = frozenset({"timeout", "died", "unjudged"})


class Response:
    """A rollout as a reward term sees it."""

    def __init__(self, rollout: Rollout, decode: Decode, in_workers: bool = False) -> None:
        self._rollout, self._decode, self._in_workers = rollout, decode, in_workers

    @cached_property
    def written(self) -> Field:
        """Tokens that the policy chose, as text or int32 ids. What tools wrote in between is left out."""
        return self._field(self._rollout.token_ids_L.numpy()[self._rollout.response_mask_L.numpy()])

    @cached_property
    def prompt(self) -> Field:
        """Tokens before the first that the policy chose, as text or int32 ids."""
        return self._field(self._rollout.token_ids_L.numpy()[: int(self._rollout.response_mask_L.numpy().argmax())])

    @property
    def answer(self) -> str:
        """Gold answer."""
        return self._rollout.answer

    @property
    def row(self) -> Mapping[str, Any]:
        """Other columns of the prompt's row."""
        return self._rollout.row

    @property
    def tokens(self) -> int:
        """Number of tokens that the policy chose, |y|."""
        return self._rollout.response_length

    def decoded(self) -> tuple[str, str]:
        """Return the texts of `prompt` and `written`, decoded in this process."""
        here = Response(self._rollout, self._decode)
        return str(here.prompt), str(here.written)

    def _field(self, ids_L: NDArray[np.int64]) -> Field:  # NumPy starts no threads and takes a tenth of the time
        return ids_L.astype(np.int32).tobytes() if self._in_workers else self._decode(ids_L.tolist())


@dataclass(frozen=True)
class Verdict:
    """One term's grade of one response."""

    value: float
    status: str


class RewardTerm(Protocol):
    """One part of a reward. It may hold processes or connections. All coroutines run in one event loop, many at once."""

    @property
    def pool(self) -> GradingPool | None:
        """The worker processes, if the term has some."""

    async def grade(self, responses: Sequence[Response]) -> list[Verdict]:
        """Return one verdict for each response, in order."""

    async def close(self) -> None:
        """Release processes and connections. A second call does nothing."""


class WeightedReward(contextlib.AbstractContextManager["WeightedReward"]):
    """A weighted sum of terms, and their grading queue: a thread that grades all submitted groups at once.

    The first term is the verdict: its unweighted value is the `score` that filters and accuracies use, and its status is the
    rollout's. The other terms only shape the `reward`. If any term was not settled (timeout, died, unjudged), the rollout has
    that status.
    """

    def __init__(self, terms: Sequence[tuple[float, RewardTerm]], decode: Decode, in_workers: bool = False) -> None:
        self.terms, self._decode, self._in_workers = tuple(terms), decode, in_workers
        self._loop, self._open = LoopThread("grading"), set[Future[list[Rollout]]]()
        self._closed = False

    @property
    def cpu_seconds(self) -> float:
        """Processor time that the workers of all terms have taken so far."""
        return sum(term.pool.cpu_seconds for _, term in self.terms if term.pool is not None)

    def submit(self, group: Sequence[Rollout]) -> LoopFuture[list[Rollout]]:
        """Start to grade a group next to those submitted before, and return its future result at once; see `score`."""
        if self._closed:
            raise ValueError("the reward is closed")
        graded = self._loop.submit(self._grade(group))
        self._open.add(graded)
        graded.add_done_callback(self._open.discard)
        return graded

    def score(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return one graded rollout for each given rollout, in order, with `reward`, `score` and `status` set.

        A bad answer gives a status, never an error. Raises RewardError if the grader itself cannot work.
        """
        try:
            return self.submit(rollouts).result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release processes and connections. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._loop.run(self._close())
            self._loop.stop()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def _close(self) -> None:
        for graded in list(self._open):
            graded.cancel()
        for _, term in self.terms:
            await term.close()

    async def _grade(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Grade the last sequence of each sample, which the others share. Lost samples get 0, given rewards stay."""
        samples = split_samples(rollouts)
        asked = [sample[-1] for sample in samples if not sample[-1].failure and sample[-1].status != "given"]
        grades = iter(await self._grade_all(asked) if asked else [])
        by_id: dict[int, Rollout] = {}
        for sample in samples:
            last = sample[-1]
            if last.failure:
                last = dataclasses.replace(last, reward=0.0, score=0.0, status="lost")
            elif last.status != "given":
                last = next(grades)
            same = {name: getattr(last, name) for name in ("reward", "score", "status", "terms")}
            by_id |= {id(rollout): dataclasses.replace(rollout, **same) for rollout in sample}
        return [by_id[id(rollout)] for rollout in rollouts]

    async def _grade_all(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        responses = [Response(rollout, self._decode, self._in_workers) for rollout in rollouts]
        columns = await asyncio.gather(*(term.grade(responses) for _, term in self.terms))
        graded = []
        for rollout, verdicts in zip(rollouts, zip(*columns, strict=True), strict=True):
            terms = tuple((weight, verdict.value) for (weight, _), verdict in zip(self.terms, verdicts, strict=True))
            reward = sum(weight * value for weight, value in terms)
            unsettled = [verdict.status for verdict in verdicts if verdict.status in UNSETTLED]
            status = (unsettled or [verdicts[0].status])[0]
            scored = dataclasses.replace(rollout, reward=reward, score=verdicts[0].value, status=status, terms=terms)
            graded.append(scored)
        return graded


@dataclass(frozen=True)
class OverlongShaping:
    """Adds min(0, -(|y| - (max_tokens - buffer_tokens)) / buffer_tokens * penalty) to the reward of a response of |y| tokens.

    The penalty is 0 up to max_tokens - buffer_tokens tokens and falls linearly to -penalty at max_tokens. A response cut off at
    the limit is treated like one that ends there. |y| counts all tokens after the prompt, those of tools too. Raises
    ConfigError unless 0 < buffer_tokens < max_tokens. `penalty`: penalty at the limit, in units of the reward. DAPO has 1 with
    verdicts of 1 and -1, which corresponds to 0.5 with our verdicts of 1 and 0.
    """

    max_tokens: int
    buffer_tokens: int
    penalty: float

    def __post_init__(self) -> None:
        if not 0 < self.buffer_tokens < self.max_tokens:
            raise ConfigError(
                f"reward.overlong_buffer_tokens={self.buffer_tokens} must be below rollout.max_response_tokens="
                f"{self.max_tokens}, or every response is penalized; lower the first or raise the second"
            )

    def term(self, response_tokens: int) -> float:
        """Return the change of the reward for a response of that many tokens; at most 0."""
        excess = response_tokens - (self.max_tokens - self.buffer_tokens)
        return min(0.0, -excess / self.buffer_tokens * self.penalty)

    def shape(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the graded rollouts in order with a shaped `reward`. The `score` of filters and accuracies is unchanged."""
        return [dataclasses.replace(r, reward=r.reward + self.term(_tokens_since_prompt(r))) for r in rollouts]


def _tokens_since_prompt(rollout: Rollout) -> int:
    """Count the tokens from the first that the policy chose to the end. Tokens of tools in between count towards max_tokens."""
    return rollout.token_ids_L.numel() - int(rollout.response_mask_L.int().argmax())
