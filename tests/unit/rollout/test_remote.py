"""Servers that others start: found, given weights, lost, found again and given back, and in turns with the trainer.

Real processes behind real HTTP.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import yaml

from tepo_megatron.base.errors import ConfigError, RolloutError
from tepo_megatron.config import Config, RolloutConfig, ServerConfig
from tepo_megatron.config.io import validate
from tepo_megatron.engines import engines
from tepo_megatron.engines.engine import INITIAL_VERSION, UNKNOWN_VERSION
from tepo_megatron.engines.engine_api import LaunchSpec
from tepo_megatron.engines.servers import slot
from tepo_megatron.engines.servers.fleet import Fleet
from tepo_megatron.engines.servers.rendezvous import (
    ADDRESS_FILE,
    KEY_FILE,
    KEY_VARIABLE,
    RunAddress,
    create,
    make_key,
    read_address,
    write_address,
)
from tepo_megatron.engines.servers.server import LocalServer
from tests.scripted_api import ScriptedApi
from tests.unit.rollout.test_fleet import PROMPTS, SAMPLING, ids
from tests.unit.rollout.test_sleep import released
from tests.waiting import until

KEY = "a-key-for-the-tests-alone"
OWN_SETTINGS: dict[str, Any] = {"heartbeat_timeout": 20.0, "ready_seconds": 60, "concurrency": 4}


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines.ENGINES, "vllm", ScriptedApi)  # type: ignore[arg-type]
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.setattr(slot, "BACKOFF_SECONDS", 0.05)


def model_in(folder: Path) -> Path:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text('{"hidden_size": 8}')
    return folder / "model"


def launch_of(folder: Path, **change: Any) -> LaunchSpec:
    settings = {"max_model_len": 64, "platform": "cpu", "precision": "fp32", "seed": 0} | change
    return LaunchSpec(model_in(folder), **settings)


@contextmanager
def trainer(
    folder: Path, run: str = "run", servers: int = 1, only: bool = False, colocate: bool = False, **server: Any
) -> Iterator[Fleet]:
    """A fleet of servers that others start, ready."""
    cfg = RolloutConfig(servers=servers, only=only, colocate=colocate, server=cast(Any, OWN_SETTINGS | server))
    with engines.build_engine(cfg, launch_of(folder), folder / run / "server.log") as fleet:
        fleet.start()
        fleet.wait_ready()
        yield fleet


@dataclasses.dataclass
class Serving:
    process: subprocess.Popen[bytes]
    folder: Path
    log: Path

    def ready(self) -> list[str]:
        """Return the URL of each start of a server that came up, in order."""
        return re.findall(r"is ready: (\S+)", self.log.read_text())

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def lines(self) -> dict[int, list[str]]:
        """The command lines of those that have not ended meanwhile."""
        found = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                found[process.pid] = process.cmdline()
        return found


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Callable[..., Serving]]:
    """Starts `tepo serve`, and ends it after the test."""
    started: list[Serving] = []

    def start(servers: int, colocate: bool = False, **server: Any) -> Serving:
        folder = tmp_path / "rendezvous"
        tree = {
            "name": "served",
            "platform": "cpu",
            "model": {"path": str(model_in(tmp_path)), "precision": "fp32"},
            "data": {"train": "t", "max_prompt_tokens": 32},
            "rollout": {"servers": servers, "max_response_tokens": 32, "colocate": colocate, "server": OWN_SETTINGS | server},
            "sync": {"transport": {"folder": str(tmp_path)}},
        }
        tree["rollout"]["server"] |= {"rendezvous": str(folder)}  # type: ignore[index]
        (tmp_path / "serve.yaml").write_text(yaml.safe_dump(tree))
        log = tmp_path / f"serve-{len(started)}.txt"
        command = [sys.executable, "-m", "tests.scripted_serve", str(tmp_path / "serve.yaml"), "127.0.0.2"]
        with log.open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        started.append(Serving(process, folder, log))
        return started[-1]

    yield start
    for serve in started:
        serve.process.terminate()
        try:
            serve.process.wait(60)
        finally:
            serve.process.kill()


KILLED = """
import json, os, signal, sys
from pathlib import Path
from tepo_megatron.engines import engines
from tests.scripted_api import ScriptedApi
from tests.unit.rollout.test_remote import trainer

