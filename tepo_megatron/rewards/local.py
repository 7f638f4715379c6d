"""Reward terms that this machine grades: the right answer, programs, format, length, and a user's own function.

What a model wrote is read in worker processes (`pool.py`).
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import cast

from tepo_megatron.base import user_file
from tepo_megatron.base.errors import ConfigError, RewardError
from tepo_megatron.base.types import STATUSES, Status
from tepo_megatron.config.reward import CodeTermConfig, ReasoningGymTermConfig
from tepo_megatron.rewards.grading.answers import gold_answer
from tepo_megatron.rewards.pool import GradingPool, PoolLimits
from tepo_megatron.rewards.process import WorkerOutcome
from tepo_megatron.rewards.terms import UNSETTLED, Response, Verdict

_RIGHT: frozenset[Status] = frozenset({"exact", "equal"})
_CACHED_VERDICTS = 65536
# Limit since the end of all time limits of a program: starting sandboxes on a busy machine takes seconds; then `timeout`
_START_SECONDS = 60.0


class _PooledTerm:
    """A term whose workers start in the background when it is made."""

    pool: GradingPool

    async def close(self) -> None:
        """Kill the workers, and with them what they run."""
        await self.pool.close()


class MathTerm(_PooledTerm):
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
        self.pool = GradingPool(limits, ["equality", finder], "that math-verify is installed", tokenizer)
        self._compared: OrderedDict[tuple[str, str], asyncio.Future[WorkerOutcome]] = OrderedDict()

    async def grade(self, responses: Sequence[Response]) -> list[Verdict]:
        """Return one verdict per response; see `RewardTerm.grade`. Raises RewardError as the pool does."""
        return list(await asyncio.gather(*map(self._verdict, responses)))

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


class CodeTerm(_PooledTerm):
    """Gives 1 if the program passes all tests, else 0; with `credit: share` the share of the tests that it passes.

    passed     all tests
    failed     a test is not passed
    no_code    the response has no closed code block
    timeout    not all tests are passed, and the program, or all runs together, took too long
    died       the worker ended while grading
    bad_tests  the gold answer is no list of tests in a known form

    A worker process finds the program and starts the sandboxes (`grading/sandbox.py`), in which the program has its own
    limits. `timeout` may be the machine's fault; `response_seconds` is long so that it rarely is.
    """

    def __init__(self, entry: CodeTermConfig, workers: int, tokenizer: str = "") -> None:
        wall = entry.response_seconds + entry.wall_seconds
        # programs inherit the worker's limit of the address space
        limits = PoolLimits(workers, wall, wall + _START_SECONDS, max(1024, entry.memory_mib + 256))
        words = [entry.credit, str(entry.run_seconds), str(entry.wall_seconds), str(entry.response_seconds)]
        self.pool = GradingPool(
            limits, ["program", *words, str(entry.memory_mib), str(entry.processes)], "that bwrap works", tokenizer
        )

    async def grade(self, responses: Sequence[Response]) -> list[Verdict]:
        """Return one verdict per response; see `RewardTerm.grade`. Raises RewardError if no sandbox can be made."""
        outcomes = await self.pool.grade((r.answer, r.written) for r in responses)
        for outcome in outcomes:
            if outcome.status == "no_sandbox":
                raise RewardError(outcome.detail)
        return [Verdict(outcome.value, outcome.status) for outcome in outcomes]


class FormatTerm(_PooledTerm):
    """Gives 1 if the whole response matches a regular expression, otherwise 0.

    It runs in worker processes, since some expressions take practically forever. Statuses: matched, unmatched, timeout, died.
    """

    def __init__(self, pattern: str, limits: PoolLimits, tokenizer: str = "") -> None:
        self.pool = GradingPool(limits, ["pattern", pattern], "the pattern of reward.terms", tokenizer)

    async def grade(self, responses: Sequence[Response]) -> list[Verdict]:
        return [Verdict(outcome.value, outcome.status) for outcome in await self.pool.grade((r.written,) for r in responses)]


class LengthTerm:
    """Gives 1 if min_tokens <= |y| <= max_tokens, |y| / min_tokens for shorter responses, max_tokens / |y| for longer ones.

    |y| counts the tokens that the policy chose. The status is always `measured`.
    """

    pool = None

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        self._min_tokens, self._max_tokens = min_tokens, max_tokens

    async def grade(self, responses: Sequence[Response]) -> list[Verdict]:
        return [Verdict(self.value(r.tokens), "measured") for r in responses]

    def value(self, tokens: int) -> float:
        """Return the value of a response of that many tokens, in [0, 1]."""
        if tokens < self._min_tokens:
            return tokens / self._min_tokens
        return min(1.0, self._max_tokens / max(1, tokens))

    async def close(self) -> None:
        """Do nothing: this term holds no resources."""


class CustomTerm(_PooledTerm):
    """Grades with a user's function `name(prompt, response, answer[, row]) -> float` in worker processes.

    The first three are text. A parameter of the name `row` gets a dict of the other columns, as JSON can write them.

    Statuses: graded, timeout, died; the last two count as 0. If the function raises, or returns no finite number, grading ends
    with a RewardError that names file and line, since the function is at fault, not the sample.
    """

    def __init__(self, function: str, limits: PoolLimits, tokenizer: str = "") -> None:
        self._function = function
        self.pool = GradingPool(limits, ["custom", function], f"the function {function} of reward.terms", tokenizer)

    async def grade(self, responses: Sequence[Response]) -> list[Verdict]:
        """Return one verdict per response; see `RewardTerm.grade`. Raises RewardError if the function failed."""
        fields = ((r.prompt, r.written, r.answer, json.dumps(dict(r.row), default=str)) for r in responses)
        outcomes = await self.pool.grade(fields)
        for outcome in outcomes:
            if outcome.status == "failed":
                raise RewardError(f"the reward function {self._function} failed: {outcome.detail}; fix it")
        return [Verdict(outcome.value, outcome.status) for outcome in outcomes]


def check_function(spec: str) -> None:
    """Raise ConfigError unless `spec` names a function of (prompt, response, answer[, row]). This runs the function's file."""
    function, key = user_file.load(spec, "reward.terms: function"), f"reward.terms: function={spec}"
    if not callable(function.value):
        raise ConfigError(
            f"{key}: {function.name} is no function; write `def {function.name}(prompt, response, answer) -> float`"
        )
    named = ["row"] if user_file.takes(function.value, "row") else []
    user_file.check_takes(function, key, 3, "prompt, response, answer and, if it wants the other columns, row", *named)


class ReasoningGymTerm(_PooledTerm):
    """Grades with the verifier of the reasoning-gym dataset that the prompt comes from, in worker processes.

    Statuses: graded, no_answer, timeout, died; all but the first count as 0.
    """

    def __init__(self, entry: ReasoningGymTermConfig, limits: PoolLimits, tokenizer: str = "") -> None:
        arguments = ["reasoning_gym", entry.answer, entry.credit]
        self.pool = GradingPool(limits, arguments, "that the package reasoning-gym is installed", tokenizer)

    async def grade(self, responses: Sequence[Response]) -> list[Verdict]:
        """Return one verdict per response; see `RewardTerm.grade`. Raises RewardError as the pool does."""
        fields = ((r.row["source"], str(r.row["place"]), r.written) for r in responses)
        return [Verdict(outcome.value, outcome.status) for outcome in await self.pool.grade(fields)]
