"""A judge behind an OpenAI-compatible server that others run: `POST URL/chat/completions`."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence

from tepo_megatron.config.judge import FIELD
from tepo_megatron.rewards.judge import JudgeReply, QuestionTooLong
from tepo_megatron.rewards.posting import FailedAttempt, GradingServer, RequestRefused
from tepo_megatron.utils.escaping import excerpt
from tepo_megatron.utils.exchange import BadAnswer, HttpAnswer

ATTEMPTS = 4  # to ask the same question
BACKOFF_SECONDS = 1.0  # pause before the second attempt, doubled for each further one
ANSWER_BYTES, TOKEN_BYTES = 2**20, 64  # the largest answer is the first, plus the second for each token that is asked for
REFUSALS = frozenset({400, 413, 422})  # statuses of a question that the server will not take, such as one that is too long
# What chat templates and tokenizers of today write between messages. The server's own are not known here.
_CONTROL = re.compile(
    r"<(?=[|\uff5c][^<>\n]{1,64}[|\uff5c]>)"  # <|im_end|> and the like
    r"|<(?=/?(?:s|bos|eos|pad|unk|start_of_turn|end_of_turn|think|tool_call|tool_response)>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\])"
    r"|<(?=</?SYS>>)"
)


class ChatServer:
    """Implementation of `judge.Judge` for a server of others.

    The server renders the messages. A chat template does not quote, so the control tokens that are known are taken apart in
    the texts: a space follows their first character.
    """

    def __init__(
        self,
        url: str,
        model: str,
        messages: Sequence[tuple[str, str]],
        *,
        max_tokens: int,
        timeout_seconds: float,
        concurrency: int,
        key_variable: str | None,
    ) -> None:
        """Prepare the connection; nothing is sent yet."""
        self._model, self._messages, self._max_tokens = model, messages, max_tokens
        address = url.rstrip("/") + "/chat/completions"
        self._server = GradingServer(
            address,
            name=f"the judge's server {address}",
            fix="fix the server, or raise server.request_seconds of the judge in reward.terms",
            timeout_seconds=timeout_seconds,
            attempts=ATTEMPTS,
            backoff_seconds=BACKOFF_SECONDS,
            key_variable=key_variable,
            concurrency=concurrency,
            refusals=REFUSALS,
        )

    async def ask(self, fields: Mapping[str, str], samples: int, seed: int, temperature: float) -> list[JudgeReply]:
        """Send one request per answer, because not every server can sample several; see `Judge.ask`."""
        quoted = {name: _CONTROL.sub(lambda found: found[0] + " ", text) for name, text in fields.items()}
        messages = [{"role": role, "content": filled(template, quoted)} for role, template in self._messages]
        body = {"model": self._model, "messages": messages, "max_tokens": self._max_tokens, "temperature": temperature}
        return list(await asyncio.gather(*(self._asked({**body, "seed": seed + i}) for i in range(samples))))

    async def close(self) -> None:
        """Close the connections."""
        await self._server.close()

    async def _asked(self, body: Mapping[str, object]) -> JudgeReply:
        async def payload() -> bytes:
            return json.dumps(body).encode()

        try:
            return await self._server.post("", payload, ANSWER_BYTES + TOKEN_BYTES * self._max_tokens, _reply)
        except RequestRefused as e:
            raise QuestionTooLong(f"its server {e}") from None


def filled(template: str, fields: Mapping[str, str]) -> str:
    """Return the template with its fields filled in. Braces in the texts are text."""
    return FIELD.sub(lambda found: fields[found[1]], template)


def _reply(answer: HttpAnswer) -> JudgeReply:
    try:
        body = answer.json()
        text, usage = body["choices"][0]["message"]["content"], body.get("usage") or {}
        tokens = [int(usage.get(f"{kind}_tokens") or 0) for kind in ("prompt", "completion")]
    except BadAnswer as e:
        raise FailedAttempt(f"answered with no chat completion: {e}") from None
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, OverflowError):
        raise FailedAttempt(f"answered with no chat completion: {excerpt(answer.text)}") from None
    if not isinstance(text, str | None):
        raise FailedAttempt(f"answered with no text: {excerpt(answer.text)}")
    return JudgeReply(text or "", *tokens)  # null: all tokens went into a hidden reasoning
