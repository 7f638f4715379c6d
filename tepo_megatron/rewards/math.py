r"""Right or wrong, by the last `\boxed{}`: exact string match, else math-verify in worker processes."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Literal, Self

from tepo_megatron.rewards.boxed import last_boxed
from tepo_megatron.rewards.pool import GradingPool, PoolStatus
from tepo_megatron.types import Rollout

Status = Literal["exact", "no_box", "too_long"] | PoolStatus

_RIGHT: frozenset[Status] = frozenset({"exact", "equal"})
_CACHED_VERDICTS = 65536


class MathReward:
    """1 for a right answer, 0 for any other; `Rollout.status` says why.

    exact     the box holds the gold answer, character for character
    equal     math-verify finds both equal
    wrong     both parse and are not equal
    unparsed  the box holds nothing that math-verify can read
    no_box    no closed box
    too_long  the box holds more than `max_answer_chars`
    timeout   not settled within `soft_seconds` (the worker gave up) or `hard_seconds` (the worker was killed)
    died      the worker ended while at it
    bad_gold  the gold answer is empty, longer than `max_answer_chars`, or cannot be read

    Verdicts are remembered by (gold, answer), least recently used out first; `died` is not, since the fault may lie
    elsewhere. decode: response token ids -> text without special tokens.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        workers: int,
        soft_seconds: float,
        hard_seconds: float,
        memory_mib: int,
        max_answer_chars: int,
    ) -> None:
        self._decode = decode
        self._max_answer_chars = max_answer_chars
        self._pool = GradingPool(workers, soft_seconds, hard_seconds, memory_mib)
        self._verdicts: OrderedDict[tuple[str, str], Status] = OrderedDict()

    def score(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The same rollouts in the same order, with reward, score and status. Raises RewardError as the pool does."""
        statuses = self._grade([(r.answer.strip(), last_boxed(self._decode(r.response_ids))) for r in rollouts])
        graded = []
        for rollout, status in zip(rollouts, statuses, strict=True):
            score = float(status in _RIGHT)
            graded.append(dataclasses.replace(rollout, reward=score, score=score, status=status))
        return graded

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the grading workers."""
        return self._pool.pids

    def _grade(self, pairs: Sequence[tuple[str, str | None]]) -> list[Status]:
        """One status for each (gold, answer); equal pairs are graded once."""
        settled: dict[tuple[str, str | None], Status] = {}
        open_pairs: dict[tuple[str, str], None] = {}  # in order of appearance
        for gold, answer in pairs:
            status = self._settle_here(gold, answer)
            if status is not None:
                settled[gold, answer] = status
            elif answer is not None:
                open_pairs[gold, answer] = None
        for pair, verdict in zip(open_pairs, self._pool.grade(list(open_pairs)), strict=True):
            settled[pair] = verdict
            if verdict not in ("died", "timeout"):  # these say something of the moment, not of the answer
                self._remember(pair, verdict)
        return [settled[pair] for pair in pairs]

    def _settle_here(self, gold: str, answer: str | None) -> Status | None:
        """The status that needs no worker, if any."""
        if answer is None:
            return "no_box"
        if answer == gold and gold:
            return "exact"
        if len(answer) > self._max_answer_chars:
            return "too_long"
        if not gold or len(gold) > self._max_answer_chars:
            return "bad_gold"
        if (gold, answer) in self._verdicts:
            self._verdicts.move_to_end((gold, answer))
        return self._verdicts.get((gold, answer))

    def _remember(self, pair: tuple[str, str], verdict: Status) -> None:
        self._verdicts[pair] = verdict
        if len(self._verdicts) > _CACHED_VERDICTS:
            self._verdicts.popitem(last=False)
