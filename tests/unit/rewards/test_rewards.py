"""Grading: one verdict per rollout, in order, whatever the answers and the workers do."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tepo_megatron.config import RewardConfig
from tepo_megatron.errors import RewardError
from tepo_megatron.grading.answers import last_boxed
from tepo_megatron.rewards import build_reward, pool, process
from tepo_megatron.rewards.terms import WeightedReward
from tests.graded import decode, math_reward, rollout, statuses, worker_pids

ENDLESS = r"\boxed{9^{9^9}}"


def is_running(pid: int) -> bool:
    """Return whether the process is neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


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


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{" * 30_000,
        r"\boxed" * 30_000,
        "\\" * 200_000,
        r"\boxed" + " " * 200_000,
        "{" * 200_000 + "}" * 200_000,
    ],
    ids=["unclosed boxed", "no braces", "backslashes", "spaces", "nested braces"],
)
def test_last_boxed_is_linear(text: str) -> None:
    start = time.monotonic()
    assert last_boxed(text) is None
    assert time.monotonic() - start < 10.0  # quadratic: minutes


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
        assert dataclasses.replace(after, reward=0.0, score=0.0, status="", terms=()) == dataclasses.replace(
            before, reward=0.0, score=0.0, status=""
        )


def test_no_rollouts(reward: WeightedReward) -> None:
    assert reward.score([]) == []


@pytest.mark.full
@pytest.mark.alone
def test_hostile_answers_end_in_time(reward: WeightedReward) -> None:
    hostile = [
        ENDLESS,
        r"\boxed{10^8!}",
        r"\boxed{\binom{10^9}{5\cdot10^8}}",
        r"\boxed{" + "{" * 120 + "x" + "}" * 120 + "}",
        r"\boxed{" + "{" * 2000 + "x" + "}" * 2000 + "}",
        "noise \0 " * 30_000,
        "\\boxed{" + "\0" * 500 + "}",
        r"\boxed{" + "+".join(rf"\sqrt{{{i}}}" for i in range(2, 50)) + "}",
    ]
    responses = [text for bad in hostile for text in (bad, r"\boxed{7.0}")]
    start = time.monotonic()
    found = statuses(reward, responses)
    assert time.monotonic() - start < len(hostile) * 2.0 / 2 + 2.0  # 2 s hard, 2 workers
    assert found[1::2] == ["equal"] * len(hostile)
    assert found[0] == found[2] == "timeout"
    assert not {"exact", "equal"} & set(found[::2])


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
        assert not is_running(pid)
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


@pytest.mark.full
def test_worker_killed_between_batches_costs_nothing() -> None:
    with math_reward(workers=2) as reward:
        assert statuses(reward, [r"\boxed{7.0}", r"\boxed{8.0}"]) == ["equal", "wrong"]
        pids = worker_pids(reward)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: not any(map(is_running, pids)))
        assert statuses(reward, [r"\boxed{7.00}", r"\boxed{8.00}"]) == ["equal", "wrong"]


def test_close_leaves_no_worker() -> None:
    with build_reward(RewardConfig(workers=2), decode) as reward:
        pids = worker_pids(reward)
        assert len(pids) == 2
        assert all(map(is_running, pids))
    assert not any(map(is_running, pids))
    reward.close()
    with pytest.raises(ValueError, match="closed"):
        reward.score([rollout(r"\boxed{8}")])


@pytest.mark.slow
def test_interrupt_leaves_no_worker() -> None:
    with math_reward(workers=2, soft_seconds=20, hard_seconds=30) as reward:
        statuses(reward, [r"\boxed{8}"])
        pids = worker_pids(reward)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            statuses(reward, [ENDLESS])
        assert not any(map(is_running, pids))


def test_workers_are_light_and_out_of_reach_of_the_terminal(reward: WeightedReward) -> None:
    statuses(reward, [r"\boxed{7.0000}", r"\boxed{7.00000}"])
    for pid in worker_pids(reward):
        assert os.getsid(pid) == pid  # the terminal's Ctrl-C goes to another session
        assert "torch" not in Path(f"/proc/{pid}/maps").read_text()


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
        assert is_running(pid)
        parent.kill()
    assert eventually(lambda: not is_running(pid))


def test_too_little_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory runs out within the imports differs: Python says MemoryError, the loader of its libraries ImportError."""
    monkeypatch.setattr(pool, "MEMORY_MIB", 16)
    with build_reward(RewardConfig(workers=2), decode) as reward:
        with pytest.raises(RewardError, match=r"16 MiB of memory (?s:.*)(MemoryError|failed to map segment|allocate memory)"):
            reward.score([rollout(r"\boxed{7.0}")])
        assert worker_pids(reward) == []


@pytest.mark.parametrize(
    ("module", "last_words"),
    [
        ("raise ImportError('antlr4 is too old')", "antlr4 is too old"),
        ("LatexExtractionConfig = parse = verify = lambda *args, **kwargs: []", "self-test"),
    ],
    ids=["does not import", "reads nothing"],
)
def test_broken_math_verify_is_an_error(module: str, last_words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "math_verify.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    with (
        math_reward() as reward,
        pytest.raises(RewardError, match=rf"math-verify is installed(?s:.*){last_words}"),
    ):
        statuses(reward, [r"\boxed{7.0}"])


@pytest.mark.slow
def test_worker_killed_at_its_start_is_started_again() -> None:
    with math_reward() as reward:
        os.kill(worker_pids(reward)[0], signal.SIGKILL)
        assert statuses(reward, [r"\boxed{7.0}"]) == ["equal"]
