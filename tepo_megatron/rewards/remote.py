"""Rewards from a remote server: numbers, or the verdicts of a language model as judge, whose unreadable ones are counted.

There is one HTTP request per batch, or per response for a judge, bounded in number and time, and tried again where that may
help.
"""

import asyncio
import hashlib
import json
import logging
import math
import os
import re
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from tepo_megatron.base.errors import ConfigError, RewardError, excerpt
from tepo_megatron.base.exchange import BadAnswer, ExchangeFailed, HttpAnswer, HttpClient, TimedOut
from tepo_megatron.config.reward import FIELD, HttpTermConfig, JudgeTermConfig
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


JUDGE_ANSWER_BYTES, TOKEN_BYTES = 2**20, 64  # the largest answer is the first, plus the second for each token that is asked for
REFUSALS = frozenset({400, 413, 422})  # statuses of a question that the server will not take, such as one that is too long
# What chat templates and tokenizers of today write between messages. The server's own are not known here.
_CONTROL = re.compile(
    r"<(?=[|\uff5c][^<>\n]{1,64}[|\uff5c]>)"  # <|im_end|> and the like
    r"|<(?=/?(?:s|bos|eos|pad|unk|start_of_turn|end_of_turn|think|tool_call|tool_response)>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\])"
    r"|<(?=</?SYS>>)"
)
_log = logging.getLogger(__name__)
RETRY_TEMPERATURE = 0.7  # at least: at temperature 0 another seed changes nothing
WINDOW, LEAST_JUDGED = 256, 32  # responses among which unjudged ones are counted; the number from which their share counts
MOST_REPORTED = 5  # unreadable answers that are logged
_SEEDS = 2**31


