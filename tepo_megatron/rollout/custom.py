"""A user's own generation function, which produces each sample in several turns. See `conversation.Conversation`.

`CustomRollouts` wraps a sampler, so that training and evaluation both sample through the function.
"""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from tepo_megatron.errors import ConfigError, RolloutError
from tepo_megatron.inference.engine import Deliver, GroupStream, Sampler
from tepo_megatron.inference.loop import QueuedGroupStream
from tepo_megatron.rollout.conversation import Conversation, Decode, Encode, OutOfTokens, WeightsChanged
from tepo_megatron.types import Prompt, Rollout, SamplingParams
from tepo_megatron.utils import user_file
from tepo_megatron.utils.loop import LoopThread
from tepo_megatron.utils.seeding import derive_seed

CLOSE_SECONDS = 5.0  # time for running functions to end; one that blocks its thread never does


@dataclass(frozen=True)
class GenerationFunction:
    """The user's generation function.

    Attributes:
        file: Resolved path of its file.
        name: Its name in the file.
        call: The async function. It gets a conversation and returns nothing.
    """

    file: Path
    name: str
    call: Callable[[Conversation], Awaitable[object]]


def load_function(spec: str) -> GenerationFunction:
    """Load the async function that `rollout.function`, "path/to/file.py:name", names. The file is executed.

    Raises ConfigError that names the key, the error and the fix.
    """
    found, key = user_file.load(spec, "rollout.function", "an async function"), f"rollout.function={spec}"
    if not inspect.iscoroutinefunction(found.value):
        raise ConfigError(
            f"{key}: {found.name} is no async function; write `async def {found.name}(conversation: Conversation) -> None`"
        )
    user_file.check_takes(found, key, 1, "a conversation")
    return GenerationFunction(found.file, found.name, found.value)


@contextmanager
def open_sampler(
    sampler: Sampler, spec: str | None, encode: Encode, decode: Decode, mixed: bool = False
) -> Iterator[tuple[Sampler, Callable[[], list[str]]]]:
    """Yield the sampler of a run: `sampler` itself, or one that samples through the user's function.

    Args:
        sampler: The engine.
        spec: `rollout.function`; None: there is no function.
        encode, decode, mixed: See `CustomRollouts`.

    Yields:
        The sampler, and a function that returns its messages for the user since the last call, beyond those of the engine.

    Raises:
        ConfigError: See `load_function`.
    """
    if spec is None:
        yield sampler, list
        return
    with CustomRollouts(sampler, load_function(spec), encode, decode, mixed) as custom:
        yield custom, custom.take_events


