"""A user's own generation function, which produces each sample in several turns. See `conversation.Conversation`.

`CustomRollouts` wraps a sampler, so that training and evaluation both sample through the function.
"""

import asyncio
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Self

import psutil

from tepo_megatron.base import user_file
from tepo_megatron.base.errors import ConfigError
from tepo_megatron.base.loop import LoopThread
from tepo_megatron.base.processes import SPARE_FILES, raise_open_file_limit
from tepo_megatron.base.seeding import derive_seed
from tepo_megatron.base.types import Prompt, Rollout, SamplingParams
from tepo_megatron.base.user_file import UserFunction
from tepo_megatron.config import LimitsConfig
from tepo_megatron.engines.engine import Deliver, GroupStream, Sampler
from tepo_megatron.rollout.agent import AgentSample, is_agent
from tepo_megatron.rollout.chat import ChatFormat
from tepo_megatron.rollout.containment import OverLimit, lost_sample, within
from tepo_megatron.rollout.conversation import Conversation, Decode, Encode, OutOfTokens, WeightsChanged
from tepo_megatron.rollout.function_thread import FunctionThread, ThreadAbandoned, TooManyThreads
from tepo_megatron.rollout.gateway import Gateway

FILES_OF_AN_AGENT = 3  # both ends of its connection to the gateway, and its request to a server
_HANG_UP_TURNS = 100  # of the gateway's event loop, until it has seen that a client gave up its request
_TURN_SECONDS = 0.01  # not a limit: of one turn, longer where that loop is busy


def load_function(spec: str) -> UserFunction:
    """Load the async function that `rollout.function`, "path/to/file.py:name", names. The file is executed."""
    function, key = user_file.load(spec, "rollout.function", "an async function"), f"rollout.function={spec}"
    if not inspect.iscoroutinefunction(function.value):
        raise ConfigError(
            f"{key}: {function.name} is no async function; "
            f"write `async def {function.name}(conversation: Conversation) -> None`"
        )
    user_file.check_takes(function, key, 1, "a conversation")
    return function


@contextmanager
def open_sampler(
    sampler: Sampler,
    spec: str | None,
    encode: Encode,
    decode: Decode,
    mixed: bool = False,
    *,
    limits: LimitsConfig | None = None,
    chat: ChatFormat | None = None,
) -> Iterator[tuple[Sampler, Callable[[], list[str]]]]:
    """Yield the sampler of a run: `sampler` itself, or one that samples through the user's function."""
    if spec is None:
        yield sampler, list
        return
    with CustomRollouts(sampler, load_function(spec), encode, decode, mixed, limits=limits, chat=chat) as custom:
        yield custom, custom.take_events


