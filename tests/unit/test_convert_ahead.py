"""Preparing the next parameter while one is written."""

import threading
import weakref

import pytest

from tepo_megatron.weights.convert.ahead import Job, ahead


class Made:
    """Something whose end can be seen."""


def test_the_next_is_made_while_this_one_is_used_and_no_other() -> None:
    begun = [threading.Event() for _ in range(4)]

    def job(i: int) -> Job[int]:
        return Job(lambda: (begun[i].set(), i)[1], nbytes=1)

    results = ahead([job(i) for i in range(4)])
    assert next(results) == 0 and begun[1].wait(10) and not begun[2].is_set()
    assert list(results) == [1, 2, 3]


def test_a_large_one_waits_until_this_one_is_let_go() -> None:
    held: list[weakref.ref[Made]] = []
    alive = []

    def make() -> Made:
        alive.append(sum(r() is not None for r in held))
        made = Made()
        held.append(weakref.ref(made))
        return made

    for made in ahead([Job(make, n) for n in (1, 100, 1, 100)], limit=10):
        assert isinstance(made, Made)
        del made
    assert alive[1] == alive[3] == 0 and len(alive) == 4


def test_an_error_comes_in_its_place_and_ends_the_work() -> None:
    made = []

    def make(i: int) -> int:
        made.append(i)
        if i == 2:
            raise ValueError("no")
        return i

    results = ahead([Job(lambda i=i: make(i), 1) for i in range(5)])
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="no"):
        next(results)
    assert made == [0, 1, 2]
    assert not any(t.name.startswith("ahead") for t in threading.enumerate())
