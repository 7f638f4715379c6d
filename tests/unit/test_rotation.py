"""A case that `--rotate` leaves out at one commit runs at another, and each commit runs as many as the next."""

from typing import Any

import pytest

from tests.rotation import turn


@pytest.mark.parametrize("count", [3, 7, 14])
def test_every_case_has_its_turn(count: int) -> None:
    cases: Any = list(range(count))
    turns = [turn(cases, 3, f"{head:08x}") for head in range(6)]
    assert sorted(case for part in turns[:3] for case in part) == cases
    assert turns[3:] == turns[:3] and {len(part) for part in turns} <= {count // 3, -(-count // 3)}
    assert turn(cases, 3, "00000004" + 32 * "f" + " with changes") == turns[4]
    assert turn(cases, 3, "unknown: git is not installed") == turns[0]