class JudgeTerm:
    """Gives the mean verdict of a judge.

    graded    the judge gave a verdict
    unjudged  no answer of the judge has a verdict in the range, after all retries, or the question is longer than the judge
              can read; counts as 0

    A judge that rarely gives a verdict would turn its silence into a reward, so too large a share of `unjudged` ends the run.

    The judge is behind an OpenAI-compatible server, which renders the messages. A chat template does not quote, so the control
    tokens that are known are taken apart in the texts: a space follows their first character.
    """

    def __init__(self, entry: JudgeTermConfig, limits: PoolLimits, tokenizer: str = "") -> None:
        """Start the workers in the background; nothing is sent yet."""
        self._entry, address = entry, entry.url.rstrip("/") + "/chat/completions"
        self._server = GradingServer(
            address,
            name=f"the judge's server {address}",
            fix="fix the server, or raise request_seconds of the judge in reward.terms",
            timeout_seconds=entry.request_seconds,
            key_variable=entry.key_variable,
            concurrency=entry.concurrency,
            refusals=REFUSALS,
        )
        check = f"the tokenizer of the model and pattern={entry.pattern!r}"
        self.pool = GradingPool(limits, ["verdict", entry.pattern], check, tokenizer, TEXT_BYTES)
        self._labels = {label.casefold(): value for label, value in entry.labels.items()}
        self._judged: deque[bool] = deque(maxlen=WINDOW)
        self._reported = 0

    async def grade(self, responses: Sequence[Response]) -> list[Verdict]:
        return list(await asyncio.gather(*map(self._grade, responses)))

    async def close(self) -> None:
        await self._server.close()
        await self.pool.close()

    async def _grade(self, response: Response) -> Verdict:
        prompt, written = await texts_of(response, self.pool)
        value = await self._judge({"prompt": prompt, "response": written, "answer": response.answer})
        self._count(value is not None)
        return Verdict(value or 0.0, "unjudged" if value is None else "graded")

    async def _judge(self, fields: Mapping[str, str]) -> float | None:
        """Ask about one response until all verdicts are there, or the retries are used up.

        Returns the mean of the verdicts; None if none could be read, or the judge's server refuses the question.
        """
        entry, values, asked = self._entry, list[float](), 0
        fields = {name: text.encode(errors="replace").decode() for name, text in fields.items()}  # no lone surrogates
        first = _seed_of(fields, entry.seed)
        for attempt in range(entry.retries + 1):
            temperature = max(entry.temperature, RETRY_TEMPERATURE) if attempt else entry.temperature
            try:
                answers = await self._ask(fields, entry.verdicts - len(values), (first + asked) % _SEEDS, temperature)
            except RequestRefused as e:
                self._report(f"the judge cannot be asked: its server {e}")
                return None
            asked += len(answers)
            values += [value for answer in answers if (value := await self._value(answer)) is not None]
            if len(values) == entry.verdicts:
                break
        return math.fsum(values) / len(values) if values else None

    async def _ask(self, fields: Mapping[str, str], samples: int, seed: int, temperature: float) -> list[str]:
        """Return `samples` answers to the question with these texts in it, of one request each. Raises RequestRefused."""
        entry = self._entry
        quoted = {name: _CONTROL.sub(lambda match: match[0] + " ", text) for name, text in fields.items()}
        messages = [{"role": role, "content": filled(template, quoted)} for role, template in entry.messages]
        body = {"model": entry.model, "messages": messages, "max_tokens": entry.max_tokens, "temperature": temperature}
        return list(await asyncio.gather(*(self._answer({**body, "seed": seed + i}) for i in range(samples))))

    async def _answer(self, body: Mapping[str, object]) -> str:
        async def payload() -> bytes:
            return json.dumps(body).encode()

        return await self._server.post(payload, JUDGE_ANSWER_BYTES + TOKEN_BYTES * self._entry.max_tokens, _text)

    async def _value(self, answer: str) -> float | None:
        outcome = await self.pool.ask((answer,))
        value = self._read(outcome.detail) if outcome.status == "found" else None
        if value is None:
            self._report(f"no verdict (pattern={self._entry.pattern!r}) in the judge's answer: {excerpt(answer)!r}")
        return value

    def _read(self, verdict: str) -> float | None:
        entry = self._entry
        if entry.labels:
            return self._labels.get(verdict.strip().casefold())
        try:
            number = float(verdict)
        except ValueError:
            return None
        in_range = entry.lowest <= number <= entry.highest  # not so for nan
        return (number - entry.lowest) / (entry.highest - entry.lowest) if in_range else None

    def _count(self, judged: bool) -> None:
        self._judged.append(judged)
        total, unjudged = len(self._judged), self._judged.count(False)
        if total >= LEAST_JUDGED and unjudged > self._entry.max_unjudged_share * total:
            raise RewardError(
                f"the judge {self._entry.model} gave no verdict on {unjudged} of the last {total} responses, more than "
                f"max_unjudged_share={self._entry.max_unjudged_share:g}; correct question or pattern of its entry in "
                "reward.terms"
            )

    def _report(self, text: str) -> None:
        self._reported += 1
        if self._reported <= MOST_REPORTED:
            last = "; further ones are not reported" if self._reported == MOST_REPORTED else ""
            _log.warning("%s%s", text, last)


def _seed_of(fields: Mapping[str, str], seed: int) -> int:
    """Return a seed that depends on the texts and on the seed of the term alone, not on what else is graded."""
    words = json.dumps([seed, sorted(fields.items())]).encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") % _SEEDS


def filled(template: str, fields: Mapping[str, str]) -> str:
    """Return the template with its fields filled in. Braces in the texts are text."""
    return FIELD.sub(lambda match: fields[match[1]], template)


def _text(answer: HttpAnswer) -> str:
    try:
        text = answer.json()["choices"][0]["message"]["content"]
    except BadAnswer as e:
        raise FailedAttempt(f"answered with no chat completion: {e}") from None
    except (KeyError, TypeError, IndexError):
        raise FailedAttempt(f"answered with no chat completion: {excerpt(answer.text)}") from None
    if not isinstance(text, str | None):
        raise FailedAttempt(f"answered with no text: {excerpt(answer.text)}")
    return text or ""  # null: all tokens went into a hidden reasoning
