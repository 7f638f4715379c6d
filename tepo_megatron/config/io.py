"""Read configs from YAML files and the command line. Errors name the key and the fix."""

import dataclasses
import difflib
import os
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.config import Config
from tepo_megatron.config.layers import Layers
from tepo_megatron.config.yaml_text import parse

T = typing.TypeVar("T")
_ADAPTER: TypeAdapter[Config] = TypeAdapter(Config)
_HOME = re.compile(r"~[\w.-]*(/|$)")
_CANARIES = "sync.max_logprob_diff compares every token, and sync.verify_every: 1 compares checksums; remove the key"
_JUDGE = "serve the judge by yourself, such as with `vllm serve`, and set its url; remove the key"
_SCHEDULER = "under another scheduler than Slurm start tepo on each machine (docs/launch.md)"
# removed key, or key=value -> what to use instead; the last two are sections of a cluster's profile
REMOVED: Mapping[str, str] = {
    "sync.canaries": _CANARIES,
    "sync.canary_every": _CANARIES,
    "sync.delta=elements": "set sync.delta: layers",
    "sync.transport.slices": "every rank of a server receives whole tensors; remove the key",
    "parallel.min_dp": "end the run, and go on with tepo resume RUN --parallel.dp N; remove the key",
    "reward.terms.judge.server": _JUDGE,
    "reward.terms.judge.servers": _JUDGE,
    "reward.terms.judge.min_servers": _JUDGE,
    "reward.terms.judge.engine": _JUDGE,
    "reward.terms.judge.max_prompt_tokens": "the judge's server refuses what it cannot read; remove the key",
    "model.precision=fp8-delayed": "its scales were lost with the process; set fp8-blockwise, on a B200 fp8-current",
    "kuberay": _SCHEDULER,
    "skypilot": _SCHEDULER,
}
# names of other trainers -> keys that mean the same
SYNONYMS: Mapping[str, str] = {
    "learning_rate": "optimizer.lr",
    "warmup": "optimizer.warmup_steps",
    "num_warmup_steps": "optimizer.warmup_steps",
    "weight_decay": "megatron.optimizer.weight_decay",
    "max_grad_norm": "megatron.optimizer.clip_grad",
    "grad_clip": "megatron.optimizer.clip_grad",
    "clip_grad": "megatron.optimizer.clip_grad",
    "adam_beta1": "megatron.optimizer.adam_beta1",
    "adam_beta2": "megatron.optimizer.adam_beta2",
    "max_steps": "training.steps",
    "num_train_epochs": "sft.epochs, or for RL training.steps",
    "mini_batch_size": "training.minibatch_prompts",
    "ppo_mini_batch_size": "training.minibatch_prompts",
    "ppo_epochs": "training.epochs",
    "gradient_checkpointing": "training.recompute",
    "train_batch_size": "rollout.prompts_per_step, or for tepo sft sft.batch_sequences",
    "batch_size": "rollout.prompts_per_step, or for tepo sft sft.batch_sequences",
    "num_generations": "rollout.samples_per_prompt",
    "n_samples_per_prompt": "rollout.samples_per_prompt",
    "max_new_tokens": "rollout.max_response_tokens",
    "max_completion_length": "rollout.max_response_tokens",
    "max_response_length": "rollout.max_response_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_seq_length": "sft.max_tokens",
    "kl_coef": "objective.beta",
    "eps": "objective.clip_low and objective.clip_high",
    "clip_eps": "objective.clip_low and objective.clip_high",
    "tensor_model_parallel_size": "parallel.tp",
    "tensor_parallel": "parallel.tp",
    "pipeline_model_parallel_size": "parallel.pp",
    "context_parallel_size": "parallel.cp",
    "save_steps": "checkpoint.every",
    "save_interval": "checkpoint.every",
}


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a YAML file on top of its base files, apply the overrides and validate the result. Raises ConfigError: the message
    names the file that set the key, the key and the fix.
    """
    return load_with_sources(path, overrides or [])[0]


def load_with_sources(path: str | Path, overrides: list[str]) -> tuple[Config, Layers]:
    """Return the config as `load_config` does, and the layers, which know the file that set each key."""
    layers = read_layers(path)
    return with_overrides(layers, overrides, str(path)), layers


def with_overrides(layers: Layers, overrides: list[str], source: str) -> Config:
    """Return the config of these layers with the command line's overrides on top. Raises ConfigError as `load_config` does."""
    for key, value in parse_overrides(overrides):
        words: dict[str, Any] = {}
        set_key(words, key, value)
        layers.add(words, "command line")
    return validate_as(Config, layers.tree, source, layers)


