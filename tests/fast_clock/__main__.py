"""Run whole runs under a fast clock, after its self-test: `python -m tests.fast_clock SPEED [ARGUMENTS OF PYTEST]`."""

from __future__ import annotations

import os
import sys

import pytest

from tests.fast_clock.clock import SPEED, build, lacking, self_test


def main(speed: str, *arguments: str) -> int:
    """Return the exit status: of pytest, or 1 where there is no fast clock, or one that does not scale every wait."""
    if words := lacking():
        print(words, file=sys.stderr)
        return 1
    build()
    if not self_test(float(speed)):
        return 1
    os.environ[SPEED] = speed
    return pytest.main(["-m", "fast_clock", *arguments, "tests/fast_clock"])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
