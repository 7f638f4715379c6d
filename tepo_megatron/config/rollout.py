"""What is sampled, and the servers that sample it."""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field

from tepo_megatron.config.fields import NonNegative, NonNegativeFloat, Positive, PositiveFloat, config
from tepo_megatron.config.platform_defaults import default_of

_LOOPBACK = re.compile(r"localhost|127(\.\d+){3}|::1")  # hosts that are this machine, whichever it is


@config
class ServerConfig:
    """An inference server that the run starts, watches and stops (loopback only), or that others started.

    python: the interpreter of the engine's environment; None: this one for vLLM, for SGLang the one of `make sglang`. urls:
    where the servers are, one for each of rollout.servers; they ask for the key in TEPO_SERVER_KEY. rendezvous: a folder in
    which `tepo serve` says where they are; the run waits for rollout.servers of them. Both null: the run starts its own.
    """

    python: str | None = None
    urls: list[str] | None = None
    rendezvous: str | None = None
    tp: Positive = 1  # tensor-parallel ranks of the engine
    port: Annotated[int, Field(ge=0, le=65535)] = 0  # 0: any free port
    ready_seconds: PositiveFloat | None = None  # from its start until it serves; None: 300 on cpu, 1800 on cuda
    request_seconds: PositiveFloat = 1800.0  # until it has answered one request
    silent_seconds: PositiveFloat = 60.0  # without an answer about its health: the server counts as frozen
    restarts: NonNegative = 3  # of a server that served before, one after the other, until it counts as lost
    backoff_seconds: NonNegativeFloat = 1.0  # before the first of them, doubled each time
    # GiB by which the resident memory of a server may grow beyond what it held after its first requests. Above that it is
    # started again before it gets the next weights, which changes no sample and does not count to `restarts`; 0: never. The
    # limit is relative, because what a server needs depends on model and engine. No effect on servers that others start
    restart_after_growth_gib: NonNegativeFloat = 4.0
    concurrency: Positive = 64  # requests under way at once
    precision: Literal["fp32", "bf16"] | None = None  # None: as model.precision
    kv_cache_gib: PositiveFloat | None = None  # platform cpu: size of the KV cache; None leaves it to the engine
    extra_args: list[str] = Field(default_factory=list)  # passed to the engine's own command line

    def ready_limit(self, platform: str) -> float:
        """Seconds from the start of a server until it must serve."""
        return default_of("rollout.server.ready_seconds", platform, self.ready_seconds)

    def __post_init__(self) -> None:
        if self.urls is not None and self.rendezvous is not None:
            raise ValueError("urls and rendezvous are two ways to find the same servers; remove one of them")
        for url in self.urls or ():
            if not re.fullmatch(r"https?://[\w.-]+(:\d+)?|https?://\[[0-9a-fA-F:]+\](:\d+)?", url):
                raise ValueError(f"urls: {url!r} is not http(s)://HOST:PORT, which is all that a server's address has")
        if len(set(self.urls or ())) < len(self.urls or ()):
            raise ValueError(f"urls={self.urls} names one twice")

    @property
    def others(self) -> bool:
        """Return whether others start the servers."""
        return self.urls is not None or self.rendezvous is not None

    @property
    def remote(self) -> bool:
        """Whether weights may have to reach another machine."""
        hosts = [urlsplit(url).hostname or "" for url in self.urls or ()]
        return self.rendezvous is not None or any(not _LOOPBACK.fullmatch(host) for host in hosts)


