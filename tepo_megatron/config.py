"""The one config tree. Every default and every check across fields lives here.

How a config is read and how its errors are told: `config_io.py`. What depends on the model (does tp divide its heads?) is
checked in `actor/layout.py`, what depends on the table of objectives in `losses/`; both before any process is started.
"""

from __future__ import annotations

import re
import typing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import ConfigDict, Discriminator, Field, Tag
from pydantic.dataclasses import dataclass

T = typing.TypeVar("T")


@typing.dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
def config(cls: type[T]) -> type[T]:
    """A section of the config: keyword-only, frozen, validated, unknown keys refused."""
    return typing.cast(
        type[T], dataclass(config=ConfigDict(extra="forbid", coerce_numbers_to_str=True), kw_only=True, frozen=True)(cls)
    )


Positive = Annotated[int, Field(ge=1, strict=True)]  # strict: `true` is no number
NonNegative = Annotated[int, Field(ge=0, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Weight = Annotated[float, Field(allow_inf_nan=False)]
_LOOPBACK = re.compile(r"localhost|127(\.\d+){3}|::1")  # hosts that are this machine, whichever it is
PAPER_TOKENS = 8192  # of a response to a benchmark's problem (Section 4.1)
Benchmark = Literal["aime24", "aime25", "amc", "math500", "omni_math", "olympiad_bench", "minerva"]  # the columns of Table 1


@config
class ModelConfig:
    """path: a Hugging Face directory (config.json, safetensors, tokenizer)."""

    path: str
    reference: str | None = None  # the reference policy of objective.ref_beta, of the same architecture; None: as `path`
    precision: Literal["fp32", "bf16"] = "bf16"
    # `auto` takes Transformer Engine where it is installed (platform cuda), else PyTorch's SDPA
    attention: Literal["auto", "te", "sdpa"] = "auto"


@config
class ParallelConfig:
    """Sizes of the mesh axes; their product tp*pp*cp*dp is the number of ranks."""

    tp: Positive = 1
    pp: Positive = 1
    vpp: Positive = 1  # model chunks per pipeline stage
    cp: Positive = 1
    ep: Positive = 1
    dp: Positive = 1
    sequence_parallel: bool = False
    timeout_seconds: PositiveFloat = 600.0  # a collective of training that waits longer fails
    silent_seconds: PositiveFloat = 60.0  # a rank that gives no sign of life for so long is frozen (`watch.py`)

    def __post_init__(self) -> None:
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel=true needs tp > 1; set it to false or raise tp")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp={self.vpp} needs pp > 1; set vpp to 1 or raise pp")
        if (self.dp * self.cp) % self.ep:
            raise ValueError(f"ep={self.ep} does not divide dp*cp={self.dp * self.cp}")

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.tp * self.pp * self.cp * self.dp


# what `data.train` and `data.eval` may end with: rows from a place on and up to one, counted or in percent
SLICE = re.compile(r"(?P<source>.*)\[(?P<start>\d+%?)?:(?P<stop>\d+%?)?\]", re.DOTALL)


def _check_source(key: str, source: str) -> None:
    """Raise ValueError for a slice that is none."""
    match = SLICE.fullmatch(source)
    if not source.strip() or (match is not None and not match["source"].strip()):
        raise ValueError(f"{key}={source!r} names no file and no dataset")
    if match is None and re.search(r"\[[^/]*:[^/]*\]?$", source):
        raise ValueError(f"{key}={source!r} does not end with a slice like [:1000], [500:] or [10%:20%]")
    if match is not None and any(bound.endswith("%") and int(bound[:-1]) > 100 for bound in match.groups("") if bound):
        raise ValueError(f"{key}={source!r}: a set has no more than 100% of its rows")


@config
class DataSet:
    """One of the sets that are mixed. path: as `data.train`; the keys: of this set, None as in `data`.

    weight: its share of the prompts, beside those of the other sets, whatever its size; when it is through it starts again.
    """

    path: str
    weight: PositiveFloat = 1.0
    prompt_key: str | None = None
    answer_key: str | None = None

    def __post_init__(self) -> None:
        _check_source("path", self.path)


# the tags keep errors about one of the two apart from errors about the other; `config_io.py` leaves them out of what it tells
_Train = Annotated[
    Annotated[str, Tag("<path>")] | Annotated[list[DataSet], Tag("<sets>")],
    Discriminator(lambda value: "<sets>" if isinstance(value, list) else "<path>"),
]


@config
class DataConfig:
    """train, eval: a file (JSON lines or parquet; `*` stands for several), or a dataset of Hugging Face:
    ORG/NAME[:CONFIG][:SPLIT]. Either may end with a slice of its different prompts: [:1000], [10%:]. train may also be a list
    of sets that are mixed.

    prompt_key: a string, or a list of chat messages (then the chat template applies); a dot leads into an object. None, here or
    for answer_key: found out from the columns (`data/schemas.py`).
    deduplicate: a prompt is taken once, and refused where it has different answers. skip_bad_rows: what cannot be used is
    counted instead of refused. check_answers: what becomes of rows whose answer the grader cannot read.
    as_chat: strings, too, are messages to the chat template. system_prompt: of chats without one. instruction: ends the last
    message, or the string, as a paragraph of its own. template_kwargs: for the chat template ({enable_thinking: false}).
    """

    train: _Train
    eval: str | None = None
    prompt_key: str | None = None
    answer_key: str | None = None
    max_prompt_tokens: Positive = 2048  # longer prompts are dropped and counted
    shuffle: bool = True
    deduplicate: bool = True
    skip_bad_rows: bool = False
    check_answers: Literal["tell", "drop", "error", "off"] = "tell"
    as_chat: bool = False
    system_prompt: str | None = None
    instruction: str | None = None
    template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.train:
            raise ValueError("train=[] names no set; give it a file, or at least one set with its path")
        for key, source in (("train", self.train), ("eval", self.eval)):
            if isinstance(source, str):
                _check_source(key, source)
        own = sorted({"tokenize", "add_generation_prompt", "return_dict", "conversation"} & self.template_kwargs.keys())
        if own:
            raise ValueError(f"template_kwargs.{own[0]} is not the template's to know; remove it")

    @property
    def sets(self) -> list[DataSet]:
        """What is trained on: one set, or those that are mixed, with their keys."""
        if isinstance(self.train, str):
            return [DataSet(path=self.train, prompt_key=self.prompt_key, answer_key=self.answer_key)]
        return [
            replace(s, prompt_key=s.prompt_key or self.prompt_key, answer_key=s.answer_key or self.answer_key)
            for s in self.train
        ]

    @property
    def name(self) -> str:
        """What errors call that which is trained on."""
        return " and ".join(s.path for s in self.sets)

    @property
    def paths(self) -> list[tuple[str, str]]:
        """(key, path) of all that is read."""
        named = [("data.train", s.path) for s in self.sets]
        return named if self.eval is None else [*named, ("data.eval", self.eval)]


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
    ready_seconds: PositiveFloat = 300.0
    request_seconds: PositiveFloat = 1800.0
    silent_seconds: PositiveFloat = 60.0  # without an answer about its health: the server counts as frozen
    restarts: NonNegative = 3  # of a server that served before, one after the other, until it counts as lost
    backoff_seconds: NonNegativeFloat = 1.0  # before the first of them, doubled each time
    concurrency: Positive = 64  # requests under way at once
    precision: Literal["fp32", "bf16"] | None = None  # None: as model.precision
    kv_cache_gib: PositiveFloat | None = None  # platform cpu: size of the KV cache; None leaves it to the engine
    extra_args: list[str] = Field(default_factory=list)  # passed to the engine's own command line

    def __post_init__(self) -> None:
        if self.urls is not None and self.rendezvous is not None:
            raise ValueError("urls and rendezvous are two ways to find the same servers; remove one of them")
        for url in self.urls or ():
            if not re.fullmatch(r"https?://[\w.-]+(:\d+)?|https?://\[[0-9a-fA-F:]+\](:\d+)?", url):
                raise ValueError(f"urls: {url!r} is not http(s)://HOST:PORT, which is all that a server's address has")
        if len(set(self.urls or ())) < len(self.urls or ()):
            raise ValueError(f"urls={self.urls} names one twice")

    @property
    def remote(self) -> bool:
        """Whether weights may have to reach another machine."""
        hosts = [urlsplit(url).hostname or "" for url in self.urls or ()]
        return self.rendezvous is not None or any(not _LOOPBACK.fullmatch(host) for host in hosts)


@config
class RolloutConfig:
    """What is sampled each step."""

    engine: Literal["vllm", "sglang"] = "vllm"
    servers: Positive = 1
    min_servers: Positive = 1  # with fewer left the run fails
    attempts: Positive = 3  # to sample a prompt, on other servers where there are some
    # steps by which the weights that sampled a token may be older than those that learn from it; 0: training and sampling take
    # turns; k: rollouts are sampled meanwhile, up to k steps ahead (objective.correction weighs the difference)
    max_staleness: NonNegative = 0
    # responses that are under way when new weights are there; finish: they are waited for; continue: each goes on at once under
    # the new weights, those that oversample leaves over too; restart: their groups are sampled anew
    in_flight: Literal["finish", "continue", "restart"] = "finish"
    # trainer and engine share the devices: while one works, the other has released what it can (`colocation.py`)
    colocate: bool = False
    prompts_per_step: Positive = 64
    samples_per_prompt: Annotated[int, Field(ge=2, strict=True)] = 8  # advantages are relative to the group
    # scales actor, old and rollout log-probs alike; vLLM raises smaller ones to 0.01 without a word
    temperature: Annotated[float, Field(ge=0.01, allow_inf_nan=False)] = 1.0
    max_response_tokens: Positive = 8192
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
        if self.server.remote:
            raise ValueError(
                "colocate=true shares this machine's devices, and server.urls or server.rendezvous name servers that others "
                "started; remove one of them"
            )
        if self.replay is not None or self.only:
            one = "only=true trains nothing" if self.only else f"replay={self.replay} starts no engine"
            raise ValueError(f"colocate=true has trainer and engine take turns, and {one}; remove one of them")


@config
class AnswerTermConfig:
    """1 for the right final answer, 0 for any other: the last \\boxed{}; for answer_line, or a later line `Answer: ...`."""

    type: Literal["math", "answer_line"]
    weight: Weight = 1.0


@config
class FormatTermConfig:
    """1 where the whole response matches the regular expression `pattern` (`.` is a line break, too), else 0."""

    type: Literal["format"]
    pattern: str
    weight: Weight = 1.0

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as e:
            raise ValueError(f"pattern={self.pattern!r} is no regular expression ({e})") from None


@config
class LengthTermConfig:
    """1 for responses of min_tokens to max_tokens; |y| / min_tokens for shorter, max_tokens / |y| for longer ones."""

    type: Literal["length"]
    max_tokens: Positive
    min_tokens: NonNegative = 0
    weight: Weight = 1.0

    def __post_init__(self) -> None:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}; lower it")


