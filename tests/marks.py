"""Marks for parts of a parametrisation."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(fast: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases, all marked slow except those named in `fast`.

    Raises:
        ValueError: A name in `fast` is not among `cases`.
    """
    fast, cases = list(fast), list(cases)
    if unknown := [case for case in fast if case not in cases]:
        raise ValueError(f"{unknown} are not among the cases")
    return [case if case in fast else marked(case, pytest.mark.slow) for case in cases]


def full_but(fast: Iterable[Any], slow: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases, all marked full except those in `fast`, and those in `slow`, which are marked slow."""
    fast, slow = list(fast), list(slow)
    return [case if case in fast else marked(case, pytest.mark.slow if case in slow else pytest.mark.full) for case in cases]


def marked(case: Any, mark: Any) -> Any:
    return pytest.param(*case, marks=mark) if isinstance(case, tuple) else pytest.param(case, marks=mark)
