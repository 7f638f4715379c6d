"""Grading: one verdict per rollout, in order, whatever the answers and the workers do."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tepo_megatron.config import RewardConfig
from tepo_megatron.rewards import process
from tepo_megatron.rewards.build import build_reward
from tepo_megatron.rewards.grading.answers import last_boxed
from tepo_megatron.rewards.terms import WeightedReward
from tests.graded import decode, math_reward, rollout, statuses, worker_pids
from tests.waiting import lives, until

ENDLESS = r"\boxed{9^{9^9}}"


@pytest.fixture(scope="module")
def reward() -> Iterator[WeightedReward]:
    with math_reward(workers=2) as shared:
        yield shared


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{7}", "7"),
        (r"\boxed{1} then \boxed{ 2 }.", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {7}", "7"),
        (r"\\boxed{7}", "7"),
        (r"x \\\boxed{7}", "7"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{1 + \boxed{2}}", "2"),
        (r"a } b \boxed{7} { c", "7"),
        (r"\boxed{}", ""),
        (r"\boxed{7\}", None),
        (r"\boxed 7", None),
        (r"\fbox{7}", "7"),
        (r"\boxed{6} \fbox{7}", "7"),
        (r"\mbox{7}", None),
        ("7", None),
        ("", None),
    ],
)
def test_last_boxed(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


def test_each_status(reward: WeightedReward) -> None:
    cases = [
        (r"so \boxed{7}", "7", 1.0, "exact"),
        (r"\boxed{ 7 }", " 7", 1.0, "exact"),
        (r"\boxed{7.0}", "7", 1.0, "equal"),
        (r"\boxed{0.5}", r"\frac12", 1.0, "equal"),
        (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1.0, "equal"),
        (r"\boxed{\{2, 1\}}", r"\{1,2\}", 1.0, "equal"),
        (r"\boxed{8}", "7", 0.0, "wrong"),
        (r"the final answer is $7$ \boxed{8}", "7", 0.0, "wrong"),
        (r"\boxed{7} no, \boxed{8}", "7", 0.0, "wrong"),
        (r"\boxed{\frac{}", "7", 0.0, "no_box"),
        (r"\boxed{???}", "7", 0.0, "unparsed"),
        (r"\boxed{}", "7", 0.0, "unparsed"),
        ("\\boxed{7\0}", "7", 0.0, "unparsed"),
        ("\\boxed{\ud800}", "7", 0.0, "unparsed"),
        ("7", "7", 0.0, "no_box"),
        ("1 2 3 7", "7", 0.0, "no_box"),
        (r"\boxed{1}, \boxed{7}", "1,7", 0.0, "wrong"),
        (r"\fbox{7}", "7", 1.0, "exact"),
        (r"\boxed{0.0000001}", "0", 0.0, "wrong"),
        (r"\boxed{7}", r"worked out: \boxed{7}", 1.0, "exact"),
        ("", "7", 0.0, "no_box"),
        (r"\boxed{" + "1" * 513 + "}", "7", 0.0, "too_long"),
        (r"\boxed{7}", "???", 0.0, "bad_gold"),
        (r"\boxed{}", "", 0.0, "bad_gold"),
        (r"\boxed{7}", "1" * 513, 0.0, "bad_gold"),
    ]
    rollouts = [rollout(text, answer, prompt_id=i) for i, (text, answer, _, _) in enumerate(cases)]
    graded = reward.score(rollouts)
    assert [(g.score, g.status) for g in graded] == [(score, status) for *_, score, status in cases]
    for before, after in zip(rollouts, graded, strict=True):
        assert after.reward == after.score and after.terms == ((1.0, after.score),)
        graded_fields = {"reward", "score", "status", "terms"}
        others = [field.name for field in dataclasses.fields(after) if field.name not in graded_fields]
        assert [getattr(after, name) for name in others] == [getattr(before, name) for name in others]  # the same tensors


COUNTS = """
import json, sys
print('"ready"', flush=True)
for line in sys.stdin:
    serial, step, gold, text = json.loads(line)
    if step == "compare":
        with open(LOG, "a") as log:
            log.write(text + "\\n")
    print(json.dumps([serial, "open" if step == "read" else "wrong", 0.0, text, 0.0]), flush=True)
"""


def test_equal_pairs_are_compared_once_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    (tmp_path / "worker.py").write_text(COUNTS.replace("LOG", repr(str(log))))
    monkeypatch.setattr(process, "WORKER", tmp_path / "worker.py")
    with math_reward(workers=2, hard_seconds=60) as reward:
        for _ in range(2):
            assert statuses(reward, ["a", "b"] * 50) == ["wrong"] * 100
        assert sorted(log.read_text().split()) == ["a", "b"]
        assert statuses(reward, ["a"], answer="8") == ["wrong"]
        assert sorted(log.read_text().split()) == ["a", "a", "b"]


@pytest.mark.slow
def test_worker_that_hangs_is_replaced() -> None:
    with math_reward(soft_seconds=0.5, hard_seconds=3.0) as reward:
        assert statuses(reward, [r"\boxed{7.0}"]) == ["equal"]
        (pid,) = worker_pids(reward)
        os.kill(pid, signal.SIGSTOP)  # deaf to its own alarm, as in one long C call
        # it was about to read the first response, which cannot hang, so that another worker reads it again
        assert statuses(reward, [r"\boxed{7.00}", r"\boxed{7.000}", r"\boxed{8}"]) == ["equal", "equal", "wrong"]
        assert not lives(pid)
        assert worker_pids(reward) != [pid]


@pytest.mark.slow
def test_worker_killed_at_work_costs_nothing() -> None:
    with math_reward(soft_seconds=2, hard_seconds=30) as reward:
        assert statuses(reward, [r"\boxed{7.0}"]) == ["equal"]
        (pid,) = worker_pids(reward)
        killer = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))
        killer.start()
        responses = [r"\boxed{7.00}", ENDLESS, r"\boxed{8}", r"\boxed{7}", "none", r"\boxed{7.000}"]
        assert statuses(reward, responses) == ["equal", "timeout", "wrong", "exact", "no_box", "equal"]
        killer.join()
        assert worker_pids(reward) != [pid]


def test_close_leaves_no_worker() -> None:
    with build_reward(RewardConfig(workers=2), decode) as reward:
        pids = worker_pids(reward)
        assert len(pids) == 2
        assert all(map(lives, pids))
    assert not any(map(lives, pids))
    reward.close()
    with pytest.raises(ValueError, match="closed"):
        reward.score([rollout(r"\boxed{8}")])


@pytest.mark.slow
def test_worker_dies_with_its_parent() -> None:
    # the worker is at an endless answer, so that it cannot notice a closed stdin
    script = (
        "import asyncio\n"
        "from tepo_megatron.rewards.pool import GradingPool, PoolLimits\n"
        "pool = GradingPool(PoolLimits(1, 50, 60, 1024), ['equality', 'boxed'], 'it')\n"
        "async def work():\n"
        "    await pool.grade([('compare', '1/2', '1/3')])\n"
        "    print(*pool.pids, flush=True)\n"
        "    await pool.grade([('compare', '7', '9^{9^9}')])\n"
        "asyncio.run(work())\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        too_late = threading.Timer(60, parent.kill)
        too_late.start()
        pid = int(parent.stdout.readline())
        too_late.cancel()
        time.sleep(0.3)
        assert lives(pid)
        parent.kill()
    until(lambda: not lives(pid))