@config
class CustomTermConfig:
    """function: path/to/file.py:name of a function (prompt, response, answer) -> float, all texts, run in worker processes."""

    type: Literal["custom"]
    function: str
    weight: Weight = 1.0


@config
class HttpTermConfig:
    """Rewards from a server, one request for each batch (`rewards/remote.py`); without an answer the run fails."""

    type: Literal["http"]
    url: str
    timeout_seconds: PositiveFloat = 60.0
    attempts: Positive = 4
    backoff_seconds: NonNegativeFloat = 1.0  # before the second of them, doubled each time
    key_variable: str | None = None  # the environment variable with the key that goes along as a bearer token
    weight: Weight = 1.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise ValueError(f"url={self.url!r} is not http(s)://HOST[:PORT]/PATH without a password; name one")


AnyTermConfig = AnswerTermConfig | FormatTermConfig | LengthTermConfig | CustomTermConfig | HttpTermConfig
RewardTerm = Annotated[AnyTermConfig, Field(discriminator="type")]


@config
class RewardConfig:
    """How a response is graded, in worker processes, and how that grade is shaped.

    type: of the one term that grades; terms: several, summed up by their weights, instead. Their first is the verdict, by which
    groups are filtered and accuracies counted, without its weight; the others change the reward only.
    """

    type: Literal["math", "answer_line"] = "math"
    terms: list[RewardTerm] | None = None
    workers: Positive = 2  # processes of each term that needs some
    soft_seconds: Positive = 2  # of processor time, then a worker gives an answer up
    hard_seconds: PositiveFloat = 4.0  # of wall time, then it is killed
    memory_mib: Positive = 1024  # address space of a worker
    max_answer_chars: Positive = 512
    # the last tokens before rollout.max_response_tokens, in which a response costs more and more, up to overlong_penalty;
    # 0: never; None: a fifth of rollout.max_response_tokens under objective.overlong_shaping, else 0
    overlong_buffer_tokens: NonNegative | None = None
    overlong_penalty: PositiveFloat = 0.5  # verdicts are 0 and 1; DAPO's 1 stands beside verdicts of -1 and 1

    def __post_init__(self) -> None:
        if self.hard_seconds <= self.soft_seconds:
            raise ValueError(f"hard_seconds={self.hard_seconds} must exceed soft_seconds={self.soft_seconds}")
        if self.terms is None:
            return
        if self.type != "math":
            raise ValueError(f"type={self.type} is not used beside terms; remove it, or write an entry of that type")
        if not self.terms or self.terms[0].type in ("format", "length"):
            raise ValueError(
                "terms: the first entry is the verdict, by which groups are filtered and accuracies counted; let it be math, "
                "answer_line, custom or http"
            )

    @property
    def entries(self) -> list[AnyTermConfig]:
        """`terms`, or the one that `type` names."""
        return self.terms if self.terms is not None else [AnswerTermConfig(type=self.type)]


