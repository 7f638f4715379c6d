"""The life and death of a server process, with a tiny HTTP server in the place of the inference server."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tepo_megatron.base import progress
from tepo_megatron.base.errors import RolloutError
from tepo_megatron.engines.servers import process as server_module
from tepo_megatron.engines.servers.process import LOOPBACK, ServerProcess, hold_port
from tests.hurting import NOTHING, memory_group

# Answers /health, and starts a process that, like vLLM's EngineCore, does not notice its parent's death.
HEALTHY = """
import http.server, json, os, signal, subprocess, sys
port, pids, stubborn = int(sys.argv[1]), sys.argv[2], sys.argv[3:] == ["stubborn"]
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(120)"])
if stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: (child.kill(), child.wait(), os._exit(0)))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
with http.server.HTTPServer(("127.0.0.1", port), Handler) as server:
    with open(pids + ".part", "w") as f:
        json.dump([os.getpid(), child.pid], f)
    os.rename(pids + ".part", pids)
    server.serve_forever()
"""

Start = Callable[..., ServerProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `python -S -c CODE ARGS`, and stops it after the test."""
    started: list[ServerProcess] = []

    def start(code: str, *args: str, port: int = 1, ready_seconds: float = 20.0) -> ServerProcess:
        server = ServerProcess(
            [sys.executable, "-S", "-u", "-c", code, *args],
            env=dict(os.environ),
            health_url=f"http://{LOOPBACK}:{port}/health",
            log_path=tmp_path / "logs" / "server.log",
            ready_seconds=ready_seconds,
        )
        server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def healthy(start: Start, tmp_path: Path) -> Callable[..., tuple[ServerProcess, list[psutil.Process]]]:
    """Starts HEALTHY, waits for it; the server, its guard, its process and that one's child."""

    def begin(*args: str) -> tuple[ServerProcess, list[psutil.Process]]:
        with hold_port(0) as held:
            port = held.getsockname()[1]
            server = start(HEALTHY, str(port), str(tmp_path / "pids"), *args, port=port)
            server.wait_ready()
        pids = [server.guard_pid, *json.loads((tmp_path / "pids").read_text())]
        return server, [psutil.Process(pid) for pid in pids]

    return begin


def assert_gone(processes: list[psutil.Process], seconds: float = 20.0) -> None:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    assert not alive


def test_stop_ends_every_process_and_may_be_repeated(healthy: Callable) -> None:
    server, processes = healthy()
    assert server.running
    server.stop()
    assert not server.running
    assert_gone(processes)
    server.stop()


# As vLLM's API server: its engine is another process, without which it ends by itself.
WITH_AN_ENGINE = """
import subprocess, sys
engine = subprocess.Popen([sys.executable, "-S", "-c", "kept = []\\nwhile True: input(); kept.append(bytes(2**20))"],
                          stdin=subprocess.PIPE, text=True)
with open(sys.argv[1] + ".part", "w") as f:
    f.write(str(engine.pid))
import os, time
os.rename(sys.argv[1] + ".part", sys.argv[1])
try:
    while engine.poll() is None:
        engine.stdin.write("\\n")
        engine.stdin.flush()
        time.sleep(0.1)
except BrokenPipeError:
    engine.wait()
sys.exit(3)
"""


def test_a_server_whose_engine_the_kernel_killed_for_memory_says_so(start: Start, tmp_path: Path) -> None:
    pids = tmp_path / "engine"
    with memory_group(NOTHING) as group:
        server = start(WITH_AN_ENGINE, str(pids))
        assert "the kernel" not in str(server.failure("is well"))
        while not pids.exists():
            assert server.running, server.failure("has ended")
            time.sleep(0.02)
        group.add(int(pids.read_text()))
        assert server.ends_within(20)
        assert group.kills() == 1
    message = str(server.failure("takes no connections"))
    assert message.startswith("the inference server takes no connections (it has ended with exit status 3); the kernel has ")
    assert (
        "killed a process for memory since this was started" in message and "oom_kill" in message and "more memory" in message
    )


def test_an_argument_that_the_engine_does_not_know_is_named_with_its_key(start: Start) -> None:
    code = "import argparse; parser = argparse.ArgumentParser('api_server.py'); parser.parse_args(['--max-modl-len', '5'])"
    server = start(code)
    assert server.ends_within(20)
    message = str(server.failure("has ended"))
    said = "refuses rollout.server.extra_args: unrecognized arguments: --max-modl-len 5; its log: "
    assert said in message and "usage" not in message


def test_a_command_that_exits_is_an_error_with_the_end_of_its_log(start: Start, tmp_path: Path) -> None:
    code = (
        "print('\\n'.join(f'line {i}' for i in range(50))); print('ValueError: no such model');"
        "print('nanobind: leaked 64 types!\\n - leaked type \"triton._C\"\\n - ... skipped remainder'); raise SystemExit(3)"
    )
    server = start(code)
    with pytest.raises(RolloutError) as caught:
        server.wait_ready()
    lines = str(caught.value).splitlines()
    assert "could not start (it has ended with exit status 3)" in lines[0]
    assert str(tmp_path / "logs" / "server.log") in lines[0]
    assert lines[1:] == [f"line {i}" for i in range(31, 50)] + ["ValueError: no such model"]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> float:
    """A start is stuck after 2 s instead of 300 s. Returns the time limit of a start that belongs to it."""
    monkeypatch.setattr(server_module, "STUCK_SECONDS", 2.0)
    monkeypatch.setattr(progress, "LOOK_SECONDS", 0.5)
    return 6 * server_module.STUCK_SECONDS


def test_a_stuck_start_is_found_long_before_its_time_limit(start: Start, impatient: float) -> None:
    server = start("print('waiting for a peer'); import time; time.sleep(600)", ready_seconds=impatient)
    with pytest.raises(RolloutError, match=r"stuck in its start: for \d s its log did not grow .*\n(.*\n)*waiting for a peer"):
        server.wait_ready()


WORK = {"a log that grows": "print('.')", "CPU time": "sum(range(10**6))"}


@pytest.mark.parametrize("work", WORK)
def test_a_start_that_makes_progress_has_its_whole_time_limit(work: str, start: Start, impatient: float) -> None:
    server = start(f"import time\nwhile 1: {WORK[work]}; time.sleep(0.01)", ready_seconds=impatient)
    with pytest.raises(RolloutError, match=r"not ready after 12 s: http://\S+/health did not answer with 200; raise rollout"):
        server.wait_ready()
