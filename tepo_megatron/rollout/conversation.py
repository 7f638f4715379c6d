"""What a user's own generation function works with: one sample, which the model and others write in turns.

    async def agent(conversation: Conversation) -> None:
        turn = await conversation.generate(stop_token_ids=conversation.encode(";"))
        if turn.text.endswith(";"):
            conversation.append(await answer_of_a_tool(turn.text))
            await conversation.generate()

`rollout.function: path/to/file.py:agent` plugs it in. What `generate` adds is trained on, with the engine's log-probs; what
`append` adds is context alone. The function never handles masks or log-probs, so it cannot get them wrong.
"""

from __future__ import annotations

import operator
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import torch

from tepo_megatron.errors import RolloutError, TepoError
from tepo_megatron.rollout.cut import continued
from tepo_megatron.seeding import derive_seed
from tepo_megatron.types import Prompt, Rollout, SamplingParams

# one sample of a context (its id that of the prompt) under a seed
Ask = Callable[[Prompt, SamplingParams, int], Awaitable[Rollout]]
Encode = Callable[[str], Sequence[int]]
Decode = Callable[[Sequence[int]], str]


class OutOfRoom(Exception):
    """rollout.max_response_tokens are spent. A function that lets it pass ends its sample there, which is no error: the sample
    is kept as it stands, with stop reason "length".
    """


class WeightsChanged(RolloutError):
    """A turn was written by other weights than those before it."""


@dataclass(frozen=True)
class Turn:
    """What the model wrote in one go. token_ids: the one it stopped at included; text: without special tokens; stop_reason:
    "stop", or "length" where it was cut off.
    """

    token_ids: tuple[int, ...]
    text: str
    stop_reason: str


class Conversation:
    """A prompt and what was added to it.

    sampling: of all turns, its max_tokens being those of the whole sample, whoever writes them; seed: of this sample, from
    which each turn gets its own; encode, decode: text <-> token ids; mixed: whether newer weights may go on where older ones
    ended.
    """

    def __init__(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        seed: int,
        *,
        ask: Ask,
        encode: Encode,
        decode: Decode,
        mixed: bool = False,
    ) -> None:
        self.prompt = prompt
        self.failure: TepoError | None = None  # of the engine: the sample is lost, whatever the function makes of it
        self.encode, self.decode = encode, decode
        self._sampling, self._seed, self._ask, self._mixed = sampling, seed, ask, mixed
        self._token_ids = list(prompt.token_ids)
        self._mask = [False] * len(prompt.token_ids)
        self._logprobs = [0.0] * len(prompt.token_ids)
        self._turns = 0
        self._versions: list[tuple[int, int]] = []  # (place, version): whose tokens begin there
        self._servers: tuple[tuple[int, str], ...] = ()  # see `Rollout.servers`
        self._stop_reason = ""
        self._busy = self._finished = False

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens so far, the prompt's first."""
        return tuple(self._token_ids)

    @property
    def text(self) -> str:
        """What stands after the prompt, whoever wrote it."""
        return self.decode(self._token_ids[len(self.prompt.token_ids) :])

    @property
    def turns(self) -> int:
        """How often the model wrote."""
        return self._turns

    @property
    def room(self) -> int:
        """Tokens that can still be added."""
        return self._sampling.max_tokens - (len(self._token_ids) - len(self.prompt.token_ids))

    async def generate(self, max_tokens: int | None = None, stop_token_ids: Sequence[int] = ()) -> Turn:
        """Let the model go on. max_tokens: of this turn, at most the room there is; stop_token_ids: each ends this turn, as its
        last token, beside those that end a response.

        Raises OutOfRoom without room, ValueError for a limit below 1, RuntimeError while another turn is under way. What the
        function cannot pass over: RolloutError when the engine fails, WeightsChanged, for which the sample is made anew.
        """
        self._require_free()
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens} must be at least 1")
        if self.room < 1:
            self._spent("nothing is left to generate with")
        sampling = replace(
            self._sampling,
            samples=1,
            max_tokens=min(self.room, max_tokens or self.room),
            stop_token_ids=tuple(sorted({*self._sampling.stop_token_ids, *stop_token_ids})),
        )
        self._busy = True
        try:
            written = await self._ask(
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
        ids = written.response_ids
        self._add(ids, True, written.rollout_logprobs_L[written.response_mask_L].tolist())
        self._turns += 1
        self._stop_reason = written.stop_reason
        return Turn(tuple(ids), self.decode(ids), written.stop_reason)

    def append(self, what: str | Sequence[int]) -> None:
        """Add what the model did not write: a tool's output, a user's turn.

        A text is encoded without special tokens of its own; those that it spells out (a chat template's) become such tokens, so
        take them out of what comes from elsewhere. Raises OutOfRoom, with nothing added, where the model could not write a
        single token after it; RuntimeError while a turn is under way.
        """
        self._require_free()
        ids = [operator.index(token) for token in (self.encode(what) if isinstance(what, str) else what)]
        if len(ids) >= self.room:
            self._spent(f"{len(ids)} more tokens leave none of the {self.room} to the model")
        self._add(ids, False, [0.0] * len(ids))

    def finish(self) -> Rollout:
        """The sample; nothing can be added afterwards. What was appended after the last turn is left out: it is no token's
        context. Raises ValueError before any turn.
        """
        self._require_free()
        self._finished = True
        if not self._turns:
            raise ValueError("the model wrote nothing")
        end = len(self._mask) - self._mask[::-1].index(True)
        return Rollout(
            prompt_id=self.prompt.id,
            token_ids_L=torch.tensor(self._token_ids[:end], dtype=torch.int64),
            response_mask_L=torch.tensor(self._mask[:end]),
            rollout_logprobs_L=torch.tensor(self._logprobs[:end], dtype=torch.float32),
            policy_version=self._versions[0][1],
            stop_reason=self._stop_reason,
            answer=self.prompt.answer,
            later_versions=tuple(self._versions[1:]),
            servers=tuple((place if number else 0, name) for number, (place, name) in enumerate(self._servers)),
        )

    def _add(self, ids: Sequence[int], by_model: bool, logprobs: Sequence[float]) -> None:
        self._token_ids += ids
        self._mask += [by_model] * len(ids)
        self._logprobs += logprobs

    def _spent(self, why: str) -> None:
        self._stop_reason = "length"
        raise OutOfRoom(f"prompt {self.prompt.id}: {why}; raise rollout.max_response_tokens={self._sampling.max_tokens}")

    def _require_free(self) -> None:
        """Two turns at once would each lack the other in their context, and one after the end would be lost."""
        if self._busy:
            raise RuntimeError("a turn is still under way; await `generate` before anything else is done with its conversation")
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
