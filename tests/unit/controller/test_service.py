"""The rollout service as a process: its calls, its errors, and its end, whoever ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.config import Config
from tepo_megatron.config.io import to_yaml, validate
from tepo_megatron.controller.driver import ServiceDriver
from tepo_megatron.controller.messages import Waited
from tepo_megatron.controller.service_client import ServiceClient
from tepo_megatron.controller.service_start import ForkedProcess, start_service
from tepo_megatron.controller.service_trace import ServiceTrace
from tepo_megatron.errors import DataError, RolloutError
from tepo_megatron.inference.engine_api import StaleWeights
from tepo_megatron.inference.servers.fleet import Fleet
from tepo_megatron.observability import run_dir
from tests.parallel.resume_worlds import run_config, write_inputs

HTTP_AND_TEXT = ("httpx", "aiohttp", "msgspec", "transformers", "tokenizers", "math_verify", "datasets", "pyarrow")
ROLLOUT_SIDE = ("data", "evaluation", "grading", "rewards", "rollout", "report", "inference.servers", "inference.vllm")


def imported(module: str) -> set[str]:
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return set(done.stdout.split())


@pytest.mark.slow
def test_a_rank_imports_no_http_tokenizer_or_grading_code() -> None:
    found = imported("tepo_megatron.train")
    assert "megatron.core" in found
    assert [name for name in HTTP_AND_TEXT if name in found] == []
    assert [name for name in ROLLOUT_SIDE if f"tepo_megatron.{name}" in found] == []


@pytest.mark.slow
def test_the_service_imports_no_trainer() -> None:
    found = imported("tepo_megatron.controller.service")
    assert "tepo_megatron.rollout.collector" in found
    assert [name for name in ("megatron", "tepo_megatron.actor", "tepo_megatron.weights.gather") if name in found] == []


@contextmanager
def service(silence_seconds: float = 60.0) -> Iterator[ServiceClient]:
    with start_service(silence_seconds) as client:
        yield client


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
        with pytest.raises(RolloutError, match=f"the rollout service .pid {client.pid}. was ended by SIGKILL"):
            client.call("ping")
        with pytest.raises(RolloutError, match="was ended by SIGKILL"):
            client.call("ping")


@pytest.mark.slow
def test_a_service_that_hangs_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tepo_megatron.controller.service_client.PING_SECONDS", 0.2)
    with service(silence_seconds=1.0) as client:
        client.call("ping")
        os.kill(client.pid, signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(RolloutError, match="gave no answer for 1 s, in the call best_step; raise"):
            client.call("best_step")
        assert time.monotonic() - begun < 30
    assert time.monotonic() - begun < 40, "a service that hangs is not waited for"


@pytest.mark.slow
def test_the_service_ends_with_rank_0(tmp_path: Path) -> None:
    code = (
        "import os, time\n"
        "from tepo_megatron.controller.service_start import start_service\n"
        "with start_service(60.0) as client:\n"
        "    client.call('ping'); print(client.pid, flush=True); time.sleep(60)\n"
    )
    rank = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    pid = int(rank.stdout.readline())
    rank.kill()
    rank.communicate()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_answers_that_nobody_waits_for_yet_are_kept() -> None:
    """Two calls are under way, the first is answered last; a ping between them is nobody's answer."""
    ours, theirs = Pipe()

    def answer() -> None:
        from tepo_megatron.controller.messages import Answer

        first, second = theirs.recv(), theirs.recv()
        theirs.send(Answer(second.number, None, None))
        theirs.send(Answer(first.number, None, DataError("no prompts")))
        assert theirs.recv().name == "close"

    client = ServiceClient(ours, ForkedProcess(answer), silence_seconds=60.0)
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
        from tepo_megatron.controller import service

        ours.close()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(service, "open_driver", lambda cfg, make_engine: nullcontext(Failing()))
            service.RolloutService([theirs], None).run()

    client = ServiceClient(ours, ForkedProcess(answer), silence_seconds=60.0)
    theirs.close()
    client.call("open", cfg)
    driver = ServiceDriver(client, cfg)
    assert driver.evaluate(1).wait() == Waited("done")
    with pytest.raises(DataError, match="no held-out problems"):
        driver.evaluate(2).wait()
    client.close()


def test_an_error_of_an_engine_arrives_in_a_class_that_ranks_import(tmp_path: Path) -> None:
    def make_engine(cfg: Config) -> Fleet:
        raise StaleWeights("vLLM served other weights")

    cfg = run_config(write_inputs(tmp_path / "model"), tmp_path)
    run_dir.prepare(cfg)
    with start_service(60.0, make_engine) as client:
        with pytest.raises(RolloutError, match="served other weights") as raised:
            client.call("open", cfg)
        assert type(raised.value) is RolloutError
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(RolloutError, match="was ended by SIGKILL"):
            client.call("best_step")


def test_the_ranks_ask_for_the_methods_that_the_service_has() -> None:
    from tepo_megatron.controller.main_driver import MainDriver
    from tepo_megatron.controller.service_client import ServiceEngine, ServiceTraces

    asked: list[str] = []

    class Recorder(ServiceClient):
        def begin(self, name: str, *args: Any) -> Any:
            asked.append(name)
            result = (False, None) if name == "wait" else 0
            return type("Pending", (), {"result": lambda self: result, "number": 0})()

    client = Recorder.__new__(Recorder)
    for owner in (ServiceDriver, ServiceEngine, ServiceTraces):
        made = owner(client, config(Path("/nowhere"))) if owner is ServiceDriver else owner(client)
        for name in (name for name in vars(owner) if not name.startswith("_") and name not in ("engine", "log_checkpoint")):
            member = getattr(owner, name)
            if isinstance(member, property):
                getattr(made, name)
            elif name == "log_step":
                made.log_step(1, type("Log", (), {"record": lambda self, clock: {}})(), None)
            else:
                getattr(made, name)(*[0] * (member.__code__.co_argcount - 1 - len(member.__defaults__ or ())))
    assert asked
    for name in set(asked) - {"ping"}:  # the reader answers that one
        owner, _, method = name.rpartition(".")
        assert hasattr({"": MainDriver, "engine": Fleet, "trace": ServiceTrace}[owner], method), name
