"""A real run, and what another machine and another user of this one can do to it: nothing.

The sockets are listed while the run lives, so that the test covers whatever the package opens.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests import hosts
from tests.e2e.attacker import Targets
from tests.e2e.conftest import MARK, ROOT, Command, commands, settings
from tests.e2e.test_secrets import keys_of_servers
from tests.hosts import Host
from tests.listening import Listener, Watch, listeners
from tests.living_folder import files_below, paths_below
from tests.recorded import step_records, steps_taken
from tests.server.test_engines import CONTROLS

pytestmark = [pytest.mark.server, pytest.mark.e2e, pytest.mark.full]
NOBODY = 65534
ATTACKS = 60  # at least
SERVERS = "servers"  # the rendezvous folder
PAGES = ("", "runs", "runs/0/samples", "runs/0/tokens", "runs/0/audit?step=1&token=0:0", "../../etc/passwd")
SHORT = {
    "training__steps": 500, "training__minibatch_prompts": 4, "rollout__prompts_per_step": 8, "rollout__samples_per_prompt": 2,
    "rollout__filter_uniform_groups": "false", "rollout__max_response_tokens": 8, "rollout__record": "true", "parallel__tp": 2,
    "checkpoint__every": 5, "evaluation__max_problems": 8, "name": "attacked",
}  # fmt: skip


@pytest.fixture
def folder() -> Iterator[Path]:
    """Everybody may enter it, unlike pytest's own."""
    made = Path(tempfile.mkdtemp(prefix="tepo-attacked-"))
    made.chmod(0o755)
    (made / "canary").mkdir()
    (made / "canary").chmod(0o1777)
    yield made
    shutil.rmtree(made, ignore_errors=True)  # a run that the test could not end still writes there


@pytest.fixture
def two() -> Iterator[tuple[Host, Host]]:
    """The first one's name leads to its address on the link, as on a cluster: what binds to the name can be reached."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    if why := hosts.missing():
        pytest.skip(why)
    with hosts.two_hosts() as (ours, other), tempfile.NamedTemporaryFile("w", suffix=".hosts") as names:
        names.write(f"127.0.0.1 localhost\n{ours.address} {socket.gethostname()}\n")
        names.flush()
        ours.call("mount", "--bind", names.name, "/etc/hosts")
        yield ours, other


def attack(host: Host, user: int, targets: Targets) -> list[dict[str, Any]]:
    """Return what `tests.e2e.attacker` printed."""
    words = [sys.executable, "-m", "tests.e2e.attacker", str(user), json.dumps(asdict(targets))]
    env = {name: value for name, value in os.environ.items() if name != MARK}
    done = subprocess.run([*host.enter, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def pids_of(*processes: Command) -> list[int]:
    return [int(line.split()[0]) for process in processes for line in process.left_over()]


def targets_of(found: set[Listener], pids: list[int], run: Path, canary: Path, engine: str, page: int) -> Targets:
    ports = sorted({one.port for one in found if one.kind == "tcp"})
    scratch = {str(path) for root in ("/dev/shm", "/tmp") for path in Path(root).glob("tepo-*") if path != run.parents[1]}
    files = [str(path) for path in files_below(run)[:12]]
    return Targets(
        host="127.0.0.1",
        ports=ports,
        server=servers_of(found)[0],
        link=link_port(canary.parent),
        metrics=metrics_port(run),
        routes=list(CONTROLS[engine]),
        page=page,
        pages=["/", "/runs", *(f"/{'A' * 32}/{route}" for route in PAGES)],
        sockets=sorted({one.address for one in found if one.kind == "unix" and one.address}),
        files=files,
        folders=[str(run), str(run.parent), *sorted(scratch)[:12]],
        pids=pids[:6],
        canary=str(canary),
    )


def metrics_port(run: Path) -> int | None:
    path = run / "metrics_targets.json"
    return int(json.loads(path.read_text())[0]["targets"][0].rpartition(":")[2]) if path.exists() else None


def link_port(folder: Path) -> int | None:
    path = folder / "servers" / "run.json"
    return int(json.loads(path.read_text())["port"]) if path.exists() else None


def servers_of(found: set[Listener]) -> list[int]:
    return sorted(one.port for one in found if one.kind == "tcp" and "--port" in one.process and f" {one.port}" in one.process)


@pytest.mark.parametrize(
    ("engine", "transport", "keys"),
    [
        ("vllm", "shm", {"rollout__max_staleness": 1}),
        ("sglang", "group", {"rollout__servers": 2}),
        ("vllm", "ipc", {"rollout__colocate": "true"}),
        ("vllm", "shm", {"rollout__function": "examples/agents/calculator.py:calculator"}),
        ("vllm", "shm", {"logging__metrics_port": 0}),
        ("vllm", "shm", {"rollout__colocate": "true", "rollout__server__rendezvous": SERVERS}),
    ],
    ids=["vllm-shm-ahead", "sglang-group-2-servers", "vllm-ipc-colocated", "vllm-shm-gateway", "vllm-shm-metrics", "served"],
)
def test_no_attack_from_another_host_or_user_succeeds(
    folder: Path, two: tuple[Host, Host], random_model: Path, tmp_path: Path, engine: str, transport: str, keys: dict[str, Any]
) -> None:
    ours, other = two
    run = folder / "runs" / "attacked"
    served = "rollout__server__rendezvous" in keys
    keys = {name: str(folder / SERVERS if value == SERVERS else value) for name, value in keys.items()}
    servers = int(keys.get("rollout__servers", 1))
    words = settings(random_model, output=folder / "runs", rollout__engine=engine, sync__transport=transport, **SHORT, **keys)
    with commands(tmp_path) as start:
        command = start("train", "examples/demo.yaml", *words, by=[*ours.enter, sys.executable])
        command.until(run.is_dir, timeout=240)
        live = start("watch", run, by=[*ours.enter, sys.executable])
        servings = [start("serve", "examples/demo.yaml", *words, by=[*ours.enter, sys.executable])] if served else []
        processes = [command, *servings]
        with Watch(lambda: pids_of(*processes, live)) as watch:
            command.until(lambda: steps_taken(run) >= 2, timeout=240)
            live.until(lambda: "http://" in live.output, timeout=60)
            url = urlsplit(live.output.split()[0])
            pids = pids_of(*processes)
            found = listeners(pids + pids_of(live))
            local = targets_of(found, pids_of(live) + pids, run, folder / "canary", engine, int(url.port or 0))
            secrets = keys_of_servers(line for process in processes for line in process.left_over())
            assert len(secrets) == servers, "keys, which the test can read and others must not"
            if "logging__metrics_port" in keys:
                secrets |= {(run / "metrics.key").read_text().strip()}
            secrets |= {url.path.strip("/")}
            assert url.port in local.ports and len(url.path.strip("/")) >= 32
            rows = [("this machine, another user", row) for row in attack(ours, NOBODY, local)]
            routes = replace(local, ports=[], sockets=[], files=[], folders=[], pids=[])
            for port in servers_of(found)[1:]:
                rows += [(f"port {port}, another user", row) for row in attack(ours, NOBODY, replace(routes, server=port))]
            far = replace(local, host=ours.address, sockets=[], files=[], folders=[], pids=[])
            rows += [("another machine", row) for row in attack(other, 0, far)]
            suspicious = [(where, row) for where, row in rows if row["succeeded"] or any(key in row["read"] for key in secrets)]
            won = [(where, row["name"], row["result"]) for where, row in suspicious]
            for where, row in rows:
                print(f"{row['name'][:80]:80} | {where:26} | {row['result'][:60]}{' | SUCCEEDED' if row['succeeded'] else ''}")
            print(f"{len(rows)} attacks, {len(won)} succeeded")
            canaries = sorted(path.name for path in (folder / "canary").iterdir())
            assert canaries == [], "code ran"
            assert won == []
            before = steps_taken(run)
            command.until(lambda: steps_taken(run) >= before + 2, timeout=60)
            lines = [line for process in (*processes, live) for line in process.left_over()]
        for process in (live, *processes):
            process.process.kill()
    assert len(rows) >= ATTACKS
    assert not any(key in line for line in lines for key in secrets)
    assert not [path for path in paths_below(folder) if path.name.startswith("planted") or path.suffix == ".moved"]
    records = step_records(run)
    assert [r["step"] for r in records] == list(range(1, len(records) + 1))
    assert all(r["rollout/logprob_diff_mean"] <= 1e-5 for r in records), "weights were changed"
    assert [one for one in reached_from_outside(watch) if one.port != local.link] == []
    for serving in servings:
        assert serving.output.count("connected to the run") == 1 and "is started again" not in serving.output


def reached_from_outside(watch: Watch) -> list[Listener]:
    """Sockets that another machine, or by their path another user, could reach at some time of the run's life."""
    return sorted(one for one in watch.public if one.kind == "unix" or not one.is_loopback)


def test_the_list_of_sockets_sees_what_is_open(tmp_path: Path) -> None:
    """Open one socket of each kind in this process: without this check, the test above could not fail."""
    tmp_path.chmod(0o700)
    private, public = str(tmp_path / "private"), f"\0tepo-test-{os.getpid()}"
    with (
        socket.create_server(("0.0.0.0", 0)) as everywhere,
        socket.create_server(("127.0.0.1", 0)) as here,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as abstract,
        Watch(lambda: [os.getpid()]) as watch,
    ):
        datagrams.bind(("0.0.0.0", 0))
        for door, address in ((named, private), (abstract, public)):
            door.bind(address)
            door.listen()
        ports = {one.getsockname()[1]: one for one in (everywhere, here, datagrams)}
        deadline = time.monotonic() + 60
        wanted = {private, "@" + public[1:]}
        while not ({one.port for one in watch.found} >= ports.keys() and {one.address for one in watch.found} >= wanted):
            assert time.monotonic() < deadline, watch.found
            time.sleep(0.05)
    outside = reached_from_outside(watch)
    seen = {one.port or one.address for one in outside}
    assert {everywhere_port for everywhere_port, door in ports.items() if door is not here} | {"@" + public[1:]} <= seen
    assert private not in seen and next(port for port, door in ports.items() if door is here) not in seen
