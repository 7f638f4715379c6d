"""Answers that were written to stop the grader get one status each, in time, and leave the pool as fast as before."""

import time
from pathlib import Path

import psutil
import pytest

from tepo_megatron.base.types import STATUSES
from tests.graded import math_reward, rollout, statuses, worker_pids
from tests.hostile_answers import hostile_answers

GOLDS = ("7", r"\frac{1}{2}", r"\text{Monday}", "[0,1)")
HARD_SECONDS = 2.0
OVERHEAD_SECONDS = 2.0  # to end a worker and begin another, on a busy machine
ANSWERS = hostile_answers()


def grade_each(answers: list[str]) -> list[tuple[str, str, float]]:
    """(answer, status, seconds) with one worker, one answer at a time; seconds: without the start of a worker."""
    with math_reward(soft_seconds=0.5, hard_seconds=HARD_SECONDS) as reward:
        found = []
        for place, answer in enumerate(answers):
            if not found or found[-1][1] in ("timeout", "died"):
                assert statuses(reward, [rf"\boxed{{{7 * (place + 2)}/{place + 2}}}"]) == ["equal"]
            start = time.monotonic()
            (graded,) = reward.score([rollout(rf"so \boxed{{{answer}}}", GOLDS[place % len(GOLDS)])])
            found.append((answer, graded.status, time.monotonic() - start))
            assert graded.reward == graded.score == 0.0, answer
    return found


def check(found: list[tuple[str, str, float]]) -> None:
    assert {status for _, status, _ in found} <= set(STATUSES) - {"exact", "equal", "bad_gold"}
    late = [(answer[:80], seconds) for answer, _, seconds in found if seconds > HARD_SECONDS + OVERHEAD_SECONDS]
    assert not late


@pytest.mark.slow
def test_some_hostile_answers_one_by_one() -> None:
    check(grade_each(ANSWERS[::31]))


@pytest.mark.full
@pytest.mark.alone
def test_all_hostile_answers_one_by_one() -> None:
    check(grade_each(ANSWERS))


@pytest.mark.full
@pytest.mark.alone
def test_the_pool_is_as_fast_afterwards() -> None:
    with math_reward(workers=2, soft_seconds=0.5, hard_seconds=HARD_SECONDS) as reward:

        def seconds(offset: int) -> float:
            """Processor time of the workers, which other processes of the machine do not lengthen."""
            rollouts = [rollout(rf"\boxed{{\frac{{{2 * i}}}{{2}}}}", str(i)) for i in range(offset, offset + 100)]
            workers = [psutil.Process(pid) for pid in worker_pids(reward)]
            start = sum(sum(worker.cpu_times()[:2]) for worker in workers)
            assert [graded.status for graded in reward.score(rollouts)] == ["equal"] * 100
            return sum(sum(worker.cpu_times()[:2]) for worker in workers) - start

        seconds(0)
        before = min(seconds(offset) for offset in (1000, 2000, 3000))
        reward.score([rollout(rf"\boxed{{{answer}}}") for answer in ANSWERS])
        seconds(4000)  # replaced workers start
        after = min(seconds(offset) for offset in (5000, 6000, 7000))
    assert after < 1.5 * before + 0.05


def test_code_in_an_answer_is_not_run(tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    code = f"__import__('pathlib').Path('{trap}').touch()"
    answers = [code, f"eval({code!r})", rf"\text{{{code}}}", f"7 + {code}", f"Integer({code})"]
    with math_reward() as reward:
        found = statuses(reward, [rf"\boxed{{{answer}}}" for answer in answers])
    assert not {"exact", "equal"} & set(found) and not trap.exists()
