"""The rollout service as a process: its calls, its errors, and its end, whoever ends it."""

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.base.errors import DataError, RolloutError
from tepo_megatron.base.memory_kills import MemoryKills
from tepo_megatron.command.ranks import SERVICE, ServiceProcess
from tepo_megatron.config.io import to_yaml, validate
from tepo_megatron.service.messages import Waited, ended
from tepo_megatron.service.trace import ServiceTrace
from tepo_megatron.trainer.driver import Driver
from tepo_megatron.trainer.service_client import ServiceAddress, ServiceClient
from tests.services import fork
from tests.waiting import error_of, lives, until

HTTP_AND_TEXT = ("httpx", "aiohttp", "msgspec", "transformers", "tokenizers", "math_verify", "datasets", "pyarrow")
ROLLOUT_SIDE = ("data", "evaluation", "grading", "rewards", "rollout", "report", "engines.servers", "engines.vllm")


def imported(module: str) -> set[str]:
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return set(done.stdout.split())


@pytest.mark.slow
def test_a_rank_imports_no_http_tokenizer_or_grading_code() -> None:
    found = imported("tepo_megatron.trainer.train")
    assert "megatron.core" in found
    assert [name for name in HTTP_AND_TEXT if name in found] == []
    assert [name for name in ROLLOUT_SIDE if f"tepo_megatron.{name}" in found] == []


@pytest.mark.slow
def test_the_service_imports_no_trainer() -> None:
    found = imported("tepo_megatron.service.service")
    assert "tepo_megatron.rollout.collector" in found
    assert [name for name in ("megatron", "tepo_megatron.actor", "tepo_megatron.models.gather") if name in found] == []


@contextmanager
def service(silence_seconds: float = 60.0) -> Iterator[ServiceClient]:
    with ServiceProcess(SERVICE, {}) as process:
        connection, pid = process.connect()
        client = ServiceClient(ServiceAddress(Connection(connection.detach()), pid), silence_seconds)
        yield client
        client.close()


def config(folder: Path, **sections: Any) -> Any:
    tree = {
        "name": "run", "output": str(folder), "platform": "cpu", "model": {"path": str(folder / "none")},
        "data": {"train": str(folder / "none.jsonl")}, "rollout": {"replay": str(folder / "rollouts")},
        "objective": {"name": "tepo"}, "training": {"steps": 1},
    }  # fmt: skip
    return validate(tree | sections)


@pytest.mark.slow
def test_an_error_arrives_as_it_is_and_the_service_goes_on(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    cfg = config(tmp_path)
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(cfg))
    with service() as client:
        client.call("ping")
        with pytest.raises(Exception, match="none"):  # there is no such model
            client.call("open", cfg)
        client.call("ping")


@pytest.mark.slow
def test_a_killed_service_is_one_error_that_says_how(tmp_path: Path) -> None:
    with service() as client:
        client.call("ping")
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(RolloutError, match=f"the rollout service .pid {client.pid}. has ended"):
            client.call("ping")
        with pytest.raises(RolloutError, match="has ended"):
            client.call("ping")


