"""Nobody gets into a run of one machine through launcher or ranks: what they listen on, and what another user can reach.

Servers and routes have tests of their own.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.test_faults import SHORT
from tests.listening import Watch
from tests.living_folder import files_below

pytestmark = pytest.mark.e2e
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

# This Python may lie where nobody else can execute it: it starts as root, and becomes another user at once.
BECOME = f"import os; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})"
# As another user: read, replace, extend or remove the messages between the ranks of a run. Prints what succeeded.
INTRUDER = """
import sys
from pathlib import Path
folder = Path(sys.argv[1])
attempts = {
    "list": lambda: os.listdir(folder),
    "rename": lambda: folder.rename(folder.with_name("mine")),
    "chmod": lambda: folder.chmod(0o777),
    "new": lambda: (folder / "new").write_text(""),
    "link": lambda: os.link(folder / "store", "/tmp/tepo-test-link"),
    **{f"read {name}": (lambda name=name: (folder / name).read_bytes()) for name in sys.argv[2:]},
    **{f"write {name}": (lambda name=name: (folder / name).open("r+b")) for name in sys.argv[2:]},
    **{f"remove {name}": (lambda name=name: (folder / name).unlink()) for name in sys.argv[2:]},
}
for name, attempt in attempts.items():
    try:
        attempt()
    except PermissionError:
        continue
    print(name)
print(len(attempts), "attempts")
"""


@pytest.mark.full
@needs_root
def test_a_run_listens_on_loopback_alone_and_another_user_reaches_nothing(
    tepo, arguments, random_model: Path, tmp_path: Path
) -> None:
    overrides = SHORT | {"training__steps": 6, "parallel__tp": 1, "parallel__dp": 2, "data__eval": "null", "export_hf": "false"}
    command = tepo(*arguments(random_model, **overrides, name="quiet"), engine="slow")
    with Watch(lambda: [int(line.split()[0]) for line in command.left_over()]) as watch:
        command.until(lambda: "actor built" in command.output, timeout=90)
        found = re.findall(r"\S+/tepo-ranks-[0-9a-f]{16}/attempt-0", "\n".join(command.left_over()))  # in the ranks' arguments
        (folder,) = {Path(path) for path in found}
        assert folder.parent.parent == Path(tempfile.gettempdir())
        command.until(lambda: len(list((folder / "heartbeats").iterdir())) == 2, timeout=60)
        names = [str(path.relative_to(folder)) for path in files_below(folder)]
        assert {"store", "config.yaml"} <= set(names) and any("heartbeats" in name for name in names)
        before = (folder / "config.yaml").read_bytes()
        attack = subprocess.run(
            [sys.executable, "-c", "import pathlib; " + BECOME + INTRUDER, folder, *names],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert attack.returncode == 0, attack.stderr
        assert attack.stdout.splitlines() == [f"{5 + 3 * len(names)} attempts"]  # none succeeded
        assert (folder / "config.yaml").read_bytes() == before
        assert command.wait(120) == 0, command.output
    records = (tmp_path / "runs" / "quiet" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in records] == [1, 2, 3, 4, 5, 6]
    listened = {one for one in watch.found if one.kind == "tcp"}
    assert not {one for one in listened if not one.is_loopback} and watch.looks > 10
    assert any("trainer.worker" in one.process for one in listened), "gloo's sockets were not seen"
    assert not folder.parent.exists()
    command.assert_nothing_left()


# A rank that waits for its peer, and then asks who came.
RANK = """
import datetime, os, sys, time
import torch, torch.distributed as dist
from tepo_megatron.dist.own_peers import own_peers_only

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
folder, rank = sys.argv[1], int(sys.argv[2])
store = dist.FileStore(folder + "/store", 2)
try:
    with own_peers_only():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=30))
    print("formed", flush=True)
    time.sleep(60 if rank else 0)
except RuntimeError as e:
    print(type(e).__name__, e, flush=True)
os._exit(0)
"""
# Another user who claims to be that peer: gloo's handshake is a number, counted from 0.
IMPOSTOR = """
import socket, struct, sys, time
held = []
for number in range(8):
    held.append(socket.create_connection(("127.0.0.1", int(sys.argv[1])), 10))
    held[-1].sendall(struct.pack("<q", number))
print("connected", flush=True)
time.sleep(60)
"""


@needs_root
@pytest.mark.parametrize("attacked", [True, pytest.param(False, marks=pytest.mark.full)])
def test_another_user_in_the_place_of_a_rank_is_noticed_before_anything_is_sent(tmp_path: Path, attacked: bool) -> None:
    started: list[subprocess.Popen[str]] = []

    def start(*words: object) -> subprocess.Popen[str]:
        started.append(subprocess.Popen([sys.executable, "-c", *map(str, words)], stdout=subprocess.PIPE, text=True))
        return started[-1]

    try:
        first = start(RANK, tmp_path, 0)
        deadline = time.monotonic() + 120
        while not (doors := _doors(first.pid)):
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        if attacked:
            impostor = start("import encodings.idna, socket, struct, sys, time; " + BECOME + IMPOSTOR, doors[0])
            assert impostor.stdout is not None and impostor.stdout.readline() == "connected\n"
        start(RANK, tmp_path, 1)
        said = first.communicate(timeout=180)[0]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    if attacked:
        assert said.startswith((f"ForeignPeer user {NOBODY} of this machine connected to a process group", "RuntimeError"))
        assert "formed" not in said.splitlines()
    else:
        assert said == "formed\n"


def _doors(pid: int) -> list[int]:
    return [s.laddr.port for s in psutil.Process(pid).net_connections(kind="inet") if s.status == psutil.CONN_LISTEN]
