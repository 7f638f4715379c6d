"""The adapter that each kind of engine implements: how one of its servers is started, and which HTTP requests it takes."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from tepo_megatron.base.errors import RolloutError
from tepo_megatron.base.exchange import HttpAnswer
from tepo_megatron.base.types import Rollout
from tepo_megatron.config import ServerConfig
from tepo_megatron.engines.engine import INITIAL_VERSION, EnginePart, GenerationRequest
from tepo_megatron.engines.servers.client import RequestFailed
from tepo_megatron.engines.servers.process import LOOPBACK
from tepo_megatron.wire.broadcast_group import GroupSpec, UnchangedTensors
from tepo_megatron.wire.bucket_format import Bucket, Source

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}  # precision -> its name in vLLM and SGLang
INITIAL_LABEL = "default"  # label of the weights of the model directory in vLLM and SGLang

Platform = Literal["cpu", "cuda"]
Precision = Literal["fp32", "bf16"]


class StaleWeights(RolloutError):
    """A server sampled with weights other than those it should serve."""


def served_label(version: int) -> str:
    """Return the label that vLLM and SGLang give the weights of `version`."""
    return INITIAL_LABEL if version == INITIAL_VERSION else str(version)


def serialize(sources: Sequence[Source]) -> list[str]:
    """Serialize weight sources for `RankReceiver.take`: a bucket as JSON, a file as its absolute path."""
    return [source.to_json() if isinstance(source, Bucket) else str(source.absolute()) for source in sources]


@dataclass(frozen=True)
class LaunchSpec:
    """Settings that a server of any engine is started with."""

    model_path: Path  # Hugging Face directory of the first weights
    max_model_len: int  # most tokens of a sequence, prompt and response
    platform: Platform
    precision: Precision  # of the served weights
    seed: int  # of the server; each request brings its own
    servers: int = 1  # of the run; on CPUs they share the cores
    first_device: int = 0  # index of the server's first GPU among those that this process sees
    host: str = LOOPBACK  # address to listen on
    sleeps: bool = False  # the server will be put to sleep
    returns_experts: bool = False  # the server will be asked for the experts that its routers chose
    maps_memory: bool = False  # updates may lie in the memory of any GPU that this process sees (CUDA IPC)
    most_masked: int = 0  # most ids of a sampling mask that the server will be asked for; 0: it will not be asked for masks
    in_fp8: bool = False  # the server holds an FP8 model, whose first weights are those of the first update
    counts: bool = False  # the server counts what its own /metrics shows
    linear_attention: bool = (
        False  # some layers of the model have linear attention, whose states are cached next to keys, values
    )
    text_only: bool = False  # the model's files hold more than its text model, which is all that is served

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


# (method, path, JSON body) -> JSON answer; raises client.RequestFailed
Send = Callable[[str, str, Mapping[str, Any] | None], Awaitable[Any]]
# (method, path, JSON body, preferred content type) -> undecoded answer; raises client.RequestFailed
Exchange = Callable[[str, str, Mapping[str, Any] | None, str], Awaitable[HttpAnswer]]


async def even_if_refused(request: Awaitable[Any]) -> None:
    """Await a request, and ignore an answer that is an error. Raises RequestFailed without an answer."""
    try:
        await request
    except RequestFailed as e:
        if not e.answered:
            raise


async def describe(send: Send, engine_version: object, label: object) -> ServerInfo:
    """Return a server's description. Its longest sequence comes from OpenAI's list of models, which all engines have."""
    length = int((await send("GET", "/v1/models", None))["data"][0]["max_model_len"])
    return ServerInfo(str(engine_version), str(label), length)


class EngineApi(Protocol):
    """Adapter for one kind of server: everything that differs between engines.

    `send` of its methods sends a request to the server.
    """

    name: str

    def command(self, cfg: ServerConfig, launch: LaunchSpec, port: int) -> list[str]:
        """Return the argv of a server that listens on `launch.host`, without secrets."""

    def environment(self, cfg: ServerConfig, launch: LaunchSpec, inherited: Mapping[str, str], key: str) -> dict[str, str]:
        """Return the server's whole environment."""

    async def server_info(self, send: Send) -> ServerInfo:
        """Ask a healthy server to describe itself."""

    async def prepare(self, send: Send) -> None:
        """Send what a healthy server needs once before it takes weights."""

    async def generate(self, send: Send, exchange: Exchange, ask: GenerationRequest, version: int) -> HttpAnswer:
        """Have one prompt sampled, and return the undecoded answer."""

    def decode(self, answer: HttpAnswer, ask: GenerationRequest, version: int) -> list[Rollout]:
        """Return the samples in an answer, by sample index. It may run in any thread, and asks nobody.

        Raises RolloutError if the answer is not what was asked for. StaleWeights if it tells of other weights.
        """

    async def interrupt(self, send: Send) -> None:
        """Abort the requests in flight.

        They return the tokens sampled so far; the stop reason of aborted samples is `engine.ABORTED`.
        """

    async def begin_update(self, send: Send, broken_off: bool) -> None:
        """Begin an update of all weights, on a new server or one that has finished the update before."""

    async def join_groups(self, send: Send, spec: GroupSpec) -> None:
        """Have all ranks of the server join process groups with the trainer's ranks, if they can."""

    async def keep_unchanged(self, send: Send, unchanged: UnchangedTensors) -> None:
        """Announce the tensors that the current update leaves unchanged."""

    async def load(self, send: Send, sources: Sequence[Source]) -> None:
        """Load the tensors of some sources. When this returns, files are no longer needed."""

    async def finish_update(self, send: Send, version: int) -> None:
        """Serve the loaded weights and drop every cache of the old ones.

        Raises SyncError if the server reports another version.
        """

    async def checksums(self, send: Send) -> Mapping[str, str] | None:
        """Return "rank:parameter" -> checksum of what is served, in the engine's own names.

        None: the engine has no checksums.
        """

    async def sleep(self, send: Send) -> None:
        """Release weights and KV cache of an idle, awake server. Raises RolloutError for an answer that says otherwise."""

    async def wake(self, send: Send, part: EnginePart) -> None:
        """Allocate memory again. With that of the KV cache the server serves. Raises as `sleep`."""
