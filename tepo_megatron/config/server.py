"""Section `rollout.server`: the inference servers. A key that is present decides who starts them.

`urls`: others do. `rendezvous`: `tepo serve` does, from the config of the run. Neither: the run itself does.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Discriminator, Field, Tag

from tepo_megatron.config.fields import NonNegative, NonNegativeFloat, Positive, PositiveFloat, config, without_nulls

TOKENS_PER_LIMIT = 1e6  # tokens that a server samples within request_seconds at least
_LONGEST = 2**17  # tokens of a long response
_LOOPBACK = re.compile(r"localhost|127(\.\d+){3}|::1")  # hosts that are this machine, whichever it is


@config
class AnyServerConfig:
    """Keys of all inference servers, whoever starts them."""

    others: ClassVar[bool]  # whether others than the run start the servers

    # Number of tensor-parallel ranks of each server.
    tp: Positive = 1
    # Seconds until a server must serve, counted from its start or, for servers that others start, from the moment at which the
    # run looks for it. The default is for 14B weights from a cold disk, compilation and the capture of CUDA graphs. A server
    # that the run starts is given up after a twelfth of them (at least 300 s) in which its log does not grow and its processes
    # neither use a disk nor a hundredth of a core; one whose process ends, at once.
    # Limit since the start of a server: 10 minutes for imports, 10 for 14B weights, 10 for compilation and CUDA graphs; then
    # `was not ready after`; a start
    ready_seconds: PositiveFloat = 3600.0
    # Seconds until a server must have answered one request. A request that takes longer is sent again. A generation request
    # gets this many seconds per million tokens, if rollout.server.concurrency requests like it ask for more than a million.
    # Limit since a request was sent: 64 responses of 32k tokens get twice as long; then it is sent again
    request_seconds: PositiveFloat = 1800.0
    # Seconds that requests may wait for weights that no server has, as after a restart of all. The trainer sends them when it
    # waits for rollouts next, so this has to exceed the time of the longest step; then the run ends.
    # Limit since requests wait for weights: a step takes half an hour; then `requests have waited`
    weights_seconds: PositiveFloat = 3600.0
    # Seconds without an answer to a health request after which a server counts as hung and is replaced by a new start.
    # Limit since the last answer to a health request: a server answers while it samples; then it is started again
    heartbeat_timeout: PositiveFloat = 60.0
    # Number of consecutive restarts of a server that served before, until it counts as lost.
    restarts: NonNegative = 3
    # Maximum number of concurrent requests to one server.
    concurrency: Positive = 64
    # Precision of the served model. null: that of model.precision.
    precision: Literal["fp32", "bf16"] | None = None

    def generation_limit(self, tokens: int) -> float:
        """Return the seconds until a generation request must be answered, while the server is full of requests like it."""
        return self.request_seconds * max(1.0, self.concurrency * tokens / TOKENS_PER_LIMIT)

    @property
    def change_seconds(self) -> float:
        """Return the seconds in which a start or the longest request ends, so that the state of some server changes."""
        return self.ready_seconds + self.generation_limit(_LONGEST)

    @property
    def remote(self) -> bool:
        """Return whether weights may have to reach another machine."""
        return self.others

    @property
    def rendezvous_folder(self) -> str | None:
        """Return `rendezvous`; None for servers that are not found through a folder."""
        return None

    @property
    def growth_limit_gib(self) -> float:
        """Return `restart_after_growth_gib`; 0 for servers without that key."""
        return 0.0

    def at_rendezvous(self, folder: str) -> "RendezvousServerConfig":
        """Return the same servers, found through this folder."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        shared = {f.name for f in dataclasses.fields(RendezvousServerConfig)}
        return RendezvousServerConfig(**({k: v for k, v in own.items() if k in shared} | {"rendezvous": folder}))


