"""Interfaces of inference engines: what the training loop uses, and what differs between the engines' servers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from tepo_megatron.config import ServerConfig
from tepo_megatron.errors import RolloutError
from tepo_megatron.inference.servers.process import LOOPBACK
from tepo_megatron.types import Prompt, Rollout, SamplingParams
from tepo_megatron.weight_sync.broadcast_group import Bucket, GroupSpec, Recipient, Source, UnchangedTensors

# Version of an engine that still serves the weights of its model directory.
INITIAL_VERSION = -1
# Version of a server to which others sent weights, or whose weights are gone because it slept. No fleet has this version, so
# the server is not used before it gets weights.
UNKNOWN_VERSION = -2

INITIAL_LABEL = "default"  # label of the weights of the model directory in vLLM and SGLang

# Parts whose memory a sleeping engine releases, in the order in which they are woken.
EnginePart = Literal["weights", "kv_cache"]
ENGINE_PARTS: tuple[EnginePart, ...] = ("weights", "kv_cache")


class StaleWeights(RolloutError):
    """A server sampled with weights other than those it should serve."""


def served_label(version: int) -> str:
    """Return the label that vLLM and SGLang give the weights of `version`."""
    return INITIAL_LABEL if version == INITIAL_VERSION else str(version)


def serialize(sources: Sequence[Source]) -> list[str]:
    """Serialize weight sources for `inbox.Inbox.take`: a bucket as JSON, a file as its absolute path."""
    return [source.to_json() if isinstance(source, Bucket) else str(source.absolute()) for source in sources]


Platform = Literal["cpu", "cuda"]
Precision = Literal["fp32", "bf16"]


# called with each group as soon as its last sample has arrived
Deliver = Callable[[list[Rollout]], None]


class GroupStream(Protocol):
    """Stream of sampled groups in the order of their arrival, not of the requests."""

    def add(self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> None:
        """Begin to sample these prompts, too, and return at once.

        Args:
            prompts, sampling, seed: See `RolloutEngine.generate`.
        """
        ...

    def next(self) -> list[Rollout] | None:
        """Wait for the next group and return it; None if nothing is being sampled. Raises as `RolloutEngine.generate`."""
        ...

    def close(self) -> None:
        """Cancel what is being sampled."""
        ...


class RolloutEngine(Protocol):
    """Inference servers that this process uses. One caller samples at a time; another may update the weights.

    `with engine:` closes it on the way out, whatever happened; `start` it inside.
    """

    @property
    def version(self) -> int:
        """Version of the weights of the last `begin_update`; INITIAL_VERSION before the first."""
        ...

    def start(self) -> None:
        """Start the servers and return at once, so that the actor can be built meanwhile. Raises RolloutError, ConfigError."""
        ...

    def wait_ready(self) -> None:
        """Return when the servers take requests. Raises RolloutError if too few do in time."""
        ...

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> list[Rollout]:
        """Sample `sampling.samples` responses to each prompt, ungraded. The groups are contiguous, in the order of the prompts.

        The samples of a prompt depend only on (weights, prompt, sampling, seed), not on what else is sampled at the same time.
        Samples that a weight update interrupts also depend on when it came.

        Args:
            prompts: Prompts with different ids.
            sampling: How to sample each of them.
            seed: Seed of the call; each prompt's seed is derived from it and the prompt's id.

        Returns:
            Rollouts; rollout_logprobs are those of the distribution sampled from (after temperature).

        Raises:
            RolloutError: Sampling failed.
        """
        ...

    def open(self) -> GroupStream:
        """Return a stream that samples like `generate` and delivers group by group. Nothing is being sampled yet."""
        ...

    async def sample(self, prompt: Prompt, sampling: SamplingParams, seed: int) -> list[Rollout]:
        """Sample one prompt like `generate`, awaited in any event loop, many at once: for samples with several turns.

        Args:
            prompt, sampling, seed: See `generate`.
        """
        ...

    def begin_update(self, version: int) -> None:
        """Begin a weight update: any number of `load`, then `finish_update`. Nothing is sampled in between.

        Requests in flight are handled as `rollout.in_flight` says. An earlier update that was not finished is forgotten. Raises
        SyncError (the other methods of an update, too), after which the engine can only be closed.
        """
        ...

    @property
    def base(self) -> int | None:
        """Version that all servers of the update under way served before it. None: there are several such versions, or none."""
        ...

    def keep(self, names: Sequence[str]) -> None:
        """Announce tensors that the update under way leaves unchanged: they stay those of version `base`. Raises SyncError.

        Call it before any `load`. If some updates of an engine leave tensors unchanged, call it in all of its updates.
        """
        ...

    @property
    def takers(self) -> tuple[Recipient, ...]:
        """Servers of the update under way, as far as is known."""
        ...

    def join(self, meetings: Mapping[Recipient, GroupSpec]) -> Future[None]:
        """Have servers form process groups with ranks of the trainer, before any `load` of what these ranks broadcast.

        Returns at once. The future is done when all servers have tried; the meeting's store shows which ranks came.
        """
        ...

    def load(self, sources: Sequence[Source]) -> Future[None]:
        """Load the tensors of these sources (Hugging Face names).

        An update loads each tensor of the model once, in any number of calls.

        Returns at once; only one `load` may run at a time. Once the future is done, files may be deleted. For broadcast tensors
        the meeting's store shows which ranks received them; they may be sent again to ranks that did not.
        """
        ...

    def finish_update(self) -> None:
        """End the update. Returns when the new weights are served and no cache of the old ones is left."""
        ...

    def verify(self, sent: Mapping[str, int]) -> None:
        """Compare the checksums of what all servers serve, after an update.

        Args:
            sent: Hugging Face name -> CRC-32 of the tensors of the update.

        Raises:
            SyncError: Servers differ, or still serve the old value of a tensor that changed since the last call. Only
                tensors that the servers' checksums cover are compared.
        """
        ...

    @property
    def needs_weights(self) -> bool:
        """Return whether a server lacks the weights of `version`, so that another update has to send them."""
        ...

    def sleep(self) -> None:
        """Release the memory of the weights and the KV cache, once no request is in flight. Returns when the memory is free.

        Raises RolloutError (`wake` too) if the engine is in another sleep state, or too few servers are left.
        """
        ...

    def wake(self, part: EnginePart) -> None:
        """Allocate the memory of `part` again: first the weights, then the KV cache, after which the engine serves.

        The values of the weights are lost; an update has to send them again.
        """
        ...

    def resident_bytes(self) -> int:
        """Return the host memory of the engine's processes: the sum of their resident set sizes, in bytes."""
        ...

    @property
    def restarts(self) -> int:
        """Number of server restarts since `start`, for any reason."""
        ...

    def take_events(self) -> list[str]:
        """Return messages for the user about what happened since the last call, a line or more each."""
        ...

    def close(self) -> None:
        """End the servers and every process that they started; bounded in time. May be called again."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


@dataclass(frozen=True)
class LaunchSpec:
    """Settings that a server of any engine is started with."""

    model_path: Path  # Hugging Face directory of the first weights
    max_model_len: int  # most tokens of a sequence, prompt and response
    platform: Platform
    precision: Precision  # of the served weights
    seed: int  # of the server; each request brings its own
    first_device: int = 0  # index of the server's first GPU among those that this process sees
    host: str = LOOPBACK  # address to listen on
    sleeps: bool = False  # the server will be put to sleep
    returns_experts: bool = False  # the server will be asked for the experts that its routers chose
    maps_memory: bool = False  # updates may lie in the memory of any GPU that this process sees (CUDA IPC)
    in_fp8: bool = False  # the server holds an FP8 model, whose first weights are those of the first update

    @property
    def serves(self) -> str:
        """Precision of the served weights."""
        return "fp8" if self.in_fp8 else self.precision


@dataclass(frozen=True)
class ServerInfo:
    """A server's description of itself."""

    engine_version: str  # as the engine numbers its releases
    label: str  # of the weights that it serves
    max_model_len: int  # tokens of prompt and response