@config
class ObjectiveConfig:
    """A row of `losses.OBJECTIVES`, and replacements for its parts (None: as the row has it)."""

    name: str = "tepo"
    ratio: str | None = None
    surrogate: str | None = None
    clip_low: NonNegativeFloat | None = None
    clip_high: NonNegativeFloat | None = None
    dual_clip: PositiveFloat | None = None
    aggregate: str | None = None
    advantage: str | None = None
    kl: str | None = None
    kl_mask: str | None = None
    kl_entropy_tolerance: NonNegativeFloat | None = None  # nats: |dH| up to this counts as no change
    beta: NonNegativeFloat | None = None
    ref_kl: str | None = None
    ref_beta: NonNegativeFloat | None = None  # above 0: a penalty towards `model.reference`
    ref_kl_in: str | None = None
    entropy_coefficient: Annotated[float, Field(allow_inf_nan=False)] | None = None
    advantage_alpha: NonNegativeFloat | None = None
    advantage_kappa: PositiveFloat | None = None
    weighting: str | None = None
    cov_share: PositiveFloat | None = None
    cov_low: NonNegativeFloat | None = None
    cov_high: PositiveFloat | None = None
    cov_beta: PositiveFloat | None = None
    steer_lambda_min: PositiveFloat | None = None
    correction: str | None = None  # of the rollout/train mismatch
    correction_low: NonNegativeFloat | None = None
    correction_high: PositiveFloat | None = None
    dynamic_sampling: bool | None = None
    overlong_shaping: bool | None = None