engines.ENGINES["vllm"] = ScriptedApi
with trainer(Path(sys.argv[1]), **json.loads(sys.argv[2])) as fleet:
    {"update": lambda: fleet.begin_update(5), "sleep": fleet.sleep}[sys.argv[3]]()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_trainer(folder: Path, settings: dict[str, Any], after: str) -> None:
    """A `trainer` in a process of its own, which is killed `after` it has begun an "update", or put its servers to "sleep"."""
    command = [sys.executable, "-c", KILLED, str(folder), json.dumps(settings), after]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def server_process(serving: Serving, url: str) -> psutil.Process:
    port = url.rpartition(":")[2]
    return next(psutil.Process(pid) for pid, line in serving.lines().items() if "tests.scripted_server" in line
                and port in line[-2:] and "tepo_megatron.engines.servers.guard" not in line)  # fmt: skip


@pytest.mark.full
def test_servers_are_found_killed_found_again_and_start_again_for_the_next_run(
    serving: Callable[..., Serving], tmp_path: Path
) -> None:
    serve = serving(servers=2)
    with trainer(tmp_path, servers=2, rendezvous=str(serve.folder)) as fleet:
        before = serve.ready()
        assert len(before) == 2 and all(url.startswith("http://127.0.0.2:") for url in before)
        fleet.update_weights([], version=3)
        expected = ids(fleet.generate(PROMPTS, SAMPLING, seed=7))
        server_process(serve, before[0]).kill()
        until(lambda: fleet.needs_weights)
        assert len(ids(fleet.generate(PROMPTS, SAMPLING, seed=7))) == len(expected)  # by the other one
        fleet.update_weights([], version=4)
        rollouts = fleet.generate(PROMPTS, SAMPLING, seed=7)
        assert ids(rollouts) == expected and {r.policy_version for r in rollouts} == {4}
        assert len(serve.ready()) == 3
        with (
            pytest.raises(ConfigError, match=r"is used by the run .*/run; wait for its end"),
            trainer(tmp_path, run="another", rendezvous=str(serve.folder)),
        ):
            pass
        assert {r.policy_version for r in fleet.generate(PROMPTS, SAMPLING, seed=7)} == {4}
    # other starts, with their first weights, for any other run
    with trainer(tmp_path, run="another", servers=2, rendezvous=str(serve.folder)) as fleet:
        assert len(serve.ready()) == 5 and not fleet.needs_weights
        assert {r.policy_version for r in fleet.generate(PROMPTS, SAMPLING, seed=7)} == {INITIAL_VERSION}

    key_file = serve.folder / KEY_FILE
    key = key_file.read_text().strip()
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    processes = serve.processes()
    assert not any(key in word for line in serve.lines().values() for word in line)
    assert not any(key in path.read_text() for path in [serve.log, *serve.folder.glob("*.log")])
    serve.process.send_signal(signal.SIGTERM)
    assert serve.process.wait(60) == 0, serve.log.read_text()
    assert not psutil.wait_procs(processes, timeout=20)[1]
    assert {path.name for path in serve.folder.iterdir() if path.suffix != ".log"} == {KEY_FILE}


@pytest.mark.full
def test_a_server_that_a_killed_run_left_half_way_starts_again(serving: Callable[..., Serving], tmp_path: Path) -> None:
    """The next run replaces the address that the killed one left."""
    serve = serving(servers=1)
    settings: dict[str, Any] = {"rendezvous": str(serve.folder)}
    killed_trainer(tmp_path, settings, after="update")
    assert (serve.folder / ADDRESS_FILE).exists()
    with trainer(tmp_path, run="another", **settings) as fleet:
        assert len(serve.ready()) == 2
        assert fleet.version == INITIAL_VERSION and not fleet.needs_weights
        fleet.update_weights([], version=5)  # half an update would refuse another one
        assert {r.policy_version for r in fleet.generate(PROMPTS, SAMPLING, seed=7)} == {5}


@pytest.mark.full
def test_the_servers_of_a_killed_tepo_serve_end_and_those_of_another_take_their_place(
    serving: Callable[..., Serving], tmp_path: Path
) -> None:
    serve = serving(servers=1)
    with trainer(tmp_path, rendezvous=str(serve.folder)) as fleet:
        fleet.update_weights([], version=1)
        processes = serve.processes()
        serve.process.kill()
        assert len(processes) >= 2 and not psutil.wait_procs(processes, timeout=5)[1]
        serving(servers=1)
        until(lambda: fleet.needs_weights)
        fleet.update_weights([], version=2)
        assert versions(fleet) == {2}