def read_layers(path: str | Path) -> Layers:
    """Read a config file, the file that its `base:` names, the base of that one, and so on; return their layers.

    A `base` is a path relative to the file that names it. Raises ConfigError for an unreadable file, a `base` that is not a
    path, and base files that form a circle.
    """
    trees: list[tuple[str, dict[str, Any]]] = []
    while True:
        names = [name for name, _ in trees]
        if any(os.path.realpath(path) == os.path.realpath(name) for name in names):
            chain = " -> ".join([*names, str(path)])
            raise ConfigError(f"{names[0]}: its base files form a circle: {chain}; remove one `base`")
        try:
            tree = read_yaml(path)
        except ConfigError as e:
            raise ConfigError(f"{e} (the base of {names[-1]})" if names else str(e)) from None
        trees.append((str(path), tree))
        if "base" not in tree:
            break
        base = tree.pop("base")
        if not isinstance(base, str):
            raise ConfigError(f"{path}: base: one path of a YAML file, not {base!r}; let that file name the next")
        path = os.path.normpath(Path(path).parent / base)
    layers = Layers()
    for name, tree in reversed(trees):
        layers.add(tree, name)
    return layers


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raises ConfigError naming the file."""
    try:
        tree = parse(Path(path).read_text())
    except OSError as e:
        raise ConfigError(f"{path}: cannot read the config file ({e.strerror}); give the path of a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: not valid YAML: {e}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a config is a mapping of keys, not {type(tree).__name__}")
    return tree


def validate(tree: dict[str, Any], source: str = "config") -> Config:
    """Return a plain mapping as a Config. Raises one ConfigError with a line per fault."""
    return validate_as(Config, tree, source)


def validate_as(cls: type[T], tree: dict[str, Any], source: str, layers: Layers | None = None) -> T:
    """Return a plain mapping as a dataclass of `config`. Raises ConfigError: one line per fault."""
    if layers is None and cls is Config:
        layers = Layers()
        layers.add(tree, source)
        tree = layers.tree
    if cls is Config and (homes := [f"{source}: {key}={text}" for key, text in texts_of(tree) if _HOME.match(text)]):
        raise ConfigError("\n".join(f"{home}: no shell replaces ~ there; write the whole path" for home in homes))
    try:
        return TypeAdapter(cls).validate_python(tree)
    except ValidationError as e:
        lines = []
        for err in e.errors():
            loc = tuple(part for part in err["loc"] if not str(part).startswith("<"))  # tags of variants are no keys
            where = ", ".join(layers.sources(loc, err["msg"]) if layers else ()) or source
            lines.append(f"{where}: {_explain(cls, err)}")
        raise ConfigError("\n".join(lines)) from None


def texts_of(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, text) of every text in a tree of mappings and lists."""
    if isinstance(tree, str):
        yield key, tree
    for name, value in tree.items() if isinstance(tree, Mapping) else ():
        yield from texts_of(value, f"{key}.{name}" if key else str(name))
    for value in tree if isinstance(tree, list) else ():
        yield from texts_of(value, key)


def to_yaml(cfg: Config) -> str:
    """Return the resolved config as YAML that `load_config` reads."""
    return yaml.safe_dump(plain(cfg), sort_keys=False)


def plain(cfg: Config) -> dict[str, Any]:
    """Return the resolved config as plain JSON values."""
    return typing.cast(dict[str, Any], _ADAPTER.dump_python(cfg, mode="json"))


def resolved_today(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a plain config of an earlier version with the defaults of keys that it lacks; as it is if it is refused today."""
    try:
        return plain(validate(dict(tree)))
    except ConfigError:
        return tree


def differences(before: Mapping[str, Any], after: Mapping[str, Any], above: str = "") -> list[str]:
    """Return a line for each key on which two plain configs differ: "optimizer.lr was 1e-06 and is 2e-06"."""
    lines = []
    for name in [*before, *(n for n in after if n not in before)]:
        key, old, new = f"{above}{name}", before.get(name), after.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += differences(old, new, f"{key}.")
        elif old != new:
            lines.append(f"{key} was {old} and is {new}")
    return lines


def parse_overrides(words: list[str]) -> list[tuple[str, Any]]:
    """Parse ["--a.b", "1", "--c=x"] into [("a.b", 1), ("c", "x")]; values are read as YAML. Raises ConfigError."""
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
        try:
            pairs.append((key, parse(text)))
        except yaml.YAMLError as e:
            raise ConfigError(f"--{key}: {text!r} is not a YAML value ({' '.join(str(e).split())}); quote it") from None
    return pairs


def set_key(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set tree[a][b] = value for "a.b"; missing sections are added. Raises ConfigError if `a` is a value, not a section."""
    *parents, leaf = dotted.split(".")
    for name in parents:
        child = tree.get(name)
        if child is None:
            child = tree[name] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"--{dotted}: {name} is a value, not a section")
        tree = child
    tree[leaf] = value


def faults(error: ValueError, key: str) -> list[str]:
    """Return one line for each fault of a section that was read by itself."""
    if not isinstance(error, ValidationError):
        return [f"{key}: {error}"]
    return [_explain(object, {**err, "loc": (key, *err["loc"])}) for err in error.errors()]


