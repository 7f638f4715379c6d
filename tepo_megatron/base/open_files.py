"""The limit on the number of files, pipes and connections that this process may have open at once."""

import resource
import sys

WANTED = 65_536  # as vLLM and SGLang ask for; programs that close all possible files are slow under much higher limits
SPARE_FILES = 64  # for whatever else a process opens while requests are in flight


def open_file_limit() -> int:
    """Return the soft limit; sys.maxsize if there is none."""
    return _number(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def raise_open_file_limit(wanted: int = WANTED) -> int:
    """Raise the soft limit to `wanted`, or to the hard limit if that is lower. Children of this process inherit it."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if open_file_limit() < (possible := min(_number(hard), wanted)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
    return open_file_limit()


def _number(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit
