"""A Ray cluster whose machines are all this one: a head and nodes as our children, each with what it started in one folder."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from launch.ray_plan import OF_RAY
from tepo_megatron.utils.processes import die_with_parent
from tests.launch.cases import PYTHON
from tests.slurm import free_port

MARK = "TEPO_TEST_RAY"  # environment variable of every process of a machine: the cluster and the machine
RAY = PYTHON.with_name("ray")
# seconds, not minutes, until a dead machine is noticed
_NOTICE = {"RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "4000"}
_NOTICE |= {"RAY_health_check_failure_threshold": "4", "RAY_raylet_start_wait_time_s": "120"}


@dataclass
class Cluster:
    """A Ray cluster on this machine.

    Attributes:
        folder: Folder of its files, with a short path, since Ray creates sockets in it.
        stack: Exit stack that ends its processes.
    """

    folder: Path
    environment: dict[str, str]
    stack: contextlib.ExitStack
    port: int = field(default_factory=free_port)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """Address of the head."""
        return f"127.0.0.1:{self.port}"

    def marked(self, machine: str) -> dict[str, str]:
        """Return the environment of that machine, with this Python first on its PATH."""
        own = {MARK: f"{self.mark}-{machine}", "RAY_ADDRESS": self.address, "PATH": f"{RAY.parent}:{os.environ['PATH']}"}
        return {**os.environ, **self.environment, **_NOTICE, **OF_RAY, **own}

    def boot(self, machine: str) -> None:
        """Start a node and wait until it is up; "head" comes first.

        Two nodes that start at once would choose the same names.
        """
        head = ["--head", "--port", str(self.port), "--include-dashboard", "false", "--temp-dir", str(self.folder)]
        where = head if machine == "head" else ["--address", self.address]
        ports = ["--min-worker-port", "0", "--max-worker-port", "0", "--dashboard-agent-listen-port", str(free_port())]
        small = ["--num-cpus", "0", "--object-store-memory", "80000000", "--disable-usage-stats"]
        log = self.folder.parent / f"{machine}.log"
        with log.open("w") as out:
            self.nodes[machine] = subprocess.Popen(
                [RAY, "start", "--block", "--node-ip-address", "127.0.0.1", *where, *ports, *small],
                env=self.marked(machine), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )  # fmt: skip
        self.stack.callback(self.kill, machine)
        deadline = time.monotonic() + 120
        while "Ray runtime started" not in log.read_text():
            assert time.monotonic() < deadline and self.nodes[machine].poll() is None, self.logs()
            time.sleep(0.1)

    def raylet(self, machine: str) -> int:
        """Return the raylet process of a machine."""
        (pid,) = (pid for pid, line in self.processes(machine).items() if line.split()[0].endswith("/raylet"))
        return pid

    def processes(self, machine: str = "") -> dict[int, str]:
        """Return the command lines of the processes of a machine, or of all machines."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{MARK}={self.mark}-{machine}".encode() in (folder / "environ").read_bytes():
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    if line:  # one that has ended has none
                        found[int(folder.name)] = line
        return found

    def kill(self, machine: str) -> None:
        """Kill all processes of a machine with SIGKILL, Ray's first, so that none can report the loss."""
        deadline = time.monotonic() + 20
        while found := self.processes(machine):
            assert time.monotonic() < deadline, found
            for pid in sorted(found):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        self.nodes[machine].wait(10)

    def logs(self) -> str:
        """Return the last lines that each `ray start` printed."""
        return "\n".join(f"== {p.name}\n{p.read_text()[-1500:]}" for p in sorted(self.folder.parent.glob("*.log")))


@contextlib.contextmanager
def running(folder: Path, machines: int, environment: dict[str, str]) -> Iterator[Cluster]:
    """Run a head and the machines m0, m1, ... until the end of the block. Fail if one of their processes is left then.

    Args:
        folder: Folder of the cluster's files.
        machines: Number of machines without the head.
        environment: Further environment variables of all machines.
    """
    place = folder / "r"
    place.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        cluster = Cluster(place, environment, stack)
        for machine in ("head", *(f"m{i}" for i in range(machines))):
            cluster.boot(machine)
        try:
            yield cluster
        finally:
            stack.close()
            left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if _names(path, str(place))]
            assert not left and not cluster.processes(), left
            shutil.rmtree(place)


def _names(path: Path, folder: str) -> bool:
    try:
        return folder.encode() in path.read_bytes()
    except OSError:
        return False
