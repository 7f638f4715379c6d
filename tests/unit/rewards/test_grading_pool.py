"""A broken worker costs its sample the deadline, and nothing else. The workers here are scripts of our own."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tepo_megatron.base import progress
from tepo_megatron.base.errors import RewardError
from tepo_megatron.rewards import process
from tepo_megatron.rewards.grading.worker import grade_in_time
from tepo_megatron.rewards.pool import GradingPool, PoolLimits
from tepo_megatron.rewards.process import WorkerOutcome

GOOD = """
import json, os, sys, time
def say(*reply):
    sys.stdout.write(json.dumps(reply) + "\\n")
    sys.stdout.flush()
print('"ready"', flush=True)
for line in sys.stdin:
    serial, text = json.loads(line)
    BEHAVE
    say(serial, "graded", float(len(text)), "", 0.0)
"""
HARD_SECONDS = 2.0  # those that answer do so in a thousandth of it
BAD = "bad" * 5
FATES = {
    "hangs": ("time.sleep(60)", "timeout"),
    "exits": ("sys.exit()", "died"),
    "is killed": ("os.kill(os.getpid(), 9)", "died"),
    "prints a line of garbage": ("print('0.5', flush=True); time.sleep(60)", "died"),
    "prints no JSON": ("print('{\"', flush=True); time.sleep(60)", "died"),
    "prints bytes": ("os.write(1, b'\\xff\\xfe\\n'); time.sleep(60)", "died"),
    "prints without end": ("while True: os.write(1, b'x' * 4096)", "died"),
    "prints slowly without end": ("while True: os.write(1, b'x'); time.sleep(0.05)", "timeout"),
    "nests without end": ("print('[' * 60000, flush=True); time.sleep(60)", "died"),
    "answers another request": ("say(serial - 1, 'graded', 9.0, '', 0.0); time.sleep(60)", "died"),
    "answers twice": ("say(serial, 'graded', 9.0, '', 0.0); say(serial, 'graded', 9.0, '', 0.0)", "died"),
    "says ready again": ("print('\"ready\"', flush=True); time.sleep(60)", "died"),
    "gives no number": ("say(serial, 'graded', 'much', '', 0.0); time.sleep(60)", "died"),
    "gives NaN": ("say(serial, 'graded', float('nan'), '', 0.0); time.sleep(60)", "died"),
    "takes negative time": ("say(serial, 'graded', 9.0, '', -1.0); time.sleep(60)", "died"),
    "gives too little": ("say(serial, 'graded'); time.sleep(60)", "died"),
    "closes its output": ("os.close(1); time.sleep(60)", "died"),
    "closes its input": ("os.close(0); time.sleep(60)", "timeout"),
}


class Pool:
    def __init__(self, workers: int) -> None:
        self._runner = asyncio.Runner()
        self.pool = GradingPool(PoolLimits(workers, 0.3, HARD_SECONDS, 1024), [], "the script")

    def grade(self, requests: Sequence[Sequence[str]]) -> list[WorkerOutcome]:
        return self._runner.run(self.pool.grade(requests))

    def close(self) -> None:
        self._runner.run(self.pool.close())
        self._runner.close()


def pool(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, workers: int = 1) -> Pool:
    script = folder / "worker.py"
    script.write_text(source)
    monkeypatch.setattr(process, "WORKER", script)
    return Pool(workers)


def test_a_worker_that_is_killed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is reported once where another worker grades its answer, and again where that worker is lost too."""
    once = tmp_path / "once"
    lost = f"if text == {BAD!r} or not os.path.exists({str(once)!r}): open({str(once)!r}, 'w'); os.kill(os.getpid(), 9)"
    made = pool(tmp_path, monkeypatch, GOOD.replace("BEHAVE", lost))
    assert made.grade([["a"]]) == [WorkerOutcome("graded", 1.0)]
    assert [record.getMessage().partition(" was ended by SIGKILL: ")[2] != "" for record in caplog.records] == [True]
    assert caplog.records[0].getMessage().endswith("; its answer is graded again")
    assert made.grade([[BAD]]) == [WorkerOutcome("died")]
    made.close()
    assert [record.getMessage().rpartition("; ")[2] for record in caplog.records[1:]] == [
        "its answer is graded again", "so did another at the same answer, which counts as 0 (died)",
    ]  # fmt: skip


