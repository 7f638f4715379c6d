"""Rewards from a remote server: one HTTP request per batch."""

import asyncio
import json
import math
from collections.abc import Sequence

from tepo_megatron.rewards.pool import GradingPool
from tepo_megatron.rewards.posting import FailedAttempt, GradingServer
from tepo_megatron.rewards.terms import Response, Verdict
from tepo_megatron.utils.escaping import excerpt
from tepo_megatron.utils.exchange import BadAnswer, HttpAnswer

ANSWER_BYTES, SAMPLE_BYTES = 2**20, 4096  # the largest answer is the first, plus the second for each sample
ATTEMPTS = 4  # to send the same batch
TEXT_BYTES = 64 * 2**20  # of a worker's reply with a decoded prompt and response
BACKOFF_SECONDS = 1.0  # pause before the second attempt, doubled for each further one


class HttpTerm:
    """Grades batches on an HTTP server.

    It posts {"samples": [{"prompt", "response", "answer"}, ...]} and expects {"rewards": [number, ...]}, one per sample, in
    order. The status is always `graded`. Anything but such an answer is a failure, and the last failed attempt raises
    RewardError: a sample is never graded 0 because a server was unreachable. Answers above ANSWER_BYTES + SAMPLE_BYTES per
    sample are failures, too. `GradingServer` says what else is.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_seconds: float,
        attempts: int,
        backoff_seconds: float,
        key_variable: str | None,
        concurrency: int,
        pool: GradingPool | None = None,
    ) -> None:
        """Prepare the connection; nothing is sent yet."""
        self.pool = pool
        self._server = GradingServer(
            url,
            name=f"the reward server {url}",
            fix="fix the server, or raise timeout_seconds of its entry in reward.terms",
            timeout_seconds=timeout_seconds,
            attempts=attempts,
            backoff_seconds=backoff_seconds,
            key_variable=key_variable,
            concurrency=concurrency,
        )

    async def grade(self, responses: Sequence[Response]) -> list[Verdict]:
        """Return one verdict per response; see `RewardTerm.grade`."""
        if not responses:
            return []
        found = await self._server.post(
            "",
            lambda: self._payload(responses),
            ANSWER_BYTES + SAMPLE_BYTES * len(responses),
            lambda answer: _rewards(answer, len(responses)),
        )
        return [Verdict(value, "graded") for value in found]

    async def close(self) -> None:
        """Close the connections and kill the workers."""
        await self._server.close()
        if self.pool is not None:
            await self.pool.close()

    async def _payload(self, responses: Sequence[Response]) -> bytes:
        texts = await asyncio.gather(*(texts_of(response, self.pool) for response in responses))
        samples = [{"prompt": p, "response": w, "answer": r.answer} for (p, w), r in zip(texts, responses, strict=True)]
        return json.dumps({"samples": samples}).encode()


async def texts_of(response: Response, pool: GradingPool | None) -> tuple[str, str]:
    """Return the prompt and the response as text, decoded by a worker. If none can, this process decodes.

    `pool`: workers with a grader `texts` or `verdict`. None: this process decodes.
    """
    outcome = await pool.ask((response.prompt, response.written)) if pool is not None else None
    if outcome is None or outcome.status != "decoded":
        return response.decoded()
    prompt, written = json.loads(outcome.detail)
    return prompt, written


def _rewards(answer: HttpAnswer, samples: int) -> list[float]:
    try:
        found = answer.json()["rewards"]
    except BadAnswer as e:
        raise FailedAttempt(f'answered with something other than {{"rewards": [...]}}: {e}') from None
    except (KeyError, TypeError, IndexError):
        raise FailedAttempt('answered with something other than {"rewards": [...]}') from None
    if not isinstance(found, list) or len(found) != samples:
        count = len(found) if isinstance(found, list) else "no list of"
        raise FailedAttempt(f"answered with {count} rewards for {samples} samples")
    for i, value in enumerate(found):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            shown = excerpt(str(value), 40)
            raise FailedAttempt(f"answered with {shown!r} as the reward of sample {i}, which is no finite number")
    return [float(value) for value in found]
