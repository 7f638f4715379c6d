"""Samples that an agent makes through the OpenAI-compatible gateway.

    @openai_agent
    async def agent(task: AgentTask) -> float | None:
        client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
        answer = await client.chat.completions.create(model=task.model, messages=[{"role": "user", "content": task.prompt}])
        return 1.0 if is_right(answer.choices[0].message.content, task.answer) else 0.0

`rollout.function: path/to/file.py:agent` selects it. The sampled tokens are kept as ids. A request whose messages extend the
conversation continues the exact tokens; any other one starts a sequence of its own. All sequences share the sample's advantage.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tepo_megatron.base.errors import TepoError
from tepo_megatron.base.seeding import derive_seed
from tepo_megatron.base.types import Prompt, Rollout, SamplingParams
from tepo_megatron.config import LimitsConfig
from tepo_megatron.rollout.chat import ChatFormat, Message, digest_with, digests
from tepo_megatron.rollout.chat_request import ChatRequest, RefusedRequest
from tepo_megatron.rollout.conversation import Conversation, OutOfTokens, Turn, TurnSampler

_MARK = "_uses_tepo_gateway"


@dataclass(frozen=True)
class AgentTask:
    """The argument of an agent. `row`: all other fields of the dataset's row. `base_url`: of this sample alone."""

    prompt: str
    answer: str
    row: Mapping[str, Any]
    base_url: str
    api_key: str
    model: str = "policy"


Agent = Callable[[AgentTask], Awaitable[float | None]]


def openai_agent(function: Agent) -> Agent:
    """Mark an async function as an agent, which gets an `AgentTask` instead of a conversation. It may return the reward."""
    setattr(function, _MARK, True)
    return function


def is_agent(function: object) -> bool:
    """Return whether a function was marked by `openai_agent`."""
    return bool(getattr(function, _MARK, False))


@dataclass(frozen=True)
class ChatReply:
    """An answer of the model."""

    message: Message
    turn: Turn
    prompt_tokens: int
    stopped_by: str | None


@dataclass
class _Point:
    sequence: Conversation
    tokens: int
    messages: int