@pytest.mark.full
def test_a_server_that_does_not_fit_or_is_missing_is_named_with_its_reason(
    serving: Callable[..., Serving], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = serving(servers=1)
    settings: dict[str, Any] = {"rendezvous": str(serve.folder)}
    misfit = r"http://127\.0\.0\.2:\d+ \(of pid \d+ on .*, log .*\): it has 1 tensor-parallel ranks, and rollout\.server\.tp=2"
    with pytest.raises(RolloutError, match=misfit), trainer(tmp_path, tp=2, **settings):
        pass
    assert len(serve.ready()) == 1  # no weights were sent, so it goes on
    settings["ready_seconds"] = 3
    with trainer(tmp_path, servers=2, **settings) as fleet:
        (lost,) = (str(slot.lost) for slot in fleet.slots if slot.lost is not None)  # whichever was slower
        assert re.search(r"no free server in rollout\.server\.rendezvous=.*http://127", lost)
    monkeypatch.setenv(KEY_VARIABLE, "another-key-for-this-run")
    with pytest.raises(RolloutError, match=r"does not know the key.*TEPO_SERVER_KEY"), trainer(tmp_path, **settings):
        pass


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder, and the URL of a server with KEY that nobody keeps."""
    folder = tmp_path_factory.mktemp("one")
    server = LocalServer("it", ScriptedApi(), ServerConfig(), launch_of(folder, host="127.0.0.2"), folder / "log", KEY)
    server.launch()
    yield folder, asyncio.run(server.wait_ready()).url
    server.stop()
    server.forget()


@pytest.mark.slow
def test_weights_of_another_run_are_never_taken_for_the_first_ones(
    one: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, url = one
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with trainer(folder, urls=[url]) as earlier:
        assert {r.policy_version for r in earlier.generate(PROMPTS[:2], SAMPLING, seed=0)} == {INITIAL_VERSION}
        earlier.update_weights([], version=0)
    with trainer(folder, urls=[url]) as later:
        assert later.slots[0].endpoint.version == UNKNOWN_VERSION and later.needs_weights
        later.update_weights([], version=0)  # the same number, other weights
        assert not later.needs_weights
        assert {r.policy_version for r in later.generate(PROMPTS[:2], SAMPLING, seed=0)} == {0}
    with (
        trainer(folder, urls=[url], only=True) as sampler,
        pytest.raises(RolloutError, match=r"rollout\.only=true samples with the weights of model\.path, and .* serves others"),
    ):
        sampler.generate(PROMPTS[:1], SAMPLING, seed=0)


def test_all_who_make_a_key_at_once_get_the_same(tmp_path: Path) -> None:
    made: list[str] = []
    makers = [threading.Thread(target=lambda: made.append(make_key(tmp_path))) for _ in range(16)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert len(made) == 16 and len(set(made)) == 1
    assert [path.name for path in tmp_path.iterdir()] == [KEY_FILE]
    tmp_path.chmod(0o770)
    with pytest.raises(ConfigError, match="others can write in it"):
        create(tmp_path)
    tmp_path.chmod(0o750)
    (tmp_path / KEY_FILE).chmod(0o640)
    with pytest.raises(ConfigError, match="others can read it"):
        make_key(tmp_path)


NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def stranger_owns(folder: Path) -> None:
    os.chown(folder, NOBODY, NOBODY)


def led_elsewhere(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


UNSAFE = {
    "group may write": (lambda folder: folder.chmod(0o770), "others can write in it"),
    "all may write": (lambda folder: folder.chmod(0o1777), "others can write in it"),
    "another's": (stranger_owns, f"belongs to user {NOBODY}"),
    "a link": (led_elsewhere, "is a symbolic link"),
    "another's address": (lambda folder: stranger_owns(folder / ADDRESS_FILE), f"json: belongs to user {NOBODY}"),
    "another's key": (lambda folder: stranger_owns(folder / "key"), f"key: belongs to user {NOBODY}"),
    "a linked key": (lambda folder: led_elsewhere(folder / "key"), "key: is a symbolic link"),
}


@as_root
@pytest.mark.parametrize("fault", UNSAFE)
def test_a_rendezvous_that_others_can_change_is_refused(fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is refused before a request that holds the key is sent anywhere, even where the key comes from the environment."""
    spoil, complaint = UNSAFE[fault]
    folder = tmp_path / "rendezvous"
    create(folder)
    make_key(folder)
    write_address(folder, RunAddress("r", ["127.0.0.1"], 9))
    assert read_address(folder) is not None
    spoil(folder)
    if "key" not in fault:
        monkeypatch.setenv("TEPO_SERVER_KEY", "k" * 32)
    with pytest.raises(ConfigError, match=complaint):
        if "key" not in fault:
            read_address(folder)
        make_key(folder)


@pytest.mark.parametrize("bad", ["", "short", "with a space in the middle", "not-ascii-enough-ü"])
def test_a_key_that_protects_nothing_is_refused(bad: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(KEY_VARIABLE, bad)
    with pytest.raises(ConfigError, match=KEY_VARIABLE):
        make_key(tmp_path)


def test_no_server_starts_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from tepo_megatron.wire.receiver.vllm_middleware import API_KEY_VARIABLE, RequireKey

    for key in (None, ""):
        monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
        if key is not None:
            monkeypatch.setenv(API_KEY_VARIABLE, key)
        with pytest.raises(RuntimeError, match="without a key"):
            RequireKey(None)  # type: ignore[arg-type]
        env = dict(os.environ) | ({} if key is None else {"TEPO_SGLANG_KEY": key})
        command = [sys.executable, "-P", "-m", "tepo_megatron.wire.receiver.sglang_server", "--host", "0.0.0.0"]
        ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
        assert ended.returncode == 1 and "without a key" in ended.stderr


def config(**server: Any) -> Config:
    sync = {"transport": {"folder": server.pop("folder", None)}}
    rollout = {name: server.pop(name) for name in ("servers", "only") if name in server} | {"server": server}
    return validate({"name": "a", "model": {"path": "m"}, "data": {"train": "t"}, "sync": sync, "rollout": rollout})


@pytest.mark.parametrize(
    ("server", "complaint"),
    [
        ({"urls": ["http://localhost:1"], "rendezvous": "r"}, "two ways to find the same servers"),
        ({"urls": ["localhost:1"]}, r"is not http\(s\)://HOST:PORT"),
        ({"urls": ["http://user:secret@localhost:1"]}, r"is not http\(s\)://HOST:PORT"),
        ({"urls": ["http://localhost:1/v1"]}, r"is not http\(s\)://HOST:PORT"),
        ({"urls": ["http://localhost:1"] * 2, "servers": 2}, "names one twice"),
        ({"urls": ["http://localhost:1", "http://localhost:2"]}, r"names 2 servers, not servers=1"),
    ],
)
def test_malformed_urls_are_refused(server: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        config(**server)


# trainer and servers in turns


BOTH_PARTS = ["weights", "kv_cache"]


def versions(fleet: Fleet) -> set[int]:
    return {r.policy_version for r in fleet.generate(PROMPTS, SAMPLING, seed=7)}


@pytest.mark.full
def test_while_ranks_have_the_devices_nothing_is_started_until_their_run_goes_on(
    serving: Callable[..., Serving], tmp_path: Path
) -> None:
    """Not when the run is killed, not for another run, and not by a `tepo serve` that begins meanwhile."""
    serve = serving(servers=2, colocate=True)
    settings: dict[str, Any] = {"colocate": True, "rendezvous": str(serve.folder)}
    with trainer(tmp_path, **settings) as fleet:
        until(lambda: len(serve.ready()) == 2)
        fleet.sleep()
        assert len(servers_of(serve)) == 1  # the other one, which the run does not use, has ended
        second = serving(servers=1, colocate=True)
        until(lambda: "connected to the run" in second.log.read_text())
        server_process(serve, fleet.slots[0].endpoint.client.url).kill()  # type: ignore[union-attr]
        until(lambda: not fleet.slots[0].up and not servers_of(serve))
        fleet.wake("weights")
        time.sleep(0.5)  # several times what a server waits before a start
        assert not servers_of(serve) + servers_of(second)
        fleet.wake("kv_cache")
        until(lambda: fleet.slots[0].up)
        fleet.update_weights([], version=1)
        assert versions(fleet) == {1}
        second.process.terminate()
        assert second.process.wait(60) == 0, second.log.read_text()
        fleet.sleep()  # one that has said that it ends is not waited for
    killed_trainer(tmp_path, settings, after="sleep")
    until(lambda: not servers_of(serve))
    with (
        pytest.raises(RolloutError, match=r"nothing is started while .*/run has the devices; if it was killed"),
        trainer(tmp_path, run="another", **settings | {"ready_seconds": 3}),
    ):
        pass
    assert not servers_of(serve)
    with trainer(tmp_path, **settings) as resumed:
        resumed.update_weights([], version=1)
        assert versions(resumed) == {1}
        resumed.sleep()
        assert released(resumed, 0) == BOTH_PARTS


def servers_of(serving: Serving) -> list[int]:
    """Return the processes of its servers."""
    return [pid for pid, line in serving.lines().items() if "tests.scripted_server" in line and "-P" not in line]
