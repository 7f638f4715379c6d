"""The one config tree. Every default and every check across fields lives here.

A config is a YAML file; `--rollout.temperature 0.8` on the command line replaces one leaf. Unknown keys are refused with
the nearest known name; what depends on the model (does tp divide its heads?) is checked in `actor/build.py`, and what
depends on the table of objectives in `losses/`, both before any process is started.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from tepo_megatron.errors import ConfigError


@typing.dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
def config(cls: type[T]) -> type[T]:
    """A section of the config: keyword-only, frozen, validated, unknown keys refused."""
    return typing.cast(type[T], dataclass(config=ConfigDict(extra="forbid"), kw_only=True, frozen=True)(cls))


T = typing.TypeVar("T")

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]


@config
class ModelConfig:
    """path: a Hugging Face directory (config.json, safetensors, tokenizer)."""

    path: str
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
    timeout_seconds: PositiveFloat = 3600.0  # a collective that waits longer fails; ranks also wait out the rollout in one

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


@config
class DataConfig:
    """train, eval: JSON-lines files. prompt_key: a string, or a list of chat messages (then the chat template applies)."""

    train: str
    eval: str | None = None
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    max_prompt_tokens: Positive = 2048  # longer prompts are dropped and counted
    shuffle: bool = True


@config
class ServerConfig:
    """The inference server that the run starts, watches and stops (loopback only)."""

    port: Annotated[int, Field(ge=0, le=65535)] = 0  # 0: any free port
    ready_seconds: PositiveFloat = 300.0
    request_seconds: PositiveFloat = 1800.0
    concurrency: Positive = 64  # requests under way at once
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    kv_cache_gib: PositiveFloat | None = (
        None  # platform cpu: size of the KV cache; None leaves it to the engine
    )
    extra_args: list[str] = Field(default_factory=list)  # passed to the engine's own command line


@config
class RolloutConfig:
    """What is sampled each step."""

    engine: Literal["vllm"] = "vllm"
    prompts_per_step: Positive = 64
    samples_per_prompt: Positive = 8
    temperature: PositiveFloat = 1.0  # scales actor, old and rollout log-probs alike
    max_response_tokens: Positive = 8192
    filter_uniform_groups: bool = True  # drop groups that are all right or all wrong (unshaped score)
    max_refills: NonNegative = 0  # further rounds of prompts when dropped groups left too few
    server: ServerConfig = Field(default_factory=ServerConfig)


@config
class RewardConfig:
    """How an answer is graded: last \\boxed{}, math-verify in worker processes."""

    type: Literal["math"] = "math"
    workers: Positive = 2
    soft_seconds: Positive = 2  # math-verify's own alarm
    hard_seconds: PositiveFloat = 4.0  # then the worker is killed
    memory_mib: Positive = 1024  # address space of a worker
    max_answer_chars: Positive = 512

    def __post_init__(self) -> None:
        if self.hard_seconds <= self.soft_seconds:
            raise ValueError(f"hard_seconds={self.hard_seconds} must exceed soft_seconds={self.soft_seconds}")


@config
class AdvantageConfig:
    """baseline: group mean; scale: divide by the group's standard deviation (ddof 1) or not."""

    scale: Literal["std", "none"] = "std"


@config
class ObjectiveConfig:
    """A row of `losses.OBJECTIVES`, and replacements for its parts (None: as the row has it)."""

    name: str = "tepo"
    ratio: str | None = None
    surrogate: str | None = None
    clip_low: NonNegativeFloat | None = None
    clip_high: NonNegativeFloat | None = None
    aggregate: str | None = None
    kl: str | None = None
    kl_mask: str | None = None
    kl_entropy_tolerance: NonNegativeFloat | None = None  # nats: |dH| up to this counts as no change
    beta: NonNegativeFloat | None = None


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
    epochs: Positive = 1
    minibatch_prompts: Positive = 16
    max_tokens_per_microbatch: Positive = (
        16384  # packed tokens of one forward pass, over all context-parallel ranks
    )


@config
class SyncConfig:
    """How weights reach the engine, and how far its log-probs may lie from the actor's."""

    transport: Literal["shm"] = "shm"  # safetensors files in shared memory, one per owner of a pipeline stage
    bucket_mib: Positive = 512
    max_logprob_diff: PositiveFloat = (
        0.05  # mean |rollout - old| in nats: above it the engine serves other weights
    )


@config
class EvaluationConfig:
    """Accuracy on `data.eval`, before the first and after the last step, and every `every` steps (0: never between)."""

    every: NonNegative = 0
    samples: Positive = 1
    temperature: NonNegativeFloat = 1.0  # 0: greedy
    max_problems: Positive | None = None

    def __post_init__(self) -> None:
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(f"samples={self.samples} at temperature=0 would all be the same; use samples=1 or temperature > 0")