def test_what_a_worker_wrote_counts_however_late_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may load for minutes before the first answer, and the run may be stopped or busy while a worker answers."""
    written = tmp_path / "written"
    script = tmp_path / "worker.py"
    script.write_text(GOOD.replace("BEHAVE", "").replace("\nfor line", f"\nopen({str(written)!r}, 'w')\nfor line")
                      + f"    open({str(written)!r}, 'w')\n")  # fmt: skip
    monkeypatch.setattr(process, "WORKER", script)
    monkeypatch.setattr(process, "LOOK_SECONDS", 0.0)

    def wait() -> None:
        while not written.exists():
            time.sleep(0.001)
        written.unlink()

    async def late() -> WorkerOutcome:
        wait()
        await worker.wait_ready()
        worker.send([["aaa"]])
        wait()
        return await worker.receive(time.monotonic() - 1.0)

    worker = process.GradingWorker([], 0.3, 1024, "", process.REPLY_BYTES)
    try:
        assert asyncio.run(late()) == WorkerOutcome("graded", 3.0)
    finally:
        worker.kill()


@pytest.mark.slow
def test_a_worker_that_is_stuck_in_its_start_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STUCK_SECONDS", 1.0)
    monkeypatch.setattr(process, "START_SECONDS", 10.0)
    monkeypatch.setattr(process, "LOOK_SECONDS", 0.2)
    monkeypatch.setattr(progress, "LOOK_SECONDS", 0.2)
    made = pool(tmp_path, monkeypatch, "import time; time.sleep(600)")
    with pytest.raises(RewardError, match="a grading worker used neither CPU time nor a disk for 1 s before its first answer"):
        made.grade([["aaa"]])
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("fate", FATES)
def test_a_broken_worker_costs_one_sample(fate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    behaviour, status = FATES[fate]
    source = GOOD.replace("BEHAVE", f"if text == {BAD!r}:\n        {behaviour}")
    texts = ["a", "bb", BAD, "ccc", "dddd"]
    with monkeypatch.context() as patch:
        made = pool(tmp_path, patch, source)
        made.grade([["warm"]])
        start = time.monotonic()
        found = made.grade([[text] for text in texts])
        seconds = time.monotonic() - start
        pids = made.pool.pids
        again = made.grade([["a"]])
        made.close()
    expected = [WorkerOutcome("graded", float(len(text))) for text in texts]
    if fate == "answers twice":  # the first may be read before the second is there, which then spoils an attempt at the next
        assert found[:2] + found[3:] == expected[:2] + expected[3:]
        assert found[2] in (WorkerOutcome("died"), WorkerOutcome("graded", 9.0))
    else:
        expected[2] = WorkerOutcome(status)
        assert found == expected
    assert again == [WorkerOutcome("graded", 1.0)] and len(pids) == 1
    assert seconds < HARD_SECONDS + 20.0  # the worker would sleep for a minute


@pytest.mark.slow
def test_a_long_request_to_a_worker_that_does_not_read_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe holds 64 KiB, so a blocking write of more would wait for ever."""
    deaf = "import time\nprint('\"ready\"', flush=True)\ntime.sleep(60)\n"
    made = pool(tmp_path, monkeypatch, deaf)
    start = time.monotonic()
    assert made.grade([["x" * 1_000_000]]) == [WorkerOutcome("timeout")]
    assert time.monotonic() - start < HARD_SECONDS + 20.0
    made.close()


def test_the_soft_alarm_gets_through_libraries_that_swallow_exceptions() -> None:
    """Math-verify and SymPy swallow exceptions, and then call the answer wrong."""

    def grade() -> tuple[str, float, str]:
        try:
            while True:
                pass
        except Exception:
            return "wrong", 0.0, ""

    assert grade_in_time(grade, 0.05) == ("timeout", 0.0, "")