def _explain(root: type, error: Any) -> str:
    """Return one validation error as a line that names the key and the fix."""
    loc = tuple(error["loc"])
    key = ".".join(str(part) for part in loc if not str(part).startswith("<")) or "config"
    unknown = error["type"] == "unexpected_keyword_argument"
    value = "" if unknown else f"={error['input']}"
    of_any = ".".join(part for part in key.split(".") if not part.isdecimal())  # the table has no indices of lists
    if use := REMOVED.get(of_any + value):
        return f"{key}{value} was removed: {use}; see CHANGELOG.md"
    if unknown:
        return f"{key}: {_unknown_key(root, loc)}"
    if error["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return f"{key}: this key is required"
    if error["type"] == "union_tag_not_found":
        return f"{key}: the key `type` is required"
    if error["type"] == "union_tag_invalid":
        tag, tags = error["ctx"]["tag"], [tag.strip("' ") for tag in error["ctx"]["expected_tags"].split(",")]
        close = difflib.get_close_matches(tag, tags, n=1)
        return f"{key}: no type is called {tag}; " + (f"did you mean {close[0]}?" if close else f"one of {', '.join(tags)}")
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "list_type":
        message = "a list is expected; put [ ] around it"
    elif error["type"].startswith(("int", "float")) and re.fullmatch(r"[\d.]+[A-Za-z]+", str(error["input"])):
        message += ", without a unit"
    got = "" if isinstance(error["input"], dict) or "Args" in type(error["input"]).__name__ else f" (got {error['input']!r})"
    return f"{key}: {message}{got}"


def _unknown_key(root: type, loc: tuple[Any, ...]) -> str:
    """Return what is wrong with a key that its section does not have, and the fix."""
    name, (cls, variants) = str(loc[-1]), _section_at(root, loc[:-1])
    having = [x for x in variants if name in _names(x)]
    if having and (reason := getattr(cls, "NOT_FOR", None)):
        return f"{reason}; remove it"
    if having and cls is not None:
        mine, theirs = (typing.get_args(typing.get_type_hints(x)["type"])[0] for x in (cls, having[0]))
        return f"only type {theirs} has this key, and the type is {mine}; remove it"
    if same := SYNONYMS.get(name):
        return f"unknown key; did you mean {same}?"
    if close := difflib.get_close_matches(name, _names(cls), n=1):
        return f"unknown key; did you mean {close[0]}?"
    if elsewhere := _keys_named(root, name):
        return f"unknown key; did you mean {' or '.join(elsewhere)}?"
    section = ".".join(str(part) for part in loc[:-1] if not str(part).startswith("<")) or "a config"
    return f"unknown key; {section} has: {', '.join(_names(cls))}"


def _section_at(root: type, loc: tuple[Any, ...]) -> tuple[type | None, list[type]]:
    """Return the class of the section at `loc`, and the other variants that the section could be."""
    cls: Any = root
    variants: list[type] = []
    for part in loc:
        if isinstance(part, str) and part.startswith("<"):  # the tag of a variant: the name of its class
            variants = _sections_in(cls)
            cls = next((x for x in variants if x.__name__ == part[1:-1]), cls)
            continue
        variants = []
        if dataclasses.is_dataclass(cls):
            cls = typing.get_type_hints(cls).get(str(part))
            if type(None) in typing.get_args(cls) and len(inner := _sections_in(cls)) == 1 and inner[0] in typing.get_args(cls):
                cls = inner[0]  # a section that may be missing
        elif isinstance(part, str):  # in a list of sections of several types: select this section's type
            cls = next((x for x in _sections_in(cls) if part in typing.get_args(typing.get_type_hints(x)["type"])), None)
        else:  # an index into a list
            lists = [hint for hint in (cls, *typing.get_args(cls)) if typing.get_origin(hint) is list]
            cls = typing.get_args(lists[0])[0] if lists else cls
    return (cls if isinstance(cls, type) and dataclasses.is_dataclass(cls) else None), [x for x in variants if x is not cls]


def _names(cls: type | None) -> list[str]:
    """Return the keys of a section; none without a section."""
    return [f.name for f in dataclasses.fields(cls)] if cls is not None and dataclasses.is_dataclass(cls) else []


def _keys_named(root: type, name: str) -> list[str]:
    """Return the dotted keys of that name in the sections of `root`; none if there are more than three."""
    keys: list[str] = []
    for section in _names(root):
        inner = _sections_in(typing.get_type_hints(root)[section])
        keys += [f"{section}.{name}"] if any(name in _names(cls) for cls in inner) else []
    return keys if len(keys) <= 3 else []


def _sections_in(hint: Any) -> list[type]:
    inner = [section for arg in typing.get_args(hint) for section in _sections_in(arg)]
    return [hint] if dataclasses.is_dataclass(hint) and isinstance(hint, type) else inner
