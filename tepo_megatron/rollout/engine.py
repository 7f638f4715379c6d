"""What the training loop knows of an inference engine, and what an engine's server looks like from outside."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from tepo_megatron.channel import Bucket, Kept, Meeting, Source, Taker
from tepo_megatron.config import ServerConfig
from tepo_megatron.errors import RolloutError
from tepo_megatron.rollout.servers.process import LOOPBACK
from tepo_megatron.types import Prompt, Rollout, SamplingParams

# The version of an engine that still serves the weights of its model directory.
INITIAL_VERSION = -1
# That of a server to which others sent weights, or whose weights are gone since it slept: no fleet's, so that it never serves
# before it was given some.
UNKNOWN_VERSION = -2

INITIAL_LABEL = "default"  # what vLLM and SGLang call the weights of their model directory

# What a sleeping engine releases, in the order in which it is woken.
EnginePart = Literal["weights", "kv_cache"]
ENGINE_PARTS: tuple[EnginePart, ...] = ("weights", "kv_cache")


class StaleWeights(RolloutError):
    """A server sampled with other weights than it was given."""


def served_label(version: int) -> str:
    """What vLLM and SGLang call the weights of `version`."""
    return INITIAL_LABEL if version == INITIAL_VERSION else str(version)


def in_words(sources: Sequence[Source]) -> list[str]:
    """What `inbox.Inbox.take` is told."""
    return [source.to_json() if isinstance(source, Bucket) else str(source.absolute()) for source in sources]


Platform = Literal["cpu", "cuda"]
Precision = Literal["fp32", "bf16"]


# told of a group as soon as its last sample is there
Deliver = Callable[[list[Rollout]], None]


class Groups(Protocol):
    """Groups of samples as they arrive, whichever was asked for first."""

    def add(self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> None:
        """Begin to sample these too; returns at once."""
        ...

    def next(self) -> list[Rollout] | None:
        """The next group that is there; None when nothing is under way. Raises as `RolloutEngine.generate`."""
        ...

    def close(self) -> None:
        """Give up what is under way."""
        ...


class RolloutEngine(Protocol):
    """An inference server owned by this process. Used by one caller at a time; the weights may be updated by another.

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

        The samples of a prompt depend on (weights, prompt, sampling, seed) alone, not on what else is sampled with it; those
        that new weights interrupt, on when they came too.
        rollout_logprobs are those of the distribution sampled from (after temperature). Raises RolloutError.
        """
        ...

    def open(self) -> Groups:
        """For what `generate` makes, group by group; nothing is under way yet."""
        ...

    async def sample(self, prompt: Prompt, sampling: SamplingParams, seed: int) -> list[Rollout]:
        """`generate` for one prompt, awaited in any event loop, many at once: for what is sampled in several turns."""
        ...

    def begin_update(self, version: int) -> None:
        """New weights are to come: any number of `load`, then `finish_update`. Nothing is served in between; what is under way
        is dealt with as `rollout.in_flight` says.

        Raises SyncError (as the other two), after which the engine can only be closed. An update that was not finished is
        forgotten.
        """
        ...

    @property
    def base(self) -> int | None:
        """The version that all who take part in the update under way served before it; None: there is no such version."""
        ...

    def keep(self, names: Sequence[str]) -> None:
        """In the update under way these tensors are not given: they stay those of `base`. Before any `load`; where some of the
        updates of an engine leave tensors out, it is told so in all of them. Raises SyncError.
        """
        ...

    @property
    def takers(self) -> tuple[Taker, ...]:
        """Who takes part in the update under way, as far as is known."""
        ...

    def join(self, meetings: Mapping[Taker, Meeting]) -> Future[None]:
        """Have the takers form groups with ranks of the trainer, before any `load` of what those broadcast.

        Returns at once. The future's result says that they have tried; who came is in the meeting's store.
        """
        ...

    def load(self, sources: Sequence[Source]) -> Future[None]:
        """Take the tensors of these sources (Hugging Face names), each of the model's once in an update.

        Returns at once; one `load` at a time. When the future has its result files may be deleted; which ranks took what was
        broadcast is in the meeting's store, and to who did not it may be sent again.
        """
        ...

    def finish_update(self) -> None:
        """All is loaded. Returns when the new weights serve and no cache of the old ones is left."""
        ...

    def verify(self, sent: Mapping[str, int]) -> None:
        """Ask all servers for the checksums of what they serve, after an update of tensors with these CRC-32 (Hugging Face
        names). Raises SyncError when servers differ, or a tensor changed since the last call and not in a server, as far as
        their checksums reach.
        """
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

    @property
    def restarts(self) -> int:
        """How often servers were started again, for whatever reason, since `start`."""
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
    process sees, the first one that the server takes; host: the address that it listens on; sleeps: the server will be told to
    sleep; returns_experts: it will be asked which experts its routers chose; maps_memory: its weights will lie on any of the
    GPUs that this process sees; in_fp8: it holds an FP8 model, whose first weights are those of the first update.
    """

    model_path: Path
    max_model_len: int
    platform: Platform
    precision: Precision
    seed: int
    first_device: int = 0
    host: str = LOOPBACK
    sleeps: bool = False
    returns_experts: bool = False
    maps_memory: bool = False
    in_fp8: bool = False

    @property
    def serves(self) -> str:
        """What its weights are in."""
        return "fp8" if self.in_fp8 else self.precision