class CustomRollouts:
    """Implementation of `engine.Sampler` that samples through a user's function, whose turns another sampler generates.

    The function runs in a separate event loop. A function that computes for a while delays other samples, but not the health
    checks of the servers. Use it as a context manager inside that of the engine; leaving the block cancels the conversations.

    Args:
        sampler: Samples the turns.
        function: The user's function.
        encode, decode: Text to token ids and back, for the function.
        mixed: Newer weights may continue a sample that older ones began.
    """

    def __init__(
        self, sampler: Sampler, function: GenerationFunction, encode: Encode, decode: Decode, mixed: bool = False
    ) -> None:
        self._sampler, self._function = sampler, function
        self._begin = partial(Conversation, sample_turn=self._sample_turn, encode=encode, decode=decode, mixed=mixed)
        self._loop = LoopThread("conversations")
        self._events: list[str] = []

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> list[Rollout]:
        """See `Sampler.generate`: one conversation per sample, all concurrently, each of at most `sampling.max_tokens`.

        The seed of a turn depends on (seed, prompt, sample, turn), so a function that depends only on its conversation
        reproduces its samples. Unless `mixed`, one version of the weights makes a whole sample: if newer weights come in
        between, the function is called again from the start.

        Args:
            prompts, sampling, seed: See `Sampler.generate`.

        Raises:
            RolloutError: The function failed for a sample, which ends the call. Names prompt, file and line.
        """
        return self._loop.run(self._converse(prompts, sampling, seed))

    def open(self) -> GroupStream:
        """See `Sampler.open`. The groups are those of `generate`."""
        return QueuedGroupStream(self._loop, self._converse)

    async def sample(self, prompt: Prompt, sampling: SamplingParams, seed: int) -> list[Rollout]:
        """See `Sampler.sample`. The function is not called.

        Args:
            prompt, sampling, seed: See `Sampler.sample`.
        """
        return await self._sampler.sample(prompt, sampling, seed)

    def close(self) -> None:
        """Cancel the conversations; bounded in time. May be called again."""
        # In a separate thread, because a function that blocks the loop would block this call.
        stopping = threading.Thread(target=self._loop.stop, daemon=True)
        stopping.start()
        stopping.join(CLOSE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def _converse(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int, deliver: Deliver | None = None
    ) -> list[Rollout]:
        each = [(prompt, k) for prompt in prompts for k in range(sampling.samples)]

        async def group(samples: Sequence[asyncio.Task[Rollout]]) -> None:
            done = await asyncio.gather(*samples)
            assert deliver is not None
            deliver(done)

        try:
            async with asyncio.TaskGroup() as tasks:
                samples = [tasks.create_task(self._one(prompt, sampling, seed, k)) for prompt, k in each]
                for place in range(len(prompts) if deliver is not None else 0):
                    tasks.create_task(group(samples[place * sampling.samples : (place + 1) * sampling.samples]))
        except ExceptionGroup as failed:
            error = failed.exceptions[0]
        else:
            for (prompt, k), sample in zip(each, samples, strict=True):
                if sample.cancelled():  # a TaskGroup does not report cancelled tasks
                    raise RolloutError(f"{self._what(prompt, k)} was cancelled, by itself or because the engine was closed")
            return [sample.result() for sample in samples]
        raise error

    async def _one(self, prompt: Prompt, sampling: SamplingParams, seed: int, sample: int) -> Rollout:
        """Return one sample that the function makes.

        Call the function again from the start if the weights changed in between.
        """
        while True:
            try:
                return await self._once(prompt, sampling, seed, sample)
            except WeightsChanged as e:
                self._events.append(f"{e}; sample {sample} is made again")

    async def _once(self, prompt: Prompt, sampling: SamplingParams, seed: int, sample: int) -> Rollout:
        function, what = self._function, self._what(prompt, sample)
        conversation = self._begin(prompt, sampling, derive_seed(seed, sample))
        returned: object = None
        try:
            returned = await function.call(conversation)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as e:  # SystemExit would end the event loop and leave its callers waiting
            cause = _first(e)
            if conversation.failure is None and not isinstance(cause, OutOfTokens):
                raise RolloutError(f"{what} failed: {user_file.describe_error(cause, function.file)}") from cause
        if conversation.failure is not None:  # the function caught the error and went on
            raise conversation.failure
        if returned is not None:
            raise RolloutError(f"{what} returned {returned!r:.80}; it must return nothing: its conversation is the sample")
        if not conversation.turns:
            raise RolloutError(
                f"{what} ended before the model wrote anything; await conversation.generate() at least once, and append less "
                f"before it than rollout.max_response_tokens={sampling.max_tokens}"
            )
        try:
            return conversation.finish()
        except RuntimeError as e:
            raise RolloutError(f"{what} returned too early: {e}") from None

    async def _sample_turn(self, context: Prompt, sampling: SamplingParams, seed: int) -> Rollout:
        (rollout,) = await self._sampler.sample(context, sampling, seed)
        return rollout

    def _what(self, prompt: Prompt, sample: int) -> str:
        return f"prompt {prompt.id}, sample {sample}: {self._function.name} of {self._function.file}"

    def take_events(self) -> list[str]:
        """Return messages for the user about samples that were made again since the last call, a line each."""
        events, self._events = self._events, []
        return events


def _first(error: BaseException) -> BaseException:
    """Return the first error of a group of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