@config
class OptimizerConfig:
    """AdamW as Megatron-Core's distributed optimizer runs it, with linear warm-up to a constant rate."""

    lr: PositiveFloat = 5e-7
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    clip_grad: NonNegativeFloat = 1.0  # 2-norm; 0: never clipped
    warmup_steps: NonNegative = 0  # in training steps (rollout batches), not in updates


@config
class TrainingConfig:
    """steps: rollout batches. Each is split into minibatches of `minibatch_prompts` groups and seen `epochs` times."""

    steps: Positive = 72
    epochs: Positive = 2
    minibatch_prompts: Positive = 16
    max_tokens_per_microbatch: Positive = 16384  # packed tokens of one forward pass, over all context-parallel ranks
    # the same of passes without gradient, which keep no activations (old, reference and noise); None: twice that
    max_tokens_without_grad: Positive | None = None
    # of several updates on a rollout batch. actor: a pass of its own; rollout: what the engine reported, which knows no entropy
    old_logprobs: Literal["actor", "rollout"] = "actor"
    # None: all logits of a microbatch at once. Else the output layer works in chunks of rows, fused with the token statistics,
    # and logits beyond so many MiB are computed again in backward
    logits_budget_mib: NonNegative | None = None

    @property
    def tokens_without_grad(self) -> int:
        """`max_tokens_without_grad`, or its default."""
        return self.max_tokens_without_grad or 2 * self.max_tokens_per_microbatch


