"""A pytest option that takes the servers of the tests of engines from another environment: `pytest --server-python PATH`."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --server-python."""
    parser.addoption("--server-python", metavar="PATH", help="Python of the environment in which the servers run")
