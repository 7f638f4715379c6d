"""A pytest option that runs a part of the long cases, others at each commit: `pytest --rotate 3` about a third of them.

Of each test with several cases that are marked full, at least one is run. What a commit leaves out follows from its hash, so a
failure can be repeated; without git it is always the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.results import commit


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --rotate."""
    words = "run one in N of the cases of each test that are marked full, others at each commit"
    parser.addoption("--rotate", type=int, default=1, metavar="N", help=words)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases that are not this commit's turn.

    Args:
        config: Config of the session, with --rotate.
        items: Collected tests, changed in place.
    """
    number = config.getoption("--rotate")
    if number < 2:
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("full"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = {id(item) for of_test in cases.values() for item in set(of_test) - set(turn(of_test, number, commit()))}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
    items[:] = [item for item in items if id(item) not in left_out]


def turn(cases: Sequence[pytest.Item], number: int, head: str) -> Sequence[pytest.Item]:
    """Return the cases of one test that are run at this commit.

    Args:
        cases: The cases that are marked full.
        number: One case in this many is run, at least one.
        head: The commit's hash in hexadecimal digits, or a message that there is none.
    """
    number = min(number, len(cases))
    try:
        first = int(head[:8], 16) % number
    except ValueError:
        first = 0
    return cases[first::number]