class CustomRollouts:
    """Implementation of `engine.Sampler` that samples through a user's function, whose turns another sampler generates.

    All calls of the function share a thread (`function_thread.py`). A function that computes for a while delays other samples,
    but neither their deadlines nor the health checks of the servers. Use it as a context manager inside that of the engine;
    leaving the block cancels the conversations.
    """

    def __init__(
        self,
        sampler: Sampler,
        function: UserFunction,
        encode: Encode,
        decode: Decode,
        mixed: bool = False,
        *,
        limits: LimitsConfig | None = None,
        chat: ChatFormat | None = None,
    ) -> None:
        self._sampler, self._function, self._mixed = sampler, function, mixed
        self._limits = limits or LimitsConfig()
        self._begin = partial(
            Conversation,
            sample_turn=self._sample_turn,
            encode=encode,
            decode=decode,
            mixed=mixed,
            limits=self._limits,
            chat=chat,
        )
        self._chat = chat if is_agent(function.value) else None
        self.gateway: Gateway | None = None
        self._places: AbstractAsyncContextManager[None] = nullcontext()  # for samples that run at once
        self._loop, self._server = LoopThread("conversations"), LoopThread("gateway")
        self._calls = FunctionThread(self._limits.seconds, self._load_again)
        self._events: list[str] = []
        self._counts, self.total_counts = Counter[str](), Counter[str]()

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> list[Rollout]:
        """See `Sampler.generate`: one conversation per sample, all concurrently, each of at most `sampling.max_tokens`.

        The seed of a turn depends on (seed, prompt, sample, turn), so a function that depends only on its conversation
        reproduces its samples. Unless `mixed`, one version of the weights makes a whole sample: if newer weights come in
        between, the function is called again from the start.
        """
        return self._loop.run(self._converse(prompts, sampling, seed))

    def open(self) -> GroupStream:
        """See `Sampler.open`. The groups are those of `generate`."""
        return GroupStream(self._loop, self._converse)

    async def sample(self, prompt: Prompt, sampling: SamplingParams, seed: int) -> list[Rollout]:
        """See `Sampler.sample`. The function is not called."""
        return await self._sampler.sample(prompt, sampling, seed)

    def close(self) -> None:
        """Cancel the conversations; bounded in time. May be called again."""
        if self.gateway is not None:
            self._server.run(self.gateway.close())
            self._server.stop()
            self.gateway = None
        self._loop.stop()
        self._calls.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def _converse(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int, deliver: Deliver | None = None
    ) -> list[Rollout]:
        if self._chat is not None and self.gateway is None:
            self.gateway = Gateway(self._chat.decode)
            await asyncio.wrap_future(self._server.submit(self.gateway.start()))
            self._places = asyncio.Semaphore(self._agents_at_once(len(prompts) * sampling.samples))
        each = [(prompt, k) for prompt in prompts for k in range(sampling.samples)]

        async def group(samples: Sequence[asyncio.Task[list[Rollout]]]) -> None:
            done = await asyncio.gather(*samples)
            assert deliver is not None
            deliver([rollout for rollouts in done for rollout in rollouts])

        try:
            async with asyncio.TaskGroup() as tasks:
                samples = [tasks.create_task(self._one(prompt, sampling, seed, k)) for prompt, k in each]
                for place in range(len(prompts) if deliver is not None else 0):
                    tasks.create_task(group(samples[place * sampling.samples : (place + 1) * sampling.samples]))
        except ExceptionGroup as failed:
            error = failed.exceptions[0]
        else:
            return [rollout for sample in samples for rollout in sample.result()]
        raise error

    def _agents_at_once(self, wanted: int) -> int:
        """Raise the limit of open files, and return how many agents can run at once under it."""
        limit, others = raise_open_file_limit(), psutil.Process().num_fds() + SPARE_FILES
        allowed = max(1, (limit - others) // FILES_OF_AN_AGENT)
        if allowed < wanted:
            needed = others + FILES_OF_AN_AGENT * wanted
            self._events.append(
                f"only {allowed} of {wanted} agents run at once, because a process may open {limit} files here and these need "
                f"{needed}; raise the limit (`ulimit -n {needed}`)"
            )
        return allowed

    async def _one(self, prompt: Prompt, sampling: SamplingParams, seed: int, sample: int) -> list[Rollout]:
        """Return the sequences of one sample that the function makes."""
        while True:
            try:
                return await self._once(prompt, sampling, derive_seed(seed, sample), sample)
            except WeightsChanged as e:
                self._events.append(f"{e}; sample {sample} is made again")
            except ThreadAbandoned as e:
                self._events.append(f"prompt {prompt.id}: {e}; sample {sample} is made again")

    async def _once(self, prompt: Prompt, sampling: SamplingParams, seed: int, sample: int) -> list[Rollout]:
        async with self._places:
            return await self._in_place(prompt, sampling, seed, sample)

    async def _in_place(self, prompt: Prompt, sampling: SamplingParams, seed: int, sample: int) -> list[Rollout]:
        with self._opened(prompt, sampling, seed) as (session, argument):
            returned, failure = await self._call(session, argument)
            if session.failure is not None:  # the function caught the error and went on
                raise session.failure
            failure = session.exceeded or failure
            if not failure and not session.turns:
                failure = (
                    "it ended before the model wrote anything; let the model write at least one turn, and append less before "
                    f"it than rollout.max_response_tokens={sampling.max_tokens}"
                )
            if not failure:
                try:
                    return self._finished(session, returned, sample)
                except RuntimeError as e:
                    failure = f"it returned too early: {e}"
        return [lost_sample(prompt, sample, f"{self._what(prompt, sample)} failed: {failure}")]

    async def _call(self, session: Conversation | AgentSample, argument: object) -> tuple[object, str]:
        """Return what the function returned, and why the sample is lost; empty if it is not."""

        async def call() -> object:
            returned = await self._function.value(argument)
            turns = session.turns
            for _ in range(_HANG_UP_TURNS if isinstance(session, AgentSample) else 0):
                if not session.running:
                    break
                await asyncio.wrap_future(self._server.submit(asyncio.sleep(_TURN_SECONDS)))
            if session.running or session.turns > turns:
                raise RuntimeError("it returned too early: a turn is still running; await all turns before it returns")
            return returned

        try:
            returned = await self._calls.run(lambda: within(call(), self._limits.seconds))
        except (asyncio.CancelledError, GeneratorExit, ThreadAbandoned, TooManyThreads):
            raise
        except OverLimit as e:
            return None, str(e)
        except BaseException as e:  # SystemExit would end the event loop and leave its callers waiting
            cause = _first(e)
            if isinstance(cause, OutOfTokens) or (isinstance(session, AgentSample) and session.out_of_tokens):
                return None, ""
            return None, user_file.describe_error(cause, self._function.file)
        is_reward = isinstance(returned, int | float) and math.isfinite(returned)
        if returned is None or is_reward:
            return returned, ""
        return None, f"it returned {returned!r:.80}; it must return nothing, or the reward as a finite number"

    def _load_again(self) -> None:
        """Run the file once more: clients and locks at its top belong to the event loop in which they were used."""
        self._function = replace(self._function, value=self._function.again())

    def _finished(self, session: Conversation | AgentSample, returned: object, sample: int) -> list[Rollout]:
        if isinstance(session, AgentSample):
            rollouts = session.finish()
            self._counts.update(session.counts)
            self.total_counts.update(session.counts)
        else:
            rollouts = [session.finish()]
        if len(rollouts) > 1:
            rollouts = [replace(rollout, sample=sample) for rollout in rollouts]
        if isinstance(returned, int | float):
            reward = float(returned)
            rollouts = [replace(rollout, reward=reward, score=reward, status="given") for rollout in rollouts]
        return rollouts

    @contextmanager
    def _opened(
        self, prompt: Prompt, sampling: SamplingParams, seed: int
    ) -> Iterator[tuple[Conversation | AgentSample, object]]:
        if self._chat is None:
            conversation = self._begin(prompt, sampling, seed)
            yield conversation, conversation
            conversation.close()
            return
        assert self.gateway is not None
        agent = AgentSample(
            prompt, sampling, seed, sample_turn=self._sample_turn, chat=self._chat, mixed=self._mixed, limits=self._limits
        )
        with self.gateway.open_sample(agent) as task:
            yield agent, task

    async def _sample_turn(self, context: Prompt, sampling: SamplingParams, seed: int) -> Rollout:
        (rollout,) = await self._sampler.sample(context, sampling, seed)
        return rollout

    def _what(self, prompt: Prompt, sample: int) -> str:
        return f"prompt {prompt.id}, sample {sample}: {self._function.name} of {self._function.file}"

    def take_events(self) -> list[str]:
        """Return messages for the user about samples that were made again since the last call, a line each."""
        events, self._events = self._events, []
        if self._counts["turns"]:
            counts, self._counts = self._counts, Counter[str]()
            names: tuple[str, ...] = ("turns", "rewrites", "branches", "template_rewrites", "drift")
            names += ("abandoned",) if counts["abandoned"] else ()
            events.append("gateway: " + ", ".join(f"{counts[name]} {name}" for name in names))
        return events


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
