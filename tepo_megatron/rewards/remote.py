"""Rewards from a remote server: one HTTP request per batch, bounded in number and time, and tried again where that may help."""

import asyncio
import json
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from tepo_megatron.base.errors import ConfigError, RewardError, excerpt
from tepo_megatron.base.exchange import BadAnswer, ExchangeFailed, HttpAnswer, HttpClient, TimedOut
from tepo_megatron.config.reward import HttpTermConfig
from tepo_megatron.rewards.pool import GradingPool, PoolLimits
from tepo_megatron.rewards.terms import Response, Verdict

ANSWER_BYTES, SAMPLE_BYTES = 2**20, 4096  # the largest answer is the first, plus the second for each sample
ATTEMPTS = 4  # to send the same request
TEXT_BYTES = 64 * 2**20  # of a worker's reply with a decoded prompt and response
BACKOFF_SECONDS = 1.0  # pause before the second attempt, doubled for each further one
Found = TypeVar("Found")
_PASSING = frozenset({408, 425, 429})  # client errors (4xx) that another attempt may not meet


class FailedAttempt(Exception):
    """An attempt that failed. The message continues the server's name."""

    def __init__(self, what: str, *, final: bool = False, status: int = 0) -> None:
        super().__init__(what)
        self.final, self.status = final, status


class RequestRefused(Exception):
    """The server refuses what was asked, and another attempt would be useless. The message says what it answered."""


class GradingServer:
    """POST requests to one server. Use it in one event loop.

    Redirects are not followed, and compressed answers are refused. Client errors (4xx except 408, 425, 429) are
    not tried again.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str,
        fix: str,
        timeout_seconds: float,
        key_variable: str | None,
        concurrency: int,
        refusals: frozenset[int] = frozenset(),
    ) -> None:
        """Prepare the connection; nothing is sent yet."""
        self._name, self._fix, self._refusals, self._timeout_seconds = name, fix, refusals, timeout_seconds
        self._http, self._slots = HttpClient(url, key_from(key_variable)), asyncio.Semaphore(concurrency)

    async def post(
        self, payload: Callable[[], Awaitable[bytes]], most_bytes: int, read: Callable[[HttpAnswer], Found]
    ) -> Found:
        """Send one request, and return what `read` finds in the answer."""
        body: bytes | None = None
        for attempt in range(1, ATTEMPTS + 1):
            try:
                async with self._slots:
                    body = body or await payload()
                    return read(await self._answer(body, most_bytes))
            except FailedAttempt as e:
                if e.status in self._refusals:
                    raise RequestRefused(str(e)) from None
                if e.final or attempt == ATTEMPTS:
                    raise RewardError(f"{self._name} {e} (attempt {attempt} of {ATTEMPTS}); {self._fix}") from None
            await asyncio.sleep(BACKOFF_SECONDS * 2 ** (attempt - 1))
        raise AssertionError("there is at least one attempt")

    async def close(self) -> None:
        await self._http.close()

    async def _answer(self, body: bytes, most_bytes: int) -> HttpAnswer:
        try:
            answer = await self._http.exchange("POST", "", seconds=self._timeout_seconds, most_bytes=most_bytes, body=body)
        except TimedOut:
            hint = self._http.unused_proxy()
            raise FailedAttempt(f"did not answer within {self._timeout_seconds:g} s{hint}") from None
        except BadAnswer as e:
            raise FailedAttempt(f"answered with {e}") from None
        except ExchangeFailed as e:
            raise FailedAttempt(f"broke off ({e})") from None
        if answer.ok:
            return answer
        final = 400 <= answer.status < 500 and answer.status not in _PASSING
        moved = " (redirects are not followed)" if 300 <= answer.status < 400 else ""
        what = f"answered with {answer.status}{moved}: {excerpt(answer.text)}"
        raise FailedAttempt(what, final=final, status=answer.status)


def key_from(variable: str | None) -> str | None:
    """Return the key in that environment variable; None if none is named. Raises ConfigError if the variable is not set."""
    if variable is None:
        return None
    if not (key := os.environ.get(variable, "").strip()):
        raise ConfigError(f"reward.terms: key_variable={variable}: this environment variable is not set; export the key in it")
    return key


class HttpTerm:
    """Grades batches on an HTTP server.

    It posts {"samples": [{"prompt", "response", "answer"}, ...]} and expects {"rewards": [number, ...]}, one per sample, in
    order. The status is always `graded`. Anything but such an answer is a failure, and the last failed attempt raises
    RewardError: a sample is never graded 0 because a server was unreachable. Answers above ANSWER_BYTES + SAMPLE_BYTES per
    sample are failures, too. `GradingServer` says what else is.
    """

    def __init__(self, entry: HttpTermConfig, limits: PoolLimits, tokenizer: str = "") -> None:
        """Start the workers that decode in the background; nothing is sent yet."""
        decoders = "the tokenizer of the model"
        self.pool = GradingPool(limits, ["texts"], decoders, tokenizer, TEXT_BYTES) if tokenizer else None
        self._server = GradingServer(
            entry.url,
            name=f"the reward server {entry.url}",
            fix="fix the server, or raise timeout_seconds of its entry in reward.terms",
            timeout_seconds=entry.timeout_seconds,
            key_variable=entry.key_variable,
            concurrency=entry.concurrency,
        )

    async def grade(self, responses: Sequence[Response]) -> list[Verdict]:
        if not responses:
            return []
        rewards = await self._server.post(
            lambda: self._payload(responses),
            ANSWER_BYTES + SAMPLE_BYTES * len(responses),
            lambda answer: _rewards(answer, len(responses)),
        )
        return [Verdict(value, "graded") for value in rewards]

    async def close(self) -> None:
        await self._server.close()
        if self.pool is not None:
            await self.pool.close()

    async def _payload(self, responses: Sequence[Response]) -> bytes:
        texts = await asyncio.gather(*(texts_of(response, self.pool) for response in responses))
        samples = [{"prompt": p, "response": w, "answer": r.answer} for (p, w), r in zip(texts, responses, strict=True)]
        return json.dumps({"samples": samples}).encode()


async def texts_of(response: Response, pool: GradingPool | None) -> tuple[str, str]:
    """Return the prompt and the response as text, decoded by a worker. If none can, this process decodes."""
    outcome = await pool.ask((response.prompt, response.written)) if pool is not None else None
    if outcome is None or outcome.status != "decoded":
        return response.decoded()
    prompt, written = json.loads(outcome.detail)
    return prompt, written


def _rewards(answer: HttpAnswer, samples: int) -> list[float]:
    try:
        rewards = answer.json()["rewards"]
    except BadAnswer as e:
        raise FailedAttempt(f'answered with something other than {{"rewards": [...]}}: {e}') from None
    except (KeyError, TypeError, IndexError):
        raise FailedAttempt('answered with something other than {"rewards": [...]}') from None
    if not isinstance(rewards, list) or len(rewards) != samples:
        count = len(rewards) if isinstance(rewards, list) else "no list of"
        raise FailedAttempt(f"answered with {count} rewards for {samples} samples")
    for i, value in enumerate(rewards):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            shown = excerpt(str(value), 40)
            raise FailedAttempt(f"answered with {shown!r} as the reward of sample {i}, which is no finite number")
    return [float(value) for value in rewards]