@config
class LoggingConfig:
    """metrics.jsonl and log.txt are always written."""

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
    export_hf: bool = True
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    sync: SyncConfig = Field(default_factory=SyncConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise ValueError(f"name={self.name!r} must be a plain folder name")
        if self.training.minibatch_prompts > self.rollout.prompts_per_step:
            raise ValueError(
                f"training.minibatch_prompts={self.training.minibatch_prompts} exceeds "
                f"rollout.prompts_per_step={self.rollout.prompts_per_step}; lower the first or raise the second"
            )
        longest = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        if longest > self.training.max_tokens_per_microbatch:
            raise ValueError(
                f"training.max_tokens_per_microbatch={self.training.max_tokens_per_microbatch} cannot hold one sequence of "
                f"data.max_prompt_tokens + rollout.max_response_tokens = {longest} tokens; raise it to at least that"
            )
        if self.rollout.filter_uniform_groups and self.rollout.samples_per_prompt == 1:
            raise ValueError(
                "rollout.samples_per_prompt=1 makes every group uniform, so rollout.filter_uniform_groups=true would drop "
                "them all; raise the first or set the second to false"
            )
        if self.platform == "cpu" and self.model.attention == "te":
            raise ValueError("model.attention=te needs platform=cuda; use auto or sdpa")
        if self.advantage.scale == "std" and self.rollout.samples_per_prompt == 1:
            raise ValueError(
                "advantage.scale=std needs rollout.samples_per_prompt >= 2 (the deviation of one sample is undefined); "
                "raise it or use advantage.scale=none"
            )

    @property
    def run_dir(self) -> Path:
        """output/name."""
        return Path(self.output) / self.name


_ADAPTER: TypeAdapter[Config] = TypeAdapter(Config)


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a YAML file, apply `--key.sub value` (or `--key.sub=value`) overrides, validate.

    Raises ConfigError naming the key and the mend.
    """
    try:
        tree = yaml.safe_load(Path(path).read_text())
    except OSError as e:
        raise ConfigError(
            f"{path}: cannot read the config file ({e.strerror}); give the path of a YAML file"
        ) from None
    except yaml.YAMLError as e:
        raise ConfigError(f"{path}: not valid YAML: {e}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a config is a mapping of keys, not {type(tree).__name__}")
    for key, value in parse_overrides(overrides or []):
        _set(tree, key, value)
    return validate(tree, source=str(path))


def validate(tree: dict[str, Any], source: str = "config") -> Config:
    """A plain mapping as a Config, or one ConfigError with a line per fault."""
    try:
        return _ADAPTER.validate_python(tree)
    except ValidationError as e:
        lines = [f"{source}: {_explain(tuple(err['loc']), err)}" for err in e.errors()]
        raise ConfigError("\n".join(lines)) from None


def to_yaml(cfg: Config) -> str:
    """The resolved config, loadable by `load_config`."""
    return yaml.safe_dump(_ADAPTER.dump_python(cfg, mode="json"), sort_keys=False)


def parse_overrides(words: list[str]) -> list[tuple[str, Any]]:
    """["--a.b", "1", "--c=x"] -> [("a.b", 1), ("c", "x")]; values are read as YAML."""
    pairs: list[tuple[str, Any]] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"{word}: expected --key value (or --key=value)")
        key, has_value, text = word[2:].partition("=")
        if not has_value:
            if not rest:
                raise ConfigError(f"--{key}: the value is missing")
            text = rest.pop(0)
        pairs.append((key, _scalar(text)))
    return pairs


def _scalar(text: str) -> Any:
    """YAML's reading of a value, and 1e-5 as the number that every user means."""
    value = yaml.safe_load(text)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            pass
    return value


def _set(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, leaf = dotted.split(".")
    for name in parents:
        child = tree.get(name)
        if child is None:
            child = tree[name] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"--{dotted}: {name} is a value, not a section")
        tree = child
    tree[leaf] = value


def _explain(loc: tuple[Any, ...], error: Any) -> str:
    key = ".".join(str(part) for part in loc) or "config"
    if error["type"] == "unexpected_keyword_argument":
        close = difflib.get_close_matches(str(loc[-1]), _fields_at(loc[:-1]), n=1)
        return f"{key}: unknown key" + (
            f"; did you mean {close[0]}?" if close else "; see tepo_megatron/config.py for all keys"
        )
    if error["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return f"{key}: this key is required"
    message = error["msg"].removeprefix("Value error, ")
    given = (
        ""
        if isinstance(error["input"], dict) or "Args" in type(error["input"]).__name__
        else f" (got {error['input']!r})"
    )
    return f"{key}: {message}{given}"


def _fields_at(loc: tuple[Any, ...]) -> list[str]:
    """The keys of the section at `loc`."""
    cls: Any = Config
    for part in loc:
        cls = typing.get_type_hints(cls).get(str(part))
    return [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