@dataclass(frozen=True)
class Address:
    """URL of a server, and the key that it requires."""

    url: str
    key: str


# (method, path, JSON body) -> JSON answer; raises client.RequestFailed
Send = Callable[[str, str, Mapping[str, Any] | None], Awaitable[Any]]


async def longest_sequence(send: Send) -> int:
    """Return the longest sequence that a server takes, in tokens, from OpenAI's list of models, which both engines have."""
    return int((await send("GET", "/v1/models", None))["data"][0]["max_model_len"])


class EngineApi(Protocol):
    """Adapter for one kind of server, with all that differs between engines.

    `send` of its methods sends a request to the server.
    """

    name: str

    def command(self, cfg: ServerConfig, launch: LaunchSpec, port: int) -> list[str]:
        """Return the argv of a server that listens on `launch.host`, without secrets.

        Args:
            cfg: Settings of the server.
            launch: What the server is started with.
            port: Port to listen on.

        Raises:
            ConfigError: The engine is not installed.
        """
        ...

    def environment(self, cfg: ServerConfig, launch: LaunchSpec, inherited: Mapping[str, str], key: str) -> dict[str, str]:
        """Return the server's whole environment.

        Args:
            cfg, launch: See `command`.
            inherited: Environment of this process.
            key: Key that the server requires in every request.
        """
        ...

    async def about(self, send: Send) -> ServerInfo:
        """Ask a healthy server to describe itself."""
        ...

    async def prepare(self, send: Send) -> None:
        """Send what a healthy server needs once before it takes weights."""
        ...

    async def generate(self, send: Send, prompt: Prompt, sampling: SamplingParams, seed: int, version: int) -> list[Rollout]:
        """Return the samples of one prompt, by sample index. Raises RolloutError for an answer that is not what was asked for.

        Args:
            prompt, sampling, seed: See `RolloutEngine.generate`.
            version: Version that the server has to serve. Raises StaleWeights if it does not.
        """
        ...

    async def interrupt(self, send: Send) -> None:
        """Abort the requests in flight.

        They return the tokens sampled so far; the stop reason of cut-off samples is `cut.CUT`.
        """
        ...

    async def begin_update(self, send: Send) -> None:
        """Begin an update of all weights, on a new server or one that has finished the update before."""
        ...

    async def join(self, send: Send, meeting: GroupSpec) -> None:
        """Have all ranks of the server join process groups with the trainer's ranks, if they can.

        Args:
            meeting: See `inbox.Inbox.join`.
        """
        ...

    async def keep(self, send: Send, kept: UnchangedTensors) -> None:
        """Announce the tensors that the update under way leaves unchanged.

        Args:
            kept: See `inbox.Inbox.keep`.
        """
        ...

    async def load(self, send: Send, sources: Sequence[Source]) -> None:
        """Load the tensors of some sources. When this returns, files are no longer needed.

        Args:
            sources: See `inbox.Inbox.take`.
        """
        ...

    async def finish_update(self, send: Send, version: int) -> None:
        """Serve the loaded weights and drop every cache of the old ones.

        Raises SyncError if the server reports another version.

        Args:
            version: Version of the new weights.
        """
        ...

    async def checksums(self, send: Send) -> Mapping[str, str] | None:
        """Return "rank:parameter" -> checksum of what is served, in the engine's own names.

        None: the engine has no checksums.
        """
        ...

    async def sleep(self, send: Send) -> None:
        """Release weights and KV cache of an idle, awake server. Raises RolloutError for an answer that says otherwise."""
        ...

    async def wake(self, send: Send, part: EnginePart) -> None:
        """Allocate memory again. With that of the KV cache the server serves. Raises as `sleep`.

        Args:
            part: Part to wake, once after each `sleep`.
        """
        ...


