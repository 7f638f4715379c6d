"""Configs from YAML files and the command line, with errors that name the key and the mend."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from tepo_megatron.config import Config
from tepo_megatron.errors import ConfigError

_ADAPTER: TypeAdapter[Config] = TypeAdapter(Config)


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a YAML file, apply `--key.sub value` (or `--key.sub=value`) overrides, validate.

    Raises ConfigError naming the key and the mend.
    """
    try:
        tree = yaml.safe_load(Path(path).read_text())
    except OSError as e:
        raise ConfigError(f"{path}: cannot read the config file ({e.strerror}); give the path of a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as e:
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
        try:
            pairs.append((key, yaml.safe_load(text)))
        except yaml.YAMLError:
            raise ConfigError(f"--{key}: {text!r} is not a YAML value; quote it") from None
    return pairs


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
    given = "" if isinstance(error["input"], dict) or "Args" in type(error["input"]).__name__ else f" (got {error['input']!r})"
    return f"{key}: {message}{given}"


def _fields_at(loc: tuple[Any, ...]) -> list[str]:
    """The keys of the section at `loc`."""
    cls: Any = Config
    for part in loc:
        cls = typing.get_type_hints(cls).get(str(part))
    return [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
