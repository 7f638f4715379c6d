"""The reward term of programs: the last code block of a response, graded by the unit tests of its row."""

from collections.abc import Sequence

from tepo_megatron.config.reward import CodeTermConfig
from tepo_megatron.errors import RewardError
from tepo_megatron.rewards.pool import GradingPool, PoolLimits
from tepo_megatron.rewards.terms import Response, Verdict

# Limit since the end of all time limits of a program: starting sandboxes on a busy machine takes seconds; then `timeout`
_START_SECONDS = 60.0


class CodeTerm:
    """Gives 1 if the program passes all tests, else 0; with `credit: share` the share of the tests that it passes.

    passed     all tests
    failed     a test is not passed
    no_code    the response has no closed code block
    timeout    not all tests are passed, and the program, or all runs together, took too long
    died       the worker ended while grading
    bad_tests  the gold answer is no list of tests in a known form

    A worker process finds the program and starts the sandboxes (`grading/sandbox.py`), in which the program has limits of its
    own. `timeout` may be the machine's fault; `response_seconds` is long so that it rarely is.
    """

    def __init__(self, entry: CodeTermConfig, workers: int, tokenizer: str = "") -> None:
        """Start the workers in the background."""
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

    async def close(self) -> None:
        """Kill the workers, and with them what they run."""
        await self.pool.close()