class AgentSample:
    """One sample: the sequences that an agent's requests make."""

    def __init__(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        seed: int,
        *,
        sample_turn: TurnSampler,
        chat: ChatFormat,
        mixed: bool = False,
        limits: LimitsConfig,
    ) -> None:
        self.prompt, self.sampling, self._seed, self._chat, self._limits = prompt, sampling, seed, chat, limits
        self.failure: TepoError | None = None
        self.exceeded, self.out_of_tokens, self.counts = "", False, Counter[str]()
        self._begin = partial(
            Conversation, sample_turn=sample_turn, encode=chat.encode, decode=chat.decode, mixed=mixed, limits=_UNLIMITED
        )
        self._points: dict[bytes, _Point] = {}
        self._sequences: list[Conversation] = []
        self._busy: set[int] = set()  # ids of sequences in which a turn is running
        self._begun = self._tool_calls = self._running = 0
        self._closed = False

    @property
    def running(self) -> bool:
        return self._running > 0

    @property
    def turns(self) -> int:
        """Number of turns that the model has written."""
        return self.counts["turns"]

    async def complete(self, request: ChatRequest) -> ChatReply:
        """Let the model answer a request. Any number of requests may run at once.

        Cancelled, because the client has gone, it ends the turn in the engine and leaves the sample as it was.

        Raises RefusedRequest if the sample has ended or exceeded a limit, or no tokens are left.
        """
        self._require_open()
        if self._begun >= self._limits.turns:
            self._exceed("turns", self._limits.turns)
        stops = self._chat.stop_ids(request.stops)
        self._begun += 1
        keys = digests(request.messages, request.tools)
        sequence = self._sequence_of(request, keys)
        before = len(sequence.token_ids)
        self._busy.add(id(sequence))
        self._running += 1
        try:
            turn = await sequence.generate(request.max_tokens, tuple(stops))
        except asyncio.CancelledError:
            sequence.retract()
            self.counts["abandoned"] += 1
            raise
        except OutOfTokens as e:
            self._no_tokens(str(e))
        except TepoError as e:
            self.failure = e
            raise RefusedRequest("engine_error", "the sample is lost") from None
        finally:
            self._busy.discard(id(sequence))
            self._running -= 1
        self._require_open()
        return self._answer(request, keys, sequence, before, turn, stops)

    def close(self) -> None:
        """Refuse all further requests."""
        self._closed = True
        for sequence in self._sequences:
            sequence.close()

    def finish(self) -> list[Rollout]:
        """Return the sequences. Raises RuntimeError while a turn is running."""
        if self._running:
            raise RuntimeError("a request was still running; await all requests before the function returns")
        self._closed = True
        rollouts = [sequence.finish() for sequence in self._sequences if sequence.turns]
        return [replace(r, answer=self.prompt.answer, row=self.prompt.meta, prompt_id=self.prompt.id) for r in rollouts]

    def _sequence_of(self, request: ChatRequest, keys: Sequence[bytes]) -> Conversation:
        """Return the sequence that the request continues, with the tokens of its new messages; a new one if there is none."""
        point = next((self._points[key] for key in reversed(keys[:-1]) if key in self._points), None)
        if point is not None:
            last_id = point.sequence.token_ids[point.tokens - 1]
            new, rewrote = self._chat.continuation(request.messages, request.tools, point.messages, last_id)
            self.counts["template_rewrites"] += rewrote
            if new is not None:
                if len(point.sequence.token_ids) == point.tokens and id(point.sequence) not in self._busy:
                    try:
                        point.sequence.append(new)
                    except OutOfTokens as e:
                        self._no_tokens(str(e))
                    return point.sequence
                self.counts["branches"] += 1
                return self._new_sequence((*point.sequence.token_ids[: point.tokens], *new))
        elif any(sequence.turns for sequence in self._sequences):
            self.counts["rewrites"] += 1
        return self._new_sequence(self._chat.start(request.messages, request.tools))

    def _new_sequence(self, context: Sequence[int]) -> Conversation:
        remaining = len(self.prompt.token_ids) + self.sampling.max_tokens - len(context)
        if remaining < 1 or not context:
            self._no_tokens(f"a context of {len(context)} tokens leaves none to the model")
        prompt = replace(self.prompt, token_ids=tuple(context))
        seed = derive_seed(self._seed, "sequence", len(self._sequences))
        self._sequences.append(self._begin(prompt, replace(self.sampling, max_tokens=remaining), seed))
        return self._sequences[-1]

    def _answer(
        self,
        request: ChatRequest,
        keys: Sequence[bytes],
        sequence: Conversation,
        before: int,
        turn: Turn,
        stops: Mapping[int, str],
    ) -> ChatReply:
        stopped_by = stops.get(turn.token_ids[-1]) if turn.token_ids and turn.stop_reason == "stop" else None
        leaves_out = stopped_by is not None and not request.keeps_stop
        written = turn.token_ids[:-1] if leaves_out else turn.token_ids
        message = self._chat.reply(written, request.tools, before)
        self.out_of_tokens |= request.ends_when_cut and turn.stop_reason == "length"
        self.counts["turns"] += 1
        self.counts["drift"] += self._chat.drifts(turn.token_ids)
        self._tool_calls += len(message.get("tool_calls", ()))
        if self._tool_calls > self._limits.tool_calls:
            self._exceed("tool_calls", self._limits.tool_calls)
        self._points.setdefault(digest_with(keys[-1], message), _Point(sequence, len(sequence.token_ids), len(keys) + 1))
        return ChatReply(message, turn, before, stopped_by)

    def _require_open(self) -> None:
        if self._closed or self.failure is not None:
            raise RefusedRequest("sample_ended", "the sample has ended; await all requests before the function returns")
        if self.exceeded:
            raise RefusedRequest("over_limit", self.exceeded)

    def _exceed(self, name: str, limit: int) -> None:
        self.exceeded = f"over its limit of {name}: rollout.limits.{name}={limit}"
        raise RefusedRequest("over_limit", self.exceeded)

    def _no_tokens(self, why: str) -> None:
        self.out_of_tokens = True
        raise RefusedRequest("context_length_exceeded", why)


_UNLIMITED = LimitsConfig(turns=1 << 30, tool_calls=1 << 30)  # of a sequence: the sample counts for all of its sequences
