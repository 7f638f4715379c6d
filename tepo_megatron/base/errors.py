"""Errors that a user can meet, and foreign text made safe to print.

Each message names the key, file, rank or parameter, and the fix. Every class also derives from a standard Python exception, so
callers can catch it without importing this package. The output of a server, a model or a dataset must not control the terminal.
"""

import unicodedata


class TepoError(Exception):
    """Base class of all errors of this package. The user sees the message alone, without a traceback."""


class ConfigError(TepoError, ValueError):
    """A key is unknown, out of range, or contradicts another one."""


class ConversionError(TepoError, ValueError):
    """Hugging Face and Megatron weights or configs do not map onto each other."""


class CheckpointError(TepoError, OSError):
    """A checkpoint is missing, truncated, corrupt or cannot be written."""


class StorageError(TepoError, OSError):
    """A file of a run cannot be written: the disk is full, read-only or broken."""


class RunReplacedError(TepoError, RuntimeError):
    """A run's folder was removed, moved or replaced during the run."""


class DataError(TepoError, ValueError):
    """A dataset is missing, empty or malformed."""


class RewardError(TepoError, RuntimeError):
    """The grader itself cannot work. A single bad answer is never an error; it is a status."""


class RolloutError(TepoError, RuntimeError):
    """An inference server cannot start, died, or answered with an error."""


class SyncError(TepoError, RuntimeError):
    """The engine does not serve the weights that the actor sent."""


class RunStopped(TepoError, RuntimeError):
    """A run was asked to end and ended, with all its work saved. `tepo train` exits with status 75 (EX_TEMPFAIL)."""


class LostRanks(TepoError, RuntimeError):
    """Ranks of other machines did not come back after all ranks had to be restarted."""


class NumericalError(TepoError, ArithmeticError):
    """A loss or a gradient norm is not finite."""


# Control and format characters (bidirectional overrides, zero-width), lone surrogates, line and paragraph separators.
_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_KEPT = frozenset("\n\t")


def escaped(text: str) -> str:
    r"""Return `text` with every control character except line break and tab as \xNN, \uNNNN or \UNNNNNNNN."""
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(_shown(character) for character in text)


def excerpt(text: str, limit: int = 200) -> str:
    """Return the beginning of `text`, on one line and escaped, for a message."""
    line = escaped(" ".join(text[: 4 * limit].split()))
    return line if len(line) <= limit and len(text) <= 4 * limit else line[:limit] + "..."


def _shown(character: str) -> str:
    if character in _KEPT or unicodedata.category(character) not in _UNSAFE:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
