"""The errors a user can meet. Each names the key, file, rank or parameter, and the mend.

Every class is also a standard Python type, so callers need not know this package to catch it.
"""


class TepoError(Exception):
    """Base of all errors of this package: shown to the user as one message, without a traceback."""


class ConfigError(TepoError, ValueError):
    """A key is unknown, out of range, or contradicts another one."""


class ConversionError(TepoError, ValueError):
    """Hugging Face and Megatron weights or configs do not map onto each other."""


class CheckpointError(TepoError, OSError):
    """A checkpoint is missing, truncated, corrupt or cannot be written."""


class StorageError(TepoError, OSError):
    """A file of a run cannot be written: its disk is full, read-only or broken."""


class RunReplacedError(TepoError, RuntimeError):
    """The folder of a run was removed, moved or replaced while the run was under way."""


class DataError(TepoError, ValueError):
    """A dataset is missing, empty or malformed."""


class RewardError(TepoError, RuntimeError):
    """The grader itself cannot work (a single bad answer is never an error: it is a status)."""


class RolloutError(TepoError, RuntimeError):
    """An inference server cannot start, died, or answered with an error."""


class SyncError(TepoError, RuntimeError):
    """The weights that the engine serves are not those that the actor sent."""


class NumericalError(TepoError, ArithmeticError):
    """A loss or a gradient norm is not finite."""