@config
class ServerConfig(AnyServerConfig):
    """Servers that the run starts and watches itself. They listen on loopback only."""

    others: ClassVar[bool] = False

    # Python interpreter of the engine's environment. null: this interpreter for vLLM and torch, the one that `make sglang`
    # installs for SGLang.
    python: str | None = None
    # GiB by which the resident memory of a server may grow beyond its size after the first requests; 0: no limit. A server
    # above the limit is restarted before it receives the next weights; this changes no sample and does not count as one of
    # `rollout.server.restarts`. No effect on servers that `tepo serve` starts.
    restart_after_growth_gib: NonNegativeFloat = 4.0
    # GiB of the KV cache, on platform cpu; for engine torch on both platforms. null: the engine decides (torch: 1 on cpu, 16 on
    # cuda).
    kv_cache_gib: PositiveFloat | None = None
    # Additional arguments on the engine's command line.
    extra_args: list[str] = Field(default_factory=list)

    @property
    def growth_limit_gib(self) -> float:
        return self.restart_after_growth_gib


@config
class RendezvousServerConfig(ServerConfig):
    """Servers that `tepo serve` starts from the same config, on the machines of the ranks or on other ones."""

    others: ClassVar[bool] = True

    # Folder by which run and `tepo serve` find each other: it holds the servers' key and the address at which the run listens.
    # The run waits until `tepo serve` offers it rollout.servers servers.
    rendezvous: str

    @property
    def rendezvous_folder(self) -> str:
        return self.rendezvous


@config
class UrlServerConfig(AnyServerConfig):
    """Servers that others start. Keys that only a start of a server uses are refused here."""

    others: ClassVar[bool] = True
    NOT_FOR: ClassVar[str] = "has no effect on the servers of rollout.server.urls, which others start"

    # Addresses of the servers, http(s)://HOST:PORT, one for each of rollout.servers. All require the key in the environment
    # variable TEPO_SERVER_KEY.
    urls: list[str]

    def __post_init__(self) -> None:
        for url in self.urls:
            if not re.fullmatch(r"https?://[\w.-]+(:\d+)?|https?://\[[0-9a-fA-F:]+\](:\d+)?", url):
                raise ValueError(f"urls: {url!r} is not http(s)://HOST:PORT, which is all that a server's address has")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError(f"urls={self.urls} names one twice")

    @property
    def remote(self) -> bool:
        return any(not _LOOPBACK.fullmatch(urlsplit(url).hostname or "") for url in self.urls)


def check_engine_size(engine: str, server: AnyServerConfig) -> None:
    """Check that the engine can have this many tensor-parallel ranks. Raises ValueError."""
    if engine == "torch" and server.tp != 1:
        raise ValueError(f"engine=torch with server.tp={server.tp}: it is one process; set server.tp to 1, or engine to vllm")


def _prepared(value: Any) -> Any:
    """Return the section without null keys. Raises ValueError if it names two kinds of servers."""
    value = without_nulls(value)
    if isinstance(value, dict) and {"urls", "rendezvous"} <= value.keys():
        raise ValueError("urls and rendezvous are two ways to find the same servers; remove one of them")
    return value


def variant_named_by(values: Mapping[str, Any]) -> type[AnyServerConfig] | None:
    """Return the variant that the keys of a section choose; None if they choose none, and the run starts the servers itself."""
    if values.get("urls") is not None:
        return UrlServerConfig
    return RendezvousServerConfig if values.get("rendezvous") is not None else None


def _variant(value: Any) -> str:
    """Return the tag of the variant that a section or an instance is."""
    if isinstance(value, AnyServerConfig):
        return f"<{type(value).__name__}>"
    cls = variant_named_by(value) if isinstance(value, dict) else None
    return f"<{(cls or ServerConfig).__name__}>"


AnyServer = Annotated[
    Annotated[ServerConfig, Tag("<ServerConfig>")]
    | Annotated[RendezvousServerConfig, Tag("<RendezvousServerConfig>")]
    | Annotated[UrlServerConfig, Tag("<UrlServerConfig>")],
    Discriminator(_variant),
    BeforeValidator(_prepared),
]
