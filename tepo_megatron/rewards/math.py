"""Reward terms that grade the final answer right or wrong: by exact string match, otherwise math-verify in worker processes."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import cast

from tepo_megatron.errors import RewardError
from tepo_megatron.grading.answers import gold_answer
from tepo_megatron.rewards.pool import GradingPool, PoolLimits
from tepo_megatron.rewards.process import WorkerOutcome
from tepo_megatron.rewards.terms import UNSETTLED, Response, Verdict
from tepo_megatron.types import STATUSES, Status

_RIGHT: frozenset[Status] = frozenset({"exact", "equal"})
_CACHED_VERDICTS = 65536


class MathTerm:
    """Gives 1 for a right answer and 0 for any other. The status says why.

    exact     the answer is the gold answer, character for character
    equal     both are equal in value or in their words
    wrong     both can be read and are not equal
    unparsed  math-verify cannot read the answer
    no_box    there is no closed box (nor an `Answer:` line, where that counts)
    too_long  the answer has more than MAX_ANSWER_CHARS characters
    timeout   not settled within `soft_seconds` of processor time (the worker gave up) or `hard_seconds` (it was killed)
    died      the worker ended while grading, or sent an invalid reply
    bad_gold  the gold answer is empty, longer than MAX_ANSWER_CHARS, or unreadable

    A worker decodes each response, finds the answer and compares it as a string. Pairs (gold, answer) that this does not settle
    are compared by math-verify, each once. The last 65536 of them are cached, least recently used evicted first. `died` and
    `timeout` are not cached, since the cause may lie outside the answer.
    """

    def __init__(self, finder: str, limits: PoolLimits, tokenizer: str = "") -> None:
        """Start the workers in the background."""
        self.pool = GradingPool(limits, ["equality", finder], "that math-verify is installed", tokenizer)
        self._compared: OrderedDict[tuple[str, str], asyncio.Future[WorkerOutcome]] = OrderedDict()

    async def grade(self, responses: Sequence[Response]) -> list[Verdict]:
        """Return one verdict per response; see `RewardTerm.grade`. Raises RewardError as the pool does."""
        return list(await asyncio.gather(*map(self._verdict, responses)))

    async def close(self) -> None:
        await self.pool.close()

    async def _verdict(self, response: Response) -> Verdict:
        # reading a response is linear in its length, so a time-out says something about the machine only
        outcome = await self.pool.ask(("read", response.answer, response.written), repeats_timeout=True)
        if outcome.status == "open":
            outcome = await self._compare(gold_answer(response.answer), outcome.detail)
        if outcome.status not in STATUSES:
            raise RewardError(f"a grading worker answered {outcome.status!r}, which is no status; reinstall tepo-megatron")
        status = cast(Status, outcome.status)
        return Verdict(float(status in _RIGHT), status)

    async def _compare(self, gold: str, answer: str) -> WorkerOutcome:
        pair = gold, answer
        if pair not in self._compared:
            self._compared[pair] = self.pool.ask(("compare", *pair))
            if len(self._compared) > _CACHED_VERDICTS:
                self._compared.popitem(last=False)
        self._compared.move_to_end(pair)
        outcome = await asyncio.shield(self._compared[pair])  # others may wait for it, too
        if outcome.status in UNSETTLED:  # a timeout or death may be due to the machine
            self._compared.pop(pair, None)
        return outcome
