"""The reward term of a language model as judge: ask it, find the verdict in what it wrote, and count what cannot be read."""

import asyncio
import hashlib
import json
import logging
import math
import re
from collections import deque
from collections.abc import Mapping, Sequence

from tepo_megatron.base.errors import RewardError, excerpt
from tepo_megatron.base.exchange import BadAnswer, HttpAnswer
from tepo_megatron.config.reward import FIELD, JudgeTermConfig
from tepo_megatron.rewards.pool import GradingPool, PoolLimits
from tepo_megatron.rewards.remote import TEXT_BYTES, FailedAttempt, GradingServer, RequestRefused, texts_of
from tepo_megatron.rewards.terms import Response, Verdict

ANSWER_BYTES, TOKEN_BYTES = 2**20, 64  # the largest answer is the first, plus the second for each token that is asked for
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

        return await self._server.post(payload, ANSWER_BYTES + TOKEN_BYTES * self._entry.max_tokens, _text)

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
