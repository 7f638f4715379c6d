"""Converting in several threads: what runs concurrently, how it ends, and that the output shows nothing of it."""

from __future__ import annotations

import contextvars
import pickle
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tepo_megatron.convert.exporting import file_ranges
from tepo_megatron.convert.streams import STREAMS, CopyJob, run_queues
from tepo_megatron.errors import CheckpointError, ConversionError
from tests.tiny import tiny_qwen3
from tests.unit.weights.test_convert import succeed


def test_queues_run_concurrently_and_each_in_order() -> None:
    meeting, done = threading.Barrier(STREAMS, timeout=10), []

    def job(queue: int, i: int) -> CopyJob:
        return CopyJob(lambda: (i == 0 and meeting.wait(), done.append((queue, i))))

    run_queues([[job(queue, i) for i in range(3)] for queue in range(STREAMS)])
    assert sorted(done) == [(queue, i) for queue in range(STREAMS) for i in range(3)]
    for queue in range(STREAMS):
        assert [i for q, i in done if q == queue] == [0, 1, 2]


def test_large_ones_are_never_in_flight_together() -> None:
    running = {True: 0, False: 0}
    highest = dict(running)
    lock, together = threading.Lock(), threading.Event()

    def run(large: bool) -> None:
        with lock:
            running[large] += 1
            highest[large] = max(highest[large], running[large])
            if all(running.values()):
                together.set()
        if not large:
            together.wait(0.05)
        time.sleep(0.002)
        with lock:
            running[large] -= 1

    jobs = [CopyJob(lambda large=large: run(large), 11 if large else 10) for large in [True, False] * 10]  # type: ignore[misc]
    run_queues([jobs, jobs[::-1]], large_bytes=10)
    assert highest[True] == 1 and together.is_set()


@pytest.mark.parametrize("error", [ConversionError("no"), CheckpointError("no"), OSError(28, "full"), KeyboardInterrupt()])
def test_the_first_exception_ends_all_and_keeps_its_type(error: BaseException) -> None:
    begun, failed, done = threading.Event(), threading.Event(), []

    def fail() -> None:
        begun.wait(10)
        failed.set()
        raise error

    def last() -> None:
        begun.set()
        failed.wait(10)
        time.sleep(0.05)  # what is begun is ended
        done.append("last")

    queues = [[CopyJob(fail), CopyJob(lambda: done.append("after"))], [CopyJob(last), CopyJob(lambda: done.append("other"))]]
    with pytest.raises(type(error)) as caught:
        run_queues([*queues, [CopyJob(lambda: done.append("queued"))]])
    assert caught.value is error and done == ["last"]
    assert not any(t.name.startswith("convert") for t in threading.enumerate())


def test_an_interrupt_ends_all() -> None:
    done = []

    def interrupt() -> None:
        time.sleep(0.05)  # until all threads are started
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        run()

    def run() -> None:
        done.append(1)
        time.sleep(0.02)

    with pytest.raises(KeyboardInterrupt):
        run_queues([[CopyJob(interrupt)], [CopyJob(run)] * 100])
    assert len(done) < 100
    assert not any(t.name.startswith("convert") for t in threading.enumerate())


def test_threads_see_the_callers_context_and_compute_alone() -> None:
    variable, threads = contextvars.ContextVar("variable", default=0), torch.get_num_threads()
    variable.set(7)
    seen = []
    run_queues([[CopyJob(lambda: seen.append((variable.get(), torch.get_num_threads())))] for _ in range(3)])
    assert seen == [(7, 1)] * 3 and torch.get_num_threads() == threads


def test_a_model_of_two_gigabytes_has_several_files_and_a_large_one_no_small_ones() -> None:
    mib, gib = 2**20, 2**30
    assert file_ranges([600 * mib] + [100 * mib] * 14) == [range(1), range(1, 6), range(6, 11), range(11, 15)]
    assert file_ranges([gib] * 16) == [range(i, i + 2) for i in range(0, 16, 2)]
    assert file_ranges([gib] * 100) == [range(i, i + 4) for i in range(0, 100, 4)]
    assert file_ranges([1, 2]) == [range(2)]


def files(path: Path) -> dict[str, bytes]:
    """All files; `.metadata` without what PyTorch says of the writing (the directory, and a random id)."""
    found = {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}
    if ".metadata" in found:
        metadata = pickle.loads(found[".metadata"])
        metadata.storage_meta = None
        found[".metadata"] = pickle.dumps(metadata)
    return found


@pytest.mark.slow
def test_output_is_the_same_byte_for_byte_whichever_thread_is_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times: as it comes, then with one of the threads held up, then the other."""
    from tepo_megatron.convert import exporting, importing

    monkeypatch.setattr(exporting, "_SMALLEST_FILE", 500_000)
    monkeypatch.setattr(exporting, "_LARGEST_FILE", 500_000)
    tiny_qwen3(tmp_path / "hf", tied=False)
    found: list[dict[str, bytes]] = []
    for i, slow in enumerate((None, "0", "1")):
        for module in (importing, exporting):
            monkeypatch.setattr(module, "check_finite", held_up(slow))
        succeed("import", "--hf", tmp_path / "hf", "--out", tmp_path / f"megatron{i}")
        succeed("export", "--megatron", tmp_path / f"megatron{i}", "--out", tmp_path / f"back{i}")
        megatron, back = files(tmp_path / f"megatron{i}"), files(tmp_path / f"back{i}")
        assert {f"__0_{i}.distcp" for i in range(STREAMS)} <= megatron.keys()
        assert sum(name.endswith(".safetensors") for name in back) > STREAMS
        found.append({f"megatron/{k}": v for k, v in megatron.items()} | {f"back/{k}": v for k, v in back.items()})
    for other in found[1:]:
        assert other.keys() == found[0].keys() and [name for name in other if other[name] != found[0][name]] == []


def held_up(thread: str | None) -> Callable[[torch.Tensor, str], None]:
    """Instead of the check: the thread of this number waits."""

    def wait(tensor: torch.Tensor, what: str) -> None:
        if thread is not None and threading.current_thread().name.endswith(f"_{thread}"):
            time.sleep(0.01)

    return wait
