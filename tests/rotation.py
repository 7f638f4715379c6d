"""A pytest option that runs a part of the long tests, others at each commit: `pytest --rotate 3` a third of them.

It takes every third case among those that are marked full, in the order of the files. With which one it begins follows from the
commit's hash, so a failure can be repeated; without git it is always the same.
"""

from collections.abc import Sequence

import pytest

from benchmarks.results import commit


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "run one in N of the cases that are marked full, others at each commit"
    parser.addoption("--rotate", type=int, default=1, metavar="N", help=words)


@pytest.hookimpl(trylast=True)  # what -m leaves out is gone
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases that are not this commit's turn."""
    number = config.getoption("--rotate")
    if number < 2:
        return
    cases = [item for item in items if item.get_closest_marker("full")]
    left_out = {id(item) for item in cases} - {id(item) for item in turn(cases, number, commit())}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
    items[:] = [item for item in items if id(item) not in left_out]


def turn(cases: Sequence[pytest.Item], number: int, head: str) -> Sequence[pytest.Item]:
    """Return the cases that are run at this commit, evenly spread over the files."""
    try:
        first = int(head[:8], 16) % number
    except ValueError:
        first = 0
    return cases[first::number]