@pytest.mark.slow
def test_a_service_that_hangs_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tepo_megatron.trainer.service_client.PING_SECONDS", 0.2)
    with service(silence_seconds=1.0) as client:
        client.call("ping")
        os.kill(client.pid, signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(RolloutError, match="gave no answer for 1 s, in the call best_step; raise"):
            client.call("best_step")
        assert time.monotonic() - begun < 30
    assert time.monotonic() - begun < 40, "a service that hangs is not waited for"


def _started_late(seconds: float, start_seconds: float) -> str:
    """Call a service that reads nothing until it has imported its modules; return how the call ends."""
    ours, theirs = Pipe()

    def answer() -> None:
        from tepo_megatron.service.messages import Answer

        time.sleep(seconds)
        theirs.send(Answer(theirs.recv().number, "opened", None))
        with suppress(EOFError):
            while theirs.recv().name != "close":
                pass

    client = ServiceClient(ServiceAddress(ours, fork(answer)), 0.5, start_seconds)
    theirs.close()  # the fork has it
    try:
        return client.call("open")
    except RolloutError as e:
        return str(e)
    finally:
        client.close()


@pytest.mark.slow
def test_a_service_may_start_for_longer_than_it_may_be_silent() -> None:
    assert _started_late(2.0, start_seconds=60.0) == "opened"
    message = _started_late(60.0, start_seconds=1.0)
    assert "has not started: no answer for 1 s, in the call open; raise parallel.start_seconds" in message
    assert "heartbeat_timeout" not in message


def test_a_service_that_imports_its_modules_is_asked_once_whether_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipe holds a few hundred messages: then the next one would block rank 0."""
    monkeypatch.setattr("tepo_megatron.trainer.service_client.PING_SECONDS", 0.001)
    (ours, theirs), process = Pipe(), subprocess.Popen(["sleep", "60"])
    client = ServiceClient(ServiceAddress(ours, process.pid), 0.5, 1.0)
    with pytest.raises(RolloutError, match="has not started"):
        client.call("open")
    client.close()
    names = []
    with suppress(EOFError):
        while True:
            names.append(theirs.recv().name)
    assert names == ["open", "ping"]


def test_a_service_that_stops_within_an_answer_is_noticed() -> None:
    (ours, theirs), process = Pipe(), subprocess.Popen(["sleep", "60"])
    client = ServiceClient(ServiceAddress(ours, process.pid), 0.5, 0.5)
    os.write(theirs.fileno(), struct.pack("!i", 1000) + b"the first bytes")
    error = error_of(lambda: client.call("best_step"), seconds=20)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    assert error is not None and "for 0.5 s, in the call best_step" in error


@pytest.mark.slow
def test_a_service_that_is_stuck_in_its_start_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tepo_megatron.trainer.service_client.PING_SECONDS", 0.2)
    monkeypatch.setattr("tepo_megatron.trainer.service_client.STUCK_SECONDS", 1.0)
    monkeypatch.setattr("tepo_megatron.trainer.service_client.CLOSE_SECONDS", 1.0)
    monkeypatch.setattr("tepo_megatron.base.progress.LOOK_SECONDS", 0.2)
    with service(silence_seconds=0.5) as client:
        os.kill(client.pid, signal.SIGSTOP)
        with pytest.raises(RolloutError, match=r"is stuck in its start: for [12] s it used neither CPU time nor a disk"):
            client.receive(client.begin("ping"), 20.0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_service_ends_with_the_launcher(number: signal.Signals) -> None:
    code = (
        "import time\n"
        "from tepo_megatron.command.ranks import SERVICE, ServiceProcess\n"
        "process = ServiceProcess(SERVICE, {})\n"
        "print(process.connect()[1], flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        try:
            os.kill(pid, signal.SIGCONT if number == signal.SIGKILL else number)  # one that is stopped, too
            launcher.kill()
            until(lambda: not lives(pid))
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_service_that_has_ended_is_replaced_and_the_launcher_says_how_it_ended(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("oom_kill 0\n")
    kills = MemoryKills(proc=tmp_path)
    with ServiceProcess(["-c", "import time; time.sleep(600)"], {}) as process:
        connection, first = process.connect()
        connection.close()
        again, same = process.connect()
        again.close()
        assert same == first
        os.kill(first, signal.SIGKILL)
        assert process.explained("rank 1: traceback", kills) == "rank 1: traceback"
        said = process.explained(f"rank 0: {ended(first)}", kills)
        assert said.startswith(f"rank 0: the rollout service (pid {first}) was ended by SIGKILL: "), said
        last, second = process.connect()
        last.close()
        assert second != first and lives(second)
    assert not lives(second)


def test_answers_that_nobody_waits_for_yet_are_kept() -> None:
    """Two calls are under way, the first is answered last; a ping between them is nobody's answer."""
    ours, theirs = Pipe()

    def answer() -> None:
        from tepo_megatron.service.messages import Answer

        first, second = theirs.recv(), theirs.recv()
        theirs.send(Answer(second.number, None, None))
        theirs.send(Answer(first.number, None, DataError("no prompts")))
        assert theirs.recv().name == "close"

    client = ServiceClient(ServiceAddress(ours, fork(answer)), silence_seconds=60.0)
    theirs.close()  # the fork has it
    load, other = client.begin("engine.load", []), client.begin("best_step")
    with pytest.raises(DataError, match="no prompts"):
        load.result()
    assert other.result() is None
    client.close()


def test_an_evaluation_that_fails_is_an_error_of_its_wait() -> None:
    ours, theirs = Pipe()
    cfg = config(Path("/nowhere"))

    class Failing:
        """A driver whose evaluations fail at even steps."""

        engine = None
        trace = ServiceTrace(cfg.run_dir, print)

        def evaluate(self, step: int) -> None:
            if step % 2 == 0:
                raise DataError("no held-out problems")

    def answer() -> None:
        from tepo_megatron.service import service

        ours.close()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(service, "open_driver", lambda cfg, make_engine: nullcontext(Failing()))
            service.RolloutService([theirs], None).run()

    client = ServiceClient(ServiceAddress(ours, fork(answer)), silence_seconds=60.0)
    theirs.close()
    client.call("open", cfg)
    driver = Driver(client, cfg)
    assert driver.evaluate(1).wait() == Waited("done")
    with pytest.raises(DataError, match="no held-out problems"):
        driver.evaluate(2).wait()
    client.close()
