"""Reward terms that grade the final answer right or wrong: by exact string match, otherwise math-verify in worker processes."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import cast

from tepo_megatron.errors import RewardError
from tepo_megatron.grading.answers import canonical, integer
from tepo_megatron.rewards.gold import MAX_ANSWER_CHARS, gold_answer, gold_fault
from tepo_megatron.rewards.pool import GradingPool, PoolLimits
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

    The last 65536 verdicts by (gold, answer) are cached, least recently used evicted first. `died` and `timeout` are not
    cached, since the cause may lie outside the answer.
    """

    def __init__(self, find: Callable[[str], str | None], limits: PoolLimits) -> None:
        """Start the workers in the background.

        Args:
            find: Returns the final answer in a text, or None for none.
            limits: Limits of the worker processes.
        """
        self._find = find
        self.pool = GradingPool(limits, ["equality"], "that math-verify is installed")
        self._verdicts: OrderedDict[tuple[str, str], Status] = OrderedDict()

    def grade(self, responses: Sequence[Response]) -> list[Verdict]:
        """Return one verdict per response; see `Term.grade`. Raises RewardError as the pool does."""
        statuses = self._grade([(gold_answer(r.answer), self._find(r.text)) for r in responses])
        return [Verdict(float(status in _RIGHT), status) for status in statuses]

    def close(self) -> None:
        """Kill the workers."""
        self.pool.close()

    def _grade(self, pairs: Sequence[tuple[str, str | None]]) -> list[Status]:
        """Return one status for each (gold, answer) pair; equal pairs are graded once."""
        settled: dict[tuple[str, str | None], Status] = {}
        open_pairs: dict[tuple[str, str], None] = {}  # in order of appearance
        for gold, answer in dict.fromkeys(pairs):
            status = self._settle_here(gold, answer)
            if status is not None:
                settled[gold, answer] = status
            elif answer is not None:
                open_pairs[gold, answer] = None
        for pair, outcome in zip(open_pairs, self.pool.grade(list(open_pairs)), strict=True):
            if outcome.status not in STATUSES:
                raise RewardError(f"a grading worker answered {outcome.status!r}, which is no status; reinstall tepo-megatron")
            settled[pair] = cast(Status, outcome.status)
            if outcome.status not in UNSETTLED:  # a timeout or death may be due to the machine
                self._verdicts[pair] = settled[pair]
                if len(self._verdicts) > _CACHED_VERDICTS:
                    self._verdicts.popitem(last=False)
        return [settled[pair] for pair in pairs]

    def _settle_here(self, gold: str, answer: str | None) -> Status | None:
        """Return the status if the pair can be settled without a worker, otherwise None."""
        if answer is None:
            return "no_box"
        if answer == gold and gold:
            return "exact"
        if len(answer) > MAX_ANSWER_CHARS:
            return "too_long"
        if (gold, answer) in self._verdicts:
            self._verdicts.move_to_end((gold, answer))
            return self._verdicts[gold, answer]
        if gold_fault(gold) is not None:
            return "bad_gold"
        wanted, given = canonical(gold), canonical(answer)
        if (a := integer(wanted)) is not None and (b := integer(given)) is not None:
            return "equal" if a == b else "wrong"
        return "equal" if wanted == given else None
