"""Rewards from a remote server: one HTTP request per batch."""

import asyncio
import json
import math
import os
from collections.abc import Sequence

from tepo_megatron.errors import ConfigError, RewardError
from tepo_megatron.rewards.pool import GradingPool
from tepo_megatron.rewards.terms import Response, Verdict
from tepo_megatron.utils.escaping import excerpt
from tepo_megatron.utils.exchange import BadAnswer, ExchangeFailed, HttpAnswer, HttpClient, TimedOut

ANSWER_BYTES, SAMPLE_BYTES = 2**20, 4096  # the largest answer is the first, plus the second for each sample
ATTEMPTS = 4  # to send the same batch
TEXT_BYTES = 64 * 2**20  # of a worker's reply with a decoded prompt and response
BACKOFF_SECONDS = 1.0  # pause before the second attempt, doubled for each further one
_PASSING = frozenset({408, 425, 429})  # client errors (4xx) that another attempt may not meet


class HttpTerm:
    """Grades batches on an HTTP server.

    It posts {"samples": [{"prompt", "response", "answer"}, ...]} and expects {"rewards": [number, ...]}, one per sample, in
    order. The status is always `graded`. Redirects are not followed. Anything but such an answer is a failure, and the last
    failed attempt raises RewardError: a sample is never graded 0 because a server was unreachable. Compressed answers, and
    answers above ANSWER_BYTES + SAMPLE_BYTES per sample, are failures. Client errors (4xx except 408, 425, 429) are not tried
    again.
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
        """Prepare the connection; nothing is sent yet.

        Args:
            url: URL of the server.
            timeout_seconds: Limit for one whole exchange, from the DNS look-up to the last byte of the answer.
            attempts: Most attempts per batch.
            backoff_seconds: Pause after the first failed attempt; each later pause is twice as long as the one before.
            key_variable: Environment variable with the key that is sent as a bearer token; None sends none.
            concurrency: Most batches that are with the server at once.
            pool: Decodes the responses (grader `texts`). None: they are text.

        Raises:
            ConfigError: The environment variable is not set.
        """
        self._url, self._timeout_seconds, self._attempts, self._backoff = url, timeout_seconds, attempts, backoff_seconds
        self._http, self._slots, self.pool = HttpClient(url, key_from(key_variable)), asyncio.Semaphore(concurrency), pool

    async def grade(self, responses: Sequence[Response]) -> list[Verdict]:
        """Return one verdict per response; see `RewardTerm.grade`."""
        if not responses:
            return []
        payload: bytes | None = None
        for attempt in range(1, self._attempts + 1):
            try:
                async with self._slots:  # the texts too are made only when there is a slot for them
                    payload = payload or await self._payload(responses)
                    return [Verdict(value, "graded") for value in await self._ask(payload, len(responses))]
            except _Failure as e:
                if e.final or attempt == self._attempts:
                    raise RewardError(
                        f"the reward server {self._url} {e} (attempt {attempt} of {self._attempts}); fix the server, or raise "
                        "timeout_seconds of its entry in reward.terms"
                    ) from None
            await asyncio.sleep(self._backoff * 2 ** (attempt - 1))
        raise AssertionError("attempts is at least 1")

    async def close(self) -> None:
        """Close the connections and kill the workers."""
        await self._http.close()
        if self.pool is not None:
            await self.pool.close()

    async def _payload(self, responses: Sequence[Response]) -> bytes:
        texts = await asyncio.gather(*map(self._texts, responses))
        samples = [{"prompt": p, "response": w, "answer": r.answer} for (p, w), r in zip(texts, responses, strict=True)]
        return json.dumps({"samples": samples}).encode()

    async def _texts(self, response: Response) -> tuple[str, str]:
        """Return the prompt and the response as text, decoded by a worker. If none can, this process decodes."""
        outcome = await self.pool.ask((response.prompt, response.written)) if self.pool is not None else None
        if outcome is None or outcome.status != "decoded":
            return response.decoded()
        prompt, written = json.loads(outcome.detail)
        return prompt, written

    async def _ask(self, payload: bytes, samples: int) -> list[float]:
        """Send one request and return the rewards. Raises _Failure."""
        most = ANSWER_BYTES + SAMPLE_BYTES * samples
        try:
            answer = await self._http.exchange("POST", "", seconds=self._timeout_seconds, most_bytes=most, body=payload)
            if answer.ok:
                return _rewards(answer, samples)
        except TimedOut:
            raise _Failure(f"did not answer within {self._timeout_seconds:g} s") from None
        except BadAnswer as e:
            raise _Failure(f"answered with {e}") from None
        except ExchangeFailed as e:
            raise _Failure(f"broke off ({e})") from None
        final = 400 <= answer.status < 500 and answer.status not in _PASSING
        moved = " (redirects are not followed)" if 300 <= answer.status < 400 else ""
        raise _Failure(f"answered with {answer.status}{moved}: {excerpt(answer.text)}", final=final)


class _Failure(Exception):
    """An attempt that failed."""

    def __init__(self, what: str, *, final: bool = False) -> None:
        """Build the message.

        Args:
            what: What the server did, to be put after its name.
            final: Another attempt would be useless.
        """
        super().__init__(what)
        self.final = final


def key_from(variable: str | None) -> str | None:
    """Return the key in that environment variable; None if none is named. Raises ConfigError if the variable is not set."""
    if variable is None:
        return None
    if not (key := os.environ.get(variable, "").strip()):
        raise ConfigError(f"reward.terms: key_variable={variable}: this environment variable is not set; export the key in it")
    return key


def _rewards(answer: HttpAnswer, samples: int) -> list[float]:
    """Return the rewards in an answer. Raises _Failure unless it has one finite number per sample."""
    try:
        found = answer.json()["rewards"]
    except BadAnswer as e:
        raise _Failure(f'answered with something other than {{"rewards": [...]}}: {e}') from None
    except (KeyError, TypeError, IndexError):
        raise _Failure('answered with something other than {"rewards": [...]}') from None
    if not isinstance(found, list) or len(found) != samples:
        count = len(found) if isinstance(found, list) else "no list of"
        raise _Failure(f"answered with {count} rewards for {samples} samples")
    for i, value in enumerate(found):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _Failure(f"answered with {excerpt(str(value), 40)!r} as the reward of sample {i}, which is no finite number")
    return [float(value) for value in found]