@dataclass(frozen=True)
class About:
    """What a server says of itself. engine_version: as the engine numbers them; label: of the weights that it serves."""

    engine_version: str
    label: str
    max_model_len: int


@dataclass(frozen=True)
class Address:
    """Where a server is reached, and the key that it asks for."""

    url: str
    key: str


# (method, path, JSON body) -> JSON answer; raises client.RequestFailed
Send = Callable[[str, str, Mapping[str, Any] | None], Awaitable[Any]]


async def longest_sequence(send: Send) -> int:
    """Tokens of a sequence at most, by the list of models that both engines have from OpenAI's protocol."""
    return int((await send("GET", "/v1/models", None))["data"][0]["max_model_len"])


class EngineApi(Protocol):
    """How to start one kind of server and what to say to it: all that differs between engines."""

    name: str

    def command(self, cfg: ServerConfig, launch: Launch, port: int) -> list[str]:
        """argv of a server on `launch.host`, free of secrets. Raises ConfigError when it is not installed."""
        ...

    def environment(self, cfg: ServerConfig, launch: Launch, inherited: Mapping[str, str], key: str) -> dict[str, str]:
        """The server's whole environment; `key` is what it asks of every request."""
        ...

    async def about(self, send: Send) -> About:
        """What a healthy server says of itself."""
        ...

    async def prepare(self, send: Send) -> None:
        """What a healthy server needs once before it takes weights."""
        ...

    async def generate(self, send: Send, prompt: Prompt, sampling: SamplingParams, seed: int, version: int) -> list[Rollout]:
        """The samples of one prompt, by sample index. Raises RolloutError for an answer that is not what was asked for."""
        ...

    async def interrupt(self, send: Send) -> None:
        """End the requests that are under way: they answer with what they have, the stop reason of cut samples `cut.CUT`."""
        ...

    async def begin_update(self, send: Send) -> None:
        """New weights are to come, all of them; the server is new, or has finished the update before."""
        ...

    async def join(self, send: Send, meeting: Meeting) -> None:
        """Have all ranks of the server meet the trainer's, if they can (see `inbox.Inbox.join`)."""
        ...

    async def keep(self, send: Send, kept: Kept) -> None:
        """The update that has begun leaves tensors out."""
        ...

    async def load(self, send: Send, sources: Sequence[Source]) -> None:
        """Load the tensors of these sources; files are not needed any more when it returns."""
        ...

    async def finish_update(self, send: Send, version: int) -> None:
        """Serve what was loaded and drop every cache of the old weights. Raises SyncError when it serves others."""
        ...

    async def checksums(self, send: Send) -> Mapping[str, str] | None:
        """ "rank:parameter" -> a checksum of what is served, in the engine's own names; None: the engine has none."""
        ...

    async def sleep(self, send: Send) -> None:
        """Release weights and KV cache of an idle, awake server. Raises RolloutError for an answer that says otherwise."""
        ...

    async def wake(self, send: Send, part: EnginePart) -> None:
        """Take the memory of `part` again, once after each `sleep`; with the KV cache's it serves. Raises as that."""
        ...


class Server(Protocol):
    """What stands behind an endpoint: a process of this machine (`servers/local.py`), or one that others started
    (`servers/remote.py`).

    All methods but `stop` and `forget` run in one event loop. name: in messages; again: what becomes of it after a failure.
    """

    name: str
    again: str

    def launch(self) -> None:
        """Have it come up, at first and after each `end`; returns at once. Raises RolloutError, ConfigError."""
        ...

    async def reached(self) -> Address:
        """Return once it takes requests. Raises RolloutError when it does not, ConfigError when the run cannot use it."""
        ...

    async def failure(self, what: str) -> RolloutError:
        """An error that says `what` it did, and where to look."""
        ...

    @property
    def running(self) -> bool:
        """Whether it lives, as far as can be known without asking it."""
        ...

    @property
    def resident_bytes(self) -> int:
        """Of its processes, in this machine's memory."""
        ...

    async def end(self) -> None:
        """This start of it is over, at once: what comes up next serves its first weights."""
        ...

    def stop(self) -> None:
        """The run is over; bounded in time. May be called again, and before `launch`; from any thread."""
        ...

    def forget(self) -> None:
        """Remove what lay on the disk for the server's sake."""
        ...
