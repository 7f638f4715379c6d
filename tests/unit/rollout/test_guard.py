"""Nothing of a server is left, whichever of its owner, guard and processes are killed."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tepo_megatron.base import scratch
from tests.waiting import until

# A server that, like vLLM with open requests, ignores SIGTERM, and an engine process that notices nothing by itself, unless it
# has the lifeline that our plugins give to those of real engines. `apart`: that one has left the server's session.
SERVER = """
import os, signal, subprocess, sys, time
from multiprocessing import resource_tracker, shared_memory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the kernel sends it to orphans one of which is stopped
_, folder, kind = sys.argv
if kind != "engine":
    quick = [] if kind == "lifeline" else ["-S"]  # without site-packages, which that one imports from
    engine = subprocess.Popen([sys.executable, *quick, sys.argv[0], folder, "engine"], start_new_session=kind == "apart",
                              env=os.environ | ({} if kind == "lifeline" else {"TEPO_SERVER_GUARD": ""}))
else:
    if os.environ["TEPO_SERVER_GUARD"]:
        from tepo_megatron.wire.receiver import lifeline
        lifeline.hold()
    segment = shared_memory.SharedMemory(create=True, size=4096)
    resource_tracker.unregister(segment._name, "shared_memory")  # as if that process had been killed, too
with open(f"{folder}/{'engine' if kind == 'engine' else 'server'}.part", "w") as file:
    file.write(f"{os.getpid()} {segment.name if kind == 'engine' else ''}")
os.rename(file.name, file.name.removesuffix(".part"))
time.sleep(300) if kind == "engine" else sys.exit(engine.wait())
"""
OWNER = """
import json, os, sys, time
from pathlib import Path
from tepo_megatron.engines.servers.process import ServerProcess
from tepo_megatron.base.scratch import PrivateFolder
from tepo_megatron.engines.servers import guard, process
process.GRACE_SECONDS = 0.2
code, out, *kinds = sys.argv[1:]
servers = []
for i, kind in enumerate(kinds):
    folder = PrivateFolder.create("served", Path(out))
    command = [sys.executable, "-S", code, str(folder.path), kind]
    servers.append((folder, ServerProcess(command, env=dict(os.environ), health_url="", log_path=Path(out) / f"{i}.log",
                                          ready_seconds=60, folder=folder.path)))
    servers[-1][1].start()
about = [[s.guard_pid, str(folder.path)] for folder, s in servers]
(Path(out) / "part").write_text(json.dumps(about))
(Path(out) / "part").rename(Path(out) / "about")
while True:
    for _, server in servers:
        server.running
    time.sleep(0.05)
"""
VICTIMS = ("owner", "guard", "server", "engine")
SUBSETS = [set(s) for n in range(1, 5) for s in itertools.combinations(VICTIMS, n)]


def kind_of(victims: set[str]) -> str:
    """The hardest engine process that still has to end: only where both others are gone has it to notice by itself."""
    if victims >= {"owner", "guard"}:
        return "lifeline"
    return "plain" if "guard" in victims else "apart"


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[psutil.Process, list[dict[str, psutil.Process]], list[Path], list[str]]]:
    """The owner of one server for each of SUBSETS; their processes; their folders; their segments of shared memory."""
    code = tmp_path / "server.py"
    code.write_text(SERVER)
    kinds = [kind_of(victims) for victims in SUBSETS]
    segments: list[str] = []
    with subprocess.Popen([sys.executable, "-c", OWNER, code, tmp_path, *kinds], start_new_session=True) as owner:
        try:
            about = json.loads(content(tmp_path / "about", owner))
            folders = [Path(folder) for _, folder in about]
            trees = []
            for (guard, _), folder in zip(about, folders, strict=True):
                engine, segment = content(folder / "engine", owner).split()
                pids = {"guard": guard, "server": int(content(folder / "server", owner)), "engine": int(engine)}
                trees.append({name: psutil.Process(pid) for name, pid in pids.items()})
                segments.append(segment)
                until(lambda: segment in content(folder / scratch.SEGMENTS, owner))  # noqa: B023
            yield psutil.Process(owner.pid), trees, folders, segments
        finally:
            owner.kill()
            for name in segments:
                (scratch.SHARED_MEMORY / name).unlink(missing_ok=True)


def content(path: Path, owner: subprocess.Popen[bytes], seconds: float = 120.0) -> str:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert owner.poll() is None and time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.02)
    return path.read_text()


def kill(victims: list[psutil.Process]) -> None:
    """All stopped first, so that none of them sees another's end."""
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for victim in victims:
            os.kill(victim.pid, signum)


@pytest.mark.slow
def test_nothing_is_left_whoever_is_killed(servers) -> None:
    owner, trees, folders, segments = servers
    alone = [i for i, victims in enumerate(SUBSETS) if "owner" not in victims]
    together = [i for i in range(len(SUBSETS)) if i not in alone]
    assert len(alone) == 7 and len(together) == 8 and all((scratch.SHARED_MEMORY / name).exists() for name in segments)
    for numbers, also in ((alone, []), (together, [owner])):
        kill([*also, *(trees[i][name] for i in numbers for name in SUBSETS[i] - {"owner"})])
        for i in numbers:
            _, alive = psutil.wait_procs(list(trees[i].values()), timeout=60)
            assert not alive, f"after the death of {SUBSETS[i]}: {alive}"
    # where a guard survived its owner it removed the folder; the next start removes the others
    until(lambda: not [i for i in together if folders[i].exists() and "guard" not in SUBSETS[i]])
    scratch.sweep(folders[0].parent)
    assert not [folder for folder in folders if folder.exists()]
    assert not [name for name in segments if (scratch.SHARED_MEMORY / name).exists()]


# A server that creates a segment of shared memory on request, and never removes it.
LATE = """
import sys
from multiprocessing import resource_tracker, shared_memory
sys.stdin.readline()
segment = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(segment._name, "shared_memory")
print(segment.name, flush=True)
sys.stdin.readline()
"""
# A guard that is killed right after it looked. The last change of the machine's segments was before SETTLE_SECONDS.
LOOKING = """
import os, subprocess, sys, time
from pathlib import Path
from tepo_megatron.engines.servers import guard
segments = guard.SharedMemorySegments(Path(sys.argv[1]))
server = subprocess.Popen([sys.executable, "-S", "-c", sys.argv[2]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
deadline = time.monotonic() + guard.SETTLE_SECONDS + 0.5
while time.monotonic() < deadline:
    segments.note_if_due()
    time.sleep(0.1)
server.stdin.write("go\\n")
server.stdin.flush()
print(server.stdout.readline(), end="", flush=True)
segments.note_if_due()
os.killpg(0, 9)
"""


@pytest.mark.slow
def test_segments_of_a_killed_guard_are_recorded_at_once_and_stay_in_the_record(tmp_path: Path) -> None:
    folder = scratch.PrivateFolder.create("served", tmp_path)
    found: list[str] = []
    try:
        for _ in range(2):  # the second server is started in the folder of the first one
            command = [sys.executable, "-c", LOOKING, str(folder.path), LATE]
            looking = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, start_new_session=True)
            assert looking.returncode == -signal.SIGKILL
            found.append(looking.stdout.strip())
            assert scratch.recorded_segments(folder.path).keys() == set(found)
        assert len(set(found)) == 2 and all((scratch.SHARED_MEMORY / name).exists() for name in found)
        folder.remove()
        assert not any((scratch.SHARED_MEMORY / name).exists() for name in found)
    finally:
        folder.remove()
        for name in found:
            (scratch.SHARED_MEMORY / name).unlink(missing_ok=True)
