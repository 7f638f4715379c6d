"""Check the fields of `megatron.*` against the installed Megatron-Core, and turn their values into what its configs take.

A name that Megatron-Core does not have, and a value of another type, are refused before any process is started. Megatron is
imported only if a config passes such fields.
"""

import dataclasses
import difflib
import enum
import types
import typing
from typing import Any, Literal

import torch

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.config import MegatronConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}  # uint8: Megatron's FP8
_SECTIONS = ("transformer", "ddp", "optimizer")
_UNREADABLE = object()


def check_passed_fields(megatron: MegatronConfig) -> None:
    """Raise ConfigError for a field that the installed Megatron-Core does not have, or for a value of another type."""
    for section in _SECTIONS:
        passed_fields(megatron, section)


def passed_fields(megatron: MegatronConfig, section: str) -> dict[str, Any]:
    """Return the fields of a section that the project does not check itself, as Megatron's config takes them."""
    if not (values := megatron.passed(section)):
        return {}
    cls = _megatron_class(section)
    fields, hints = {f.name: f for f in dataclasses.fields(cls) if f.init}, typing.get_type_hints(cls)
    passed = {}
    for name, value in values.items():
        key = f"megatron.{section}.{name}"
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            hint = f"did you mean {close[0]}?" if close else f"see its class {cls.__name__} for all fields"
            raise ConfigError(f"{key}: the installed Megatron-Core has no such field; {hint}")
        if _describe(hints[name]) == "":
            raise ConfigError(f"{key}: it needs an object, which a config cannot hold; remove it")
        passed[name] = None if value is None and fields[name].default is None else _read(value, hints[name])
        if passed[name] is _UNREADABLE:
            raise ConfigError(f"{key}={value!r}: it must be {_describe(hints[name])}")
    return passed


def _megatron_class(section: str) -> type:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    return {"transformer": TransformerConfig, "ddp": DistributedDataParallelConfig, "optimizer": OptimizerConfig}[section]


def _read(value: Any, hint: Any) -> Any:
    """Return a value of YAML as a value of this type; `_UNREADABLE` if it is not one."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        readings = (_read(value, arm) for arm in args)
        return next((read for read in readings if read is not _UNREADABLE), _UNREADABLE)
    if origin is Literal:
        return value if value in args else _UNREADABLE
    if origin in (list, tuple) and isinstance(value, list):
        read = [_read(item, args[0] if args else Any) for item in value]
        return _UNREADABLE if any(item is _UNREADABLE for item in read) else origin(read)
    if origin is dict or hint is dict:
        return value if isinstance(value, dict) else _UNREADABLE
    if hint is torch.dtype:
        return DTYPES.get(value, _UNREADABLE) if isinstance(value, str) else _UNREADABLE
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint[value] if isinstance(value, str) and value in hint.__members__ else _UNREADABLE
    if hint is float:
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else _UNREADABLE
    if hint in (bool, int, str, list, type(None)):
        return value if type(value) is hint else _UNREADABLE
    return value if hint is Any else _UNREADABLE


def _describe(hint: Any) -> str:
    """Return in words what YAML can write for a type; "" if nothing."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        arms = [_describe(arm) for arm in args if arm is not type(None)]
        return " or ".join(filter(None, arms)) + " or null" * (type(None) in args) if any(arms) else ""
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if hint is torch.dtype:
        return "one of " + ", ".join(DTYPES)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "one of " + ", ".join(hint.__members__)
    if origin in (list, tuple) or hint is list:
        return "a list"
    if origin is dict or hint is dict:
        return "a mapping"
    return {bool: "true or false", int: "an integer", float: "a number", str: "a text", Any: "a value"}.get(hint, "")
