"""Find the environment of SGLang's servers, which is not this process's: its pins conflict with vLLM's."""

import functools
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from tepo_megatron.config import ServerConfig
from tepo_megatron.errors import ConfigError

ENVIRONMENT = ".venv-sglang"  # next to this environment; `make sglang` makes it


@functools.cache
def default_python() -> Path:
    """Return the Python of SGLang's servers where rollout.server.python is not set; the file may be missing."""
    if find_spec("sglang") is not None:
        return Path(sys.executable)
    return Path(sys.prefix).with_name(ENVIRONMENT) / "bin" / "python"


def server_python(cfg: ServerConfig) -> Path:
    """Return the Python of SGLang's servers. Raises ConfigError if it is missing."""
    python = Path(shutil.which(cfg.python) or cfg.python) if cfg.python else default_python()
    if not python.is_file():
        raise ConfigError(
            f"rollout.engine=sglang: no Python with SGLang at {python}; run `make sglang`, or give rollout.server.python "
            "that of an environment with SGLang and this package"
        )
    return python
