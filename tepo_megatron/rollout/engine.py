"""What the training loop knows of an inference engine, and what an engine's server looks like from outside."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from tepo_megatron.config import ServerConfig
from tepo_megatron.errors import RolloutError
from tepo_megatron.types import Prompt, Rollout, SamplingParams

# The version of an engine that still serves the weights of its model directory.
INITIAL_VERSION = -1
# The version of a server that slept: its weights are gone, and it serves nothing until it is given others.
DISCARDED_VERSION = -2
# What a sleeping engine releases, in the order in which it is woken.
EnginePart = Literal["weights", "kv_cache"]
ENGINE_PARTS: tuple[EnginePart, ...] = ("weights", "kv_cache")


class StaleWeights(RolloutError):
    """A server sampled with other weights than it was given."""


def served_label(version: int) -> str:
    """What vLLM and SGLang call the weights of `version`: "default" before any were sent."""
    return "default" if version == INITIAL_VERSION else str(version)


Platform = Literal["cpu", "cuda"]
Precision = Literal["fp32", "bf16"]


# a group with the place of its prompt among those that were asked for, as it arrives
Arrival = tuple[int, list[Rollout]]
Groups = Generator[Arrival, None, None]
Deliver = Callable[[Arrival], None]


class RolloutEngine(Protocol):
    """An inference server owned by this process. Used by one caller at a time.

    `with engine:` closes it on the way out, whatever happened; `start` it inside.
    """

    @property
    def version(self) -> int:
        """The version of the weights of the last `begin_update`; before the first, INITIAL_VERSION."""
        ...

    def start(self) -> None:
        """Start the server and return at once, so that the actor can be built meanwhile. Raises RolloutError."""
        ...

    def wait_ready(self) -> None:
        """Return when the server takes requests. Raises RolloutError if it dies or is not ready in time."""
        ...

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> list[Rollout]:
        """`sampling.samples` responses to each prompt, ungraded: groups contiguous, in the order of the prompts.

        The samples of a prompt depend on (weights, prompt, sampling, seed) alone, not on what else is sampled with it.
        rollout_logprobs are those of the distribution sampled from (after temperature). Raises RolloutError.
        """
        ...

    def stream(self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> Groups:
        """The groups of `generate`, each as soon as its last sample is there, with the place of its prompt in `prompts`.

        To close it ends what is still being sampled. Raises as `generate`.
        """
        ...

    async def sample(self, prompt: Prompt, sampling: SamplingParams, seed: int) -> list[Rollout]:
        """`generate` for one prompt, awaited in any event loop, many at once: for what is sampled in several turns."""
        ...

    def begin_update(self, version: int) -> None:
        """New weights are to come: any number of `load`, then `finish_update`. Nothing is served in between.

        Raises SyncError (as the other two), after which the engine can only be closed. An update that was not finished is
        forgotten.
        """
        ...

    def load(self, files: Sequence[Path]) -> Future[None]:
        """Take the tensors of these files (safetensors, Hugging Face names), each of the model's once in an update.

        Returns at once; one `load` at a time. When the future has its result the files may be deleted.
        """
        ...

    def finish_update(self) -> None:
        """All is loaded. Returns when the new weights serve and no cache of the old ones is left."""
        ...

    @property
    def needs_weights(self) -> bool:
        """Whether part of the engine waits for the weights of `version`, to be given by another update."""
        ...

    def sleep(self) -> None:
        """Release weights and KV cache, once no request is under way. Returns when the memory is free.

        Raises RolloutError, as `wake` does: for an engine that is not awake, and when too few servers are left.
        """
        ...

    def wake(self, part: EnginePart) -> None:
        """Take the memory of `part` again: first of the weights, whose values are gone and which an update gives anew, then of
        the KV cache, after which the engine serves.
        """
        ...

    def resident_bytes(self) -> int:
        """Host memory of the engine's processes: the sum of their resident sets."""
        ...

    def take_events(self) -> list[str]:
        """What the user should know of what happened since the last call, a line or more each."""
        ...

    def close(self) -> None:
        """End the server and every process it started; bounded in time, may be called again."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


@dataclass(frozen=True)
class Launch:
    """What a server is started with, whichever engine it is.

    model_path: Hugging Face directory that it loads first; max_model_len: prompt and response tokens of a sequence at most;
    precision: of the served weights; seed: of the server (each request brings its own); first_device: of the GPUs that this
    process sees, the first one that the server takes; sleeps: the server will be told to sleep.
    """

    model_path: Path
    max_model_len: int
    platform: Platform
    precision: Precision
    seed: int
    first_device: int = 0
    sleeps: bool = False


# (method, path, JSON body) -> JSON answer; raises client.RequestFailed
Send = Callable[[str, str, Mapping[str, Any] | None], Awaitable[Any]]


class EngineApi(Protocol):
    """How to start one kind of server and what to say to it: all that differs between engines."""

    name: str

    def command(self, cfg: ServerConfig, launch: Launch, port: int) -> list[str]:
        """argv of a server on the loopback interface, free of secrets. Raises ConfigError when it is not installed."""
        ...

    def environment(self, cfg: ServerConfig, launch: Launch, inherited: Mapping[str, str], key: str) -> dict[str, str]:
        """The server's whole environment; `key` is what it asks of every request."""
        ...

    async def prepare(self, send: Send) -> None:
        """What a healthy server needs once before it takes weights."""
        ...

    async def generate(self, send: Send, prompt: Prompt, sampling: SamplingParams, seed: int, version: int) -> list[Rollout]:
        """The samples of one prompt, by sample index. Raises RolloutError for an answer that is not what was asked for."""
        ...

    async def begin_update(self, send: Send) -> None:
        """New weights are to come, all of them; the server is new, or has finished the update before."""
        ...

    async def load(self, send: Send, files: Sequence[Path]) -> None:
        """Load the tensors of these files; they are not needed any more when it returns."""
        ...

    async def finish_update(self, send: Send, version: int) -> None:
        """Serve what was loaded and drop every cache of the old weights. Raises SyncError when it serves others."""
        ...

    async def sleep(self, send: Send) -> None:
        """Release weights and KV cache of an idle, awake server. Raises RolloutError for an answer that says otherwise."""
        ...

    async def wake(self, send: Send, part: EnginePart) -> None:
        """Take the memory of `part` again, once after each `sleep`; with the KV cache's it serves. Raises as that."""
        ...