@config
class SyncConfig:
    """How weights reach the engine, and how far its log-probs may lie from the actor's.

    transport: `shm`, safetensors files, one per owner of a pipeline stage; `group`, broadcasts to all servers' ranks in process
    groups of their own (gloo on CPU, NCCL on GPUs); `ipc`, flat buckets in the owners' own memory, which servers that this run
    starts on the same machine map (CUDA IPC on GPUs, which must reach each other's memory; an unnamed file in memory on CPU).
    quantize: `fp8`, linear layers of the decoder leave their owner in blockwise e4m3, half the bytes of bf16, and the servers
    hold an FP8 model (what `tools/convert.py export --fp8-blockwise` writes; servers of `rollout.server.urls` must be started
    with that). Its log-probs differ more from the actor's: `max_logprob_diff` is then for you to choose.
    folder: where the files of `shm` lie; None: shared memory, which reaches this machine alone. One that others see is on a
    file system which all ranks and servers share, and of this run alone: what killed runs left there is removed.
    address: of rank 0's machine, at which the groups meet; None: the one on the way to the servers. The port that is open there
    asks for no key.
    delta: with `shm` or `ipc`, only decoder layers (whole ones) and other parameters are sent whose bytes changed since the
    last push; servers that lack it get all. The engine stops sampling before the first of it is written.
    verify_every: then the engine checks each tensor that arrives by its CRC-32, and all servers tell the checksums of what they
    serve: it must be the same on all, and other than before where a tensor is. On CPU vLLM has none of linear layers.
    """

    transport: Literal["shm", "group", "ipc"] = "shm"
    quantize: Literal["none", "fp8"] = "none"
    folder: str | None = None
    bucket_mib: Positive = 512  # of a round, all owners together; shared memory, or the senders, hold two
    address: str | None = None
    delta: bool = False
    timeout_seconds: PositiveFloat = 30.0  # of `group`: for all to meet, and for a round to arrive
    verify_every: NonNegative = 0  # steps between deliveries that are checked at both ends; 0: none
    max_logprob_diff: PositiveFloat = 0.05  # mean |rollout - old| in nats: above it the engine serves other weights


@config
class EvaluationConfig:
    """Accuracy on `data.eval` and on benchmarks, before the first and after the last step, and every `every` steps (0: never
    between). samples, temperature: of `data.eval`; benchmarks have their own (`evaluation/benchmarks.py`).
    """

    every: NonNegative = 0
    samples: Positive = 1
    temperature: NonNegativeFloat = 1.0  # 0: greedy
    max_problems: Positive | None = None  # the first so many of data.eval, and of each benchmark
    benchmarks: list[Benchmark] = Field(default_factory=list)  # each by the paper's protocol
    # holds NAME.jsonl for benchmarks that are not to be fetched from the Hugging Face hub, their rows as there
    benchmark_folder: str | None = None
    benchmark_samples: Positive | None = None  # of those that are sampled; None: 32 as in the paper. The others are greedy
    benchmark_tokens: Positive = PAPER_TOKENS  # of a response at most
    benchmark_prompt: str | None = None  # in the place of the benchmarks' own; <problem> stands for the problem
    # the run ends after so many evaluations in a row without a new highest accuracy (of the benchmarks, else of data.eval)
    patience: Positive | None = None

    def __post_init__(self) -> None:
        if len(set(self.benchmarks)) < len(self.benchmarks):
            raise ValueError(f"benchmarks={self.benchmarks} names one twice")
        if self.benchmark_prompt is not None and self.benchmark_prompt.count("<problem>") != 1:
            raise ValueError(f"benchmark_prompt={self.benchmark_prompt!r} must hold <problem> once, where the problem goes")
        if 0 < self.temperature < 0.01:
            raise ValueError(f"temperature={self.temperature} is raised to 0.01 by vLLM; use 0 (greedy) or at least 0.01")
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(f"samples={self.samples} at temperature=0 would all be the same; use samples=1 or temperature > 0")


