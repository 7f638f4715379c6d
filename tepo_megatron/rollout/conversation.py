"""The interface of a user's generation function: one sample that the model and other sources (tools, users) write in turns.

    async def agent(conversation: Conversation) -> None:
        turn = await conversation.generate(stop_token_ids=conversation.encode(";"))
        if turn.text.endswith(";"):
            conversation.append(await answer_of_a_tool(turn.text))
            await conversation.generate()

`rollout.function: path/to/file.py:agent` selects it. Tokens of `generate` are trained on, with the engine's log-probs. Tokens
of `append` are only context. The function never handles masks or log-probs, so it cannot get them wrong.
"""

import operator
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import torch

from tepo_megatron.base.errors import RolloutError, TepoError
from tepo_megatron.base.seeding import derive_seed
from tepo_megatron.base.types import Prompt, Rollout, SamplingMask, SamplingParams
from tepo_megatron.config import LimitsConfig
from tepo_megatron.engines.engine import continued
from tepo_megatron.rollout.chat import ChatFormat
from tepo_megatron.rollout.containment import OverLimit

# (context, sampling, seed) -> one sample; the context is a Prompt with the id of the original prompt
TurnSampler = Callable[[Prompt, SamplingParams, int], Awaitable[Rollout]]
Encode = Callable[[str], Sequence[int]]
Decode = Callable[[Sequence[int]], str]


class OutOfTokens(Exception):
    """No tokens of rollout.max_response_tokens are left.

    A function that lets this error pass ends its sample there. That is no failure: the sample is kept as it is, with stop
    reason "length".
    """


class WeightsChanged(RolloutError):
    """A turn was sampled with weights other than those of earlier turns."""


@dataclass(frozen=True)
class Turn:
    """One turn of the model. `token_ids` include the stop token; `stop_reason` is "stop", or "length" at the token limit."""

    token_ids: tuple[int, ...]
    text: str
    stop_reason: str


