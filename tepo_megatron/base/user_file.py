"""Load functions from the user's own files, named "path/to/file.py:name" in a config. This module imports nothing heavy."""

import contextlib
import importlib.util
import inspect
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.base.processes import without_proxy


@dataclass(frozen=True)
class UserFunction:
    """An object loaded from a user's file."""

    file: Path
    name: str
    value: Any
    code: CodeType

    def again(self) -> Any:
        """Run the file once more, as it was when it was loaded, and return the object of the new module."""
        return getattr(_module(self.file, self.code), self.name)


def load(spec: str, key: str, kind: str = "a function") -> UserFunction:
    """Run a user's file and return the object that "path/to/file.py:name" names.

    From then on, clients in this process and its children reach servers of this machine without the environment's proxy. Raises
    ConfigError if the object cannot be loaded; the message names `key`, the reason and the fix.
    """
    os.environ.update(without_proxy(os.environ))  # a client may be made at the top of the file
    key = f"{key}={spec}"
    path, colon, name = spec.rpartition(":")
    if not colon or not path.endswith(".py") or not name.isidentifier():
        raise ConfigError(f"{key}: not of the form path/to/file.py:name")
    file = Path(path).resolve()
    if not file.is_file():
        raise ConfigError(f"{key}: there is no file {file}; a path is relative to the folder that the run is started in")
    code, module = _run(file, key)
    value = getattr(module, name, None)
    if value is None:
        raise ConfigError(f"{key}: {path} defines no {name}; name {kind} of it")
    return UserFunction(file, name, value, code)


def takes(function: Any, name: str) -> bool:
    """Return whether the function has a parameter of this name."""
    with contextlib.suppress(TypeError, ValueError):  # it has no signature
        return name in inspect.signature(function).parameters
    return False


def check_takes(function: UserFunction, key: str, arguments: int, what: str, *named: str) -> None:
    """Raise ConfigError unless the function accepts this number of positional arguments, and those named."""
    try:
        inspect.signature(function.value).bind(*(object() for _ in range(arguments)), **dict.fromkeys(named))
    except TypeError as e:
        raise ConfigError(f"{key}: {function.name} must take {what} and nothing else ({e}); give the rest defaults") from None


def describe_error(error: BaseException, file: Path) -> str:
    """Return an error as text, with the source line where it arose."""
    frames = traceback.extract_tb(error.__traceback__)
    line = next((frame for frame in reversed(frames) if frame.filename == str(file)), frames[-1] if frames else None)
    where = "" if line is None else f" at {line.filename}:{line.lineno}"
    return f"{type(error).__name__}: {error}{where}"


def _run(file: Path, key: str) -> tuple[CodeType, ModuleType]:
    try:
        code = compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
        return code, _module(file, code)
    except (Exception, SystemExit) as e:
        raise ConfigError(
            f"{key}: {file} cannot be imported ({describe_error(e, file)}); fix it, or put the folder of "
            "the modules that it imports on PYTHONPATH"
        ) from e


def _module(file: Path, code: CodeType) -> ModuleType:
    name = f"user_file_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, "a file that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    try:
        exec(code, module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module