@config
class CheckpointConfig:
    """A run can go on from its checkpoints, `checkpoints/` in the run's folder, which all ranks must share.

    every: steps between them; 0: never. keep_last: how many of the newest stay; keep_every: those of steps that it divides stay
    too. asynchronous: training goes on while they are written, from a copy in host memory of what each rank writes. hf: each
    also holds the model as a Hugging Face directory, which training waits for.
    """

    every: NonNegative = 0
    keep_last: Positive = 2
    keep_every: Positive | None = None
    keep_best: bool = False  # that of the step with the highest accuracy (of the benchmarks, else of data.eval) stays too
    asynchronous: bool = True
    hf: bool = False
    timeout_seconds: PositiveFloat = 1800.0  # a checkpoint that takes longer to write, on any rank, has failed


@config
class LoggingConfig:
    """metrics.jsonl and log.txt are always written.

    noise_floor_every: steps between measurements of the rounding noise in dH, each of which repeats the old pass under another
    packing; the first is at step 1; 0: never. memory: record what ranks and servers hold at the end of each phase, as
    rollout.colocate does by itself.
    """

    noise_floor_every: NonNegative = 20
    memory: bool = False
    tensorboard: bool = False
    wandb_project: str | None = None


@config
class Config:
    """One run."""

    name: str
    model: ModelConfig
    data: DataConfig
    platform: Literal["cpu", "cuda"] = "cuda"
    seed: NonNegative = 0
    output: str = "runs"  # the run lives in output/name/
    overwrite: bool = False  # a run of that name is replaced
    resume: bool = False  # a run of that name goes on from its newest checkpoint, or from the start where it has none
    export_hf: bool = True
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    sync: SyncConfig = Field(default_factory=SyncConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.+-]*", self.name):
            raise ValueError(f"name={self.name!r} must be a plain folder name: letters, digits and . _ + -")
        if self.evaluation.every and self.data.eval is None and not self.evaluation.benchmarks:
            raise ValueError(
                f"evaluation.every={self.evaluation.every} needs data.eval or evaluation.benchmarks; give it a file or set "
                "every to 0"
            )
        if self.evaluation.patience is not None and not self.evaluation.every:
            raise ValueError(
                f"evaluation.patience={self.evaluation.patience} counts evaluations between steps, and evaluation.every=0 "
                "makes none; raise that, or remove patience"
            )
        if self.evaluation.patience is not None and self.rollout.max_staleness:
            raise ValueError(
                f"evaluation.patience={self.evaluation.patience} ends the run at the step that is evaluated, and "
                f"rollout.max_staleness={self.rollout.max_staleness} is steps ahead by then; set one of them to its default"
            )
        every = self.checkpoint.every
        if self.checkpoint.keep_best and not (every and self.evaluation.every and self.evaluation.every % every == 0):
            raise ValueError(
                f"checkpoint.keep_best=true needs a checkpoint of every step that is evaluated, and evaluation.every="
                f"{self.evaluation.every} is no multiple of checkpoint.every={every}; make it one, or set keep_best to false"
            )
        if self.training.minibatch_prompts > self.rollout.prompts_per_step:
            raise ValueError(
                f"training.minibatch_prompts={self.training.minibatch_prompts} exceeds "
                f"rollout.prompts_per_step={self.rollout.prompts_per_step}; lower the first or raise the second"
            )
        limit, prompt = self.rollout.max_sequence_tokens, self.data.max_prompt_tokens
        if limit is not None and limit <= prompt:
            raise ValueError(
                f"rollout.max_sequence_tokens={limit} leaves no response after data.max_prompt_tokens={prompt}; raise it or "
                "lower that"
            )
        sequence = self.sequence_tokens
        for key in ("max_tokens_per_microbatch", "max_tokens_without_grad"):
            room = getattr(self.training, key)
            if room is not None and sequence > room:
                raise ValueError(
                    f"training.{key}={room} cannot hold one sequence of "
                    f"{sequence} tokens (data.max_prompt_tokens + rollout.max_response_tokens, or "
                    "rollout.max_sequence_tokens where that is less); raise it to at least that"
                )
        if self.sync.transport == "group" and self.sync.timeout_seconds >= self.rollout.server.silent_seconds:
            raise ValueError(
                f"sync.timeout_seconds={self.sync.timeout_seconds:g} must be below rollout.server.silent_seconds="
                f"{self.rollout.server.silent_seconds:g}: a server that waits for weights may not answer about its health"
            )
        if self.sync.transport == "group" and self.sync.delta:
            raise ValueError(
                "sync.delta=true with sync.transport=group is not built; use sync.transport=shm or ipc, or set it to false"
            )
        self._check_quantize()
        if self.resume and self.overwrite:
            raise ValueError("resume=true and overwrite=true contradict each other; set one of them to false")
        sends = not self.rollout.only and self.rollout.replay is None
        if sends and self.rollout.server.remote and self.sync.transport == "ipc":
            raise ValueError(
                "sync.transport=ipc lends memory of this machine's processes, which servers that others start (rollout.server."
                "urls or rollout.server.rendezvous) may not see; use sync.transport=group, or shm with sync.folder"
            )
        if sends and self.rollout.server.remote and self.sync.transport == "shm" and self.sync.folder is None:
            raise ValueError(
                "sync.folder is not set, and shared memory does not reach servers of other machines; set it to a folder that "
                "the trainer shares with the servers of rollout.server.urls or rollout.server.rendezvous (/dev/shm where they "
                "are on one machine), or use sync.transport=group"
            )
        if self.rollout.only:
            if self.rollout.replay is not None:
                raise ValueError("rollout.only=true samples and rollout.replay does not; remove one of them")
            if self.parallel.world_size > 1:
                raise ValueError(
                    f"rollout.only=true trains nothing: one rank is enough, not {self.parallel.world_size}; set parallel.* to 1"
                )
        if self.model.reference is not None and not self.objective.ref_beta:
            raise ValueError(
                f"model.reference={self.model.reference} is not used; set objective.ref_beta above 0, or remove it"
            )
        if self.platform == "cpu" and self.model.attention == "te":
            raise ValueError("model.attention=te needs platform=cuda; use auto or sdpa")

    def _check_quantize(self) -> None:
        if self.sync.quantize == "none":
            return
        if self.platform == "cpu":
            raise ValueError(
                "sync.quantize=fp8 needs platform=cuda: on CPUs both engines compute blockwise FP8 with AMX alone, which was "
                "not tried; set it to none"
            )
        precision = self.rollout.server.precision or self.model.precision
        if precision != "bf16":
            raise ValueError(
                f"sync.quantize=fp8 needs what is not quantized to be served in bf16, not {precision}; set "
                "rollout.server.precision=bf16, or sync.quantize=none"
            )
        if self.rollout.only:
            raise ValueError(
                "sync.quantize=fp8 has servers wait for their first weights, and rollout.only=true sends none; set it to none"
            )

    @property
    def sequence_tokens(self) -> int:
        """Prompt and response tokens of a sequence at most."""
        most = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        return min(most, self.rollout.max_sequence_tokens or most)

    @property
    def served_tokens(self) -> int:
        """The same of what the servers of the run are asked for, benchmarks included."""
        benchmarks = self.data.max_prompt_tokens + self.evaluation.benchmark_tokens if self.evaluation.benchmarks else 0
        return max(self.sequence_tokens, benchmarks)

    @property
    def run_dir(self) -> Path:
        """output/name."""
        return Path(self.output) / self.name