class Conversation:
    """A prompt and the turns that were added to it."""

    def __init__(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        seed: int,
        *,
        sample_turn: TurnSampler,
        encode: Encode,
        decode: Decode,
        mixed: bool = False,
        limits: LimitsConfig | None = None,
        chat: ChatFormat | None = None,
    ) -> None:
        self.prompt, self.exceeded, self._chat = prompt, "", chat
        self._limits, self._appended = limits or LimitsConfig(), 0
        self.failure: TepoError | None = None
        self.encode, self.decode = encode, decode
        self._sampling, self._seed, self._sample_turn, self._mixed = sampling, seed, sample_turn, mixed
        self._token_ids = list(prompt.token_ids)
        self._mask = [False] * len(prompt.token_ids)
        self._logprobs = [0.0] * len(prompt.token_ids)
        self._sampling_masks: list[SamplingMask | None] = []  # one per turn
        self._turns = 0
        self._versions: list[tuple[int, int]] = []  # (index of the first token, version)
        self._servers: tuple[tuple[int, str], ...] = ()  # see `Rollout.servers`
        self._stop_reason = ""
        self._busy = self._finished = False

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens so far, including the prompt's."""
        return tuple(self._token_ids)

    @property
    def text(self) -> str:
        """The text after the prompt, whoever wrote it."""
        return self.decode(self._token_ids[len(self.prompt.token_ids) :])

    @property
    def running(self) -> bool:
        return self._busy

    @property
    def turns(self) -> int:
        """Number of turns that the model wrote."""
        return self._turns

    @property
    def tokens_left(self) -> int:
        """Number of tokens that can still be added."""
        return self._sampling.max_tokens - (len(self._token_ids) - len(self.prompt.token_ids))

    async def generate(self, max_tokens: int | None = None, stop_token_ids: Sequence[int] = ()) -> Turn:
        """Let the model write one turn.

        Args:
            max_tokens: Limit of this turn. None: all tokens that are left (`tokens_left`), which also caps a larger value.
        Raises:
            OutOfTokens: No tokens are left.
            ValueError: `max_tokens` is below 1.
            RuntimeError: Another turn is still running, or the conversation has ended.
            RolloutError: The engine failed. Catching it does not save the sample.
            WeightsChanged: Other weights sampled this turn. The sample is made again from the start, even if this is caught.
        """
        self._require_free()
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens} must be at least 1")
        if self._turns >= self._limits.turns:
            self._exceed("turns", self._limits.turns)
        if self.tokens_left < 1:
            self._spent("nothing is left to generate with")
        sampling = replace(
            self._sampling,
            samples=1,
            max_tokens=min(self.tokens_left, max_tokens or self.tokens_left),
            stop_token_ids=tuple(sorted({*self._sampling.stop_token_ids, *stop_token_ids})),
        )
        self._busy = True
        try:
            written = await self._sample_turn(
                replace(self.prompt, token_ids=self.token_ids), sampling, derive_seed(self._seed, self._turns)
            )
            begun = len(self._token_ids)
            self._note_versions([(begun, written.policy_version), *written.later_versions])
            self._servers = continued(self._servers, [(place or begun, name) for place, name in written.servers])
        except TepoError as e:
            self.failure = e
            raise
        finally:
            self._busy = False
        ids = written.token_ids_L[begun:].tolist()  # all that follows the context; a slice costs nothing, unlike the mask
        self._add(ids, True, written.rollout_logprobs_L[begun:].tolist())
        self._sampling_masks.append(written.sampling_mask)
        self._turns += 1
        self._stop_reason = written.stop_reason
        return Turn(tuple(ids), self.decode(ids), written.stop_reason)

    def append(self, what: str | Sequence[int]) -> None:
        """Add tokens that the model did not write: a tool's output, a user's turn.

        A text is encoded without adding special tokens. Special tokens that the text spells out (a chat template's) are encoded
        as such, so remove them from untrusted text.
        """
        self._require_free()
        self._appended += 1
        if self._appended > self._limits.tool_calls:
            self._exceed("tool_calls", self._limits.tool_calls)
        ids = [operator.index(token) for token in (self.encode(what) if isinstance(what, str) else what)]
        if len(ids) >= self.tokens_left:
            self._spent(f"{len(ids)} more tokens leave none of the {self.tokens_left} to the model")
        self._add(ids, False, [0.0] * len(ids))

    def append_user(self, text: str) -> None:
        """Add a user's turn and open the model's next one, as the chat template writes them; special tokens in it are text.

        Where the prompt is a string, the text is appended as it is. Directly after a chat, it joins the last message if that is
        the user's: many templates refuse two of them in a row. Raises ValueError if the template leaves out the turn.
        """
        if self._chat is None or not self.prompt.messages:
            self.append(text)
        elif len(self._token_ids) > len(self.prompt.token_ids):
            self.append(self._chat.user_turn(self.prompt.messages, text, self._token_ids[-1]))
        else:
            self._extend_prompt(self._chat, text)

    def _extend_prompt(self, chat: ChatFormat, text: str) -> None:
        self._require_free()
        *earlier, last = self.prompt.messages
        if last["role"] == "user":
            messages = [*earlier, {**last, "content": f"{last['content']}\n\n{text}"}]
        else:
            messages = [*earlier, last, {"role": "user", "content": text}]
        token_ids = tuple(chat.start(messages, ()))
        remaining = self.tokens_left + len(self.prompt.token_ids) - len(token_ids)
        if remaining < 1:
            self._spent(f"a prompt of {len(token_ids)} tokens leaves none to the model")
        self.prompt = replace(self.prompt, token_ids=token_ids, messages=messages)
        self._sampling = replace(self._sampling, max_tokens=remaining)
        self._token_ids, self._mask, self._logprobs = [], [], []
        self._add(token_ids, False, [0.0] * len(token_ids))

    def finish(self) -> Rollout:
        """Return the sample, to which nothing can be added afterwards.

        Raises ValueError if the model wrote nothing, RuntimeError while a turn is running or if the sample has ended already.

        Tokens that were appended after the model's last turn are left out: they are no token's context.
        """
        self._require_free()
        self._finished = True
        if not self._turns:
            raise ValueError("the model wrote nothing")
        end = len(self._mask) - self._mask[::-1].index(True)
        known = [mask for mask in self._sampling_masks if mask is not None]
        return Rollout(
            prompt_id=self.prompt.id,
            token_ids_L=torch.tensor(self._token_ids[:end], dtype=torch.int64),
            response_mask_L=torch.tensor(self._mask[:end]),
            rollout_logprobs_L=torch.tensor(self._logprobs[:end], dtype=torch.float32),
            policy_version=self._versions[0][1],
            stop_reason=self._stop_reason,
            answer=self.prompt.answer,
            row=self.prompt.meta,
            later_versions=tuple(self._versions[1:]),
            servers=tuple((place if number else 0, name) for number, (place, name) in enumerate(self._servers)),
            sampling_mask=SamplingMask.cat(known) if len(known) == len(self._sampling_masks) else None,
        )

    def _add(self, ids: Sequence[int], by_model: bool, logprobs: Sequence[float]) -> None:
        self._token_ids += ids
        self._mask += [by_model] * len(ids)
        self._logprobs += logprobs

    def retract(self) -> None:
        """Remove what was appended after the model's last turn."""
        end = len(self._mask) - self._mask[::-1].index(True) if self._turns else len(self.prompt.token_ids)
        del self._token_ids[end:], self._mask[end:], self._logprobs[end:]

    def close(self) -> None:
        """Refuse all further turns: the sample was given up."""
        self._finished = True

    def _exceed(self, name: str, limit: int) -> None:
        self.exceeded = f"over its limit of {name}: rollout.limits.{name}={limit}"
        raise OverLimit(self.exceeded)

    def _spent(self, why: str) -> None:
        self._stop_reason = "length"
        raise OutOfTokens(f"prompt {self.prompt.id}: {why}; raise rollout.max_response_tokens={self._sampling.max_tokens}")

    def _require_free(self) -> None:
        """Raise RuntimeError if a turn is running or the sample has ended."""
        if self._busy:
            raise RuntimeError("a turn is still running; await `generate` before anything else is done with its conversation")
        if self._finished:
            raise RuntimeError("the conversation has ended; await all that uses it before the function returns")

    def _note_versions(self, changes: Sequence[tuple[int, int]]) -> None:
        for place, version in changes:
            if not self._versions:
                self._versions = [(place, version)]
            elif version != (last := self._versions[-1][1]):
                if not self._mixed or version < last:
                    raise WeightsChanged(
                        f"prompt {self.prompt.id}: version {version} of the weights wrote on after version {last}"
                    )
                self._versions.append((place, version))