class Server(Protocol):
    """Server behind an endpoint: a process of this machine (`servers/local.py`) or one of others (`servers/remote.py`).

    All methods except `stop` and `forget` run in one event loop.

    Attributes:
        name: Name in messages.
        again: Predicate for messages that says what happens after a failure, like "is started again".
    """

    name: str
    again: str

    def launch(self) -> None:
        """Start the server, the first time and after each `end`. Returns at once. Raises RolloutError, ConfigError."""
        ...

    async def reached(self) -> Address:
        """Return the address once the server takes requests.

        Raises RolloutError if it fails, ConfigError if it does not fit the run.
        """
        ...

    async def failure(self, what: str) -> RolloutError:
        """Return an error that says `what` the server did, and where to look."""
        ...

    @property
    def running(self) -> bool:
        """Return whether the server is alive, as far as this is known without a request."""
        ...

    @property
    def resident_bytes(self) -> int:
        """Resident memory of the server's processes on this machine, in bytes."""
        ...

    async def end(self) -> None:
        """End this start of the server at once. The next start serves its first weights."""
        ...

    def stop(self) -> None:
        """Release the server at the end of the run; bounded in time.

        May be called again, before `launch`, and from any thread.
        """
        ...

    def forget(self) -> None:
        """Remove the files that were made for the server."""
        ...