@config
class RolloutConfig:
    """What is sampled each step."""

    engine: Literal["vllm", "sglang"] = "vllm"  # what samples
    servers: Positive = 1  # each with a copy of the model
    min_servers: Positive = 1  # with fewer left the run fails
    attempts: Positive = 3  # to sample a prompt, on other servers where there are some
    # steps by which the weights that sampled a token may be older than those that learn from it; 0: training and sampling take
    # turns; k: rollouts are sampled meanwhile, up to k steps ahead (objective.correction weighs the difference). Each rank then
    # keeps k + 1 copies of its weights in host memory, with which tokens of older weights are compared (sync.max_logprob_diff)
    max_staleness: NonNegative = 0
    # responses that are under way when new weights are there; finish: they are waited for; continue: each goes on at once under
    # the new weights, those that oversample leaves over too; restart: their groups are sampled anew
    in_flight: Literal["finish", "continue", "restart"] = "finish"
    # trainer and engine share the devices: while one works, the other has released what it can (`placement.py`). With
    # server.rendezvous servers are on every machine of the ranks, kept there by `tepo serve`
    colocate: bool = False
    prompts_per_step: Positive = 64  # of a rollout batch
    samples_per_prompt: Annotated[int, Field(ge=2, strict=True)] = 8  # advantages are relative to the group
    # scales actor, old and rollout log-probs alike; vLLM raises smaller ones to 0.01 without a word
    temperature: Annotated[float, Field(ge=0.01, allow_inf_nan=False)] = 1.0
    max_response_tokens: Positive = 8192  # there a response is cut off
    max_sequence_tokens: Positive | None = None  # of prompt and response together: a long prompt gets a shorter response
    # path/to/file.py:name of an async function that makes each sample, in turns with tools (`rollout/conversation.py`); all it
    # adds to the prompt counts to max_response_tokens, and each turn is a request to server.concurrency
    function: str | None = None
    # end a response, beside the end-of-sequence tokens of the model's config.json and its tokenizer
    stop_token_ids: list[NonNegative] = Field(default_factory=list)
    # the experts that the engine's routers chose for each token are chosen by the actor's in every pass (not by the reference
    # policy's): its log-probs are of the network that sampled. What cannot return them is refused (`rollout/experts.py`)
    replay_experts: bool = False
    filter_uniform_groups: bool = True  # drop groups that are all right or all wrong (unshaped score)
    # further rounds of prompts when dropped groups left too few; None: 9 under objective.dynamic_sampling, else 0
    max_refills: NonNegative | None = None
    # prompts asked for, per group that is wanted: sampling ends with the last group that is. The longest responses, which come
    # last, are then learned from less often, and which they are depends on timing
    oversample: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    record: bool = False  # keep what each step learns from, in `rollouts/` of the run's folder
    replay: str | None = None  # such a folder, to learn from it again: no engine is started, nothing is sampled or evaluated
    only: bool = False  # sample, grade and record with the weights of model.path; nothing is trained
    server: ServerConfig = Field(default_factory=ServerConfig)

    def __post_init__(self) -> None:
        if self.min_servers > self.servers:
            raise ValueError(f"min_servers={self.min_servers} exceeds servers={self.servers}; lower it or start more")
        if self.colocate:
            self._check_colocation()
        if self.replay_experts and self.function is not None:
            raise ValueError(
                f"replay_experts=true and function={self.function}: the turns of a sample are requests of their own, whose "
                "experts are not joined; set replay_experts to false, or function to null"
            )
        if self.servers > 1 and self.server.port:
            raise ValueError(f"server.port={self.server.port} can be that of one server, not of {self.servers}; set it to 0")
        if self.in_flight != "finish" and self.max_staleness == 0:
            raise ValueError(
                f"in_flight={self.in_flight}: nothing is under way when new weights come while max_staleness=0; set "
                "max_staleness to 1 or more, or in_flight to finish"
            )
        if self.server.urls is not None and len(self.server.urls) != self.servers:
            raise ValueError(
                f"server.urls names {len(self.server.urls)} servers, not servers={self.servers}; set that to their number"
            )

    def _check_colocation(self) -> None:
        if self.max_staleness:
            raise ValueError(
                f"max_staleness={self.max_staleness} samples while training goes on, and with colocate=true they take turns; "
                "set max_staleness to 0, or colocate to false"
            )
        if self.server.urls is not None:
            raise ValueError(
                "colocate=true has servers stand still while the trainer works, and nobody says so to whoever starts those of "
                "server.urls; keep them with `tepo serve` on the ranks' machines, and set server.rendezvous instead"
            )
        if self.replay is not None or self.only:
            one = "only=true trains nothing" if self.only else f"replay={self.replay} starts no engine"
            raise ValueError(f"colocate=true has trainer and engine take turns, and {one}; remove one of them")
