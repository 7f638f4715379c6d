"""A Slurm of several machines that are all this one: its daemons as our children, its files in one folder. Needs root."""

import contextlib
import functools
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tepo_megatron.base.processes import die_with_parent
from tests.hosts import Host

PATH = os.pathsep.join(("/usr/sbin", "/sbin", os.environ.get("PATH", "")))
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
REQUEUE_SECONDS = 5  # no job is started again before the credentials of its former start expire: two minutes by default
LOST_SECONDS = 10  # without an answer of its daemon, until a machine is taken for lost: five minutes by default


def missing() -> str | None:
    """Return why there can be no Slurm here; None if there can."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if lacking:
        return f"{', '.join(lacking)} not installed (Debian: slurm-wlm, munge)"
    return None if os.geteuid() == 0 else "slurmd needs root to start tasks"


MARKS = [
    pytest.mark.full,
    pytest.mark.slurm,
    pytest.mark.e2e,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    machine: str
    line: str
    environment: dict[str, str]


@dataclass
class Slurm:
    """A Slurm of several machines.

    Attributes:
        hosts: Hosts that its machines take turns on, the controller on the first; none of them: all are this one.
    """

    folder: Path
    environment: dict[str, str]
    stack: contextlib.ExitStack
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    hosts: Sequence[Host] = ()

    @property
    def enter(self) -> tuple[str, ...]:
        """Return the prefix of a command line that is to run where the controller does."""
        return self.hosts[0].enter if self.hosts else ()

    def start(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.log").open("a") as out:
            process = self.daemons[name] = subprocess.Popen(
                command, env=self.environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )  # fmt: skip
        self.stack.callback(_end, process)

    def boot(self, machine: str) -> None:
        """Start the daemon of a machine, on which the controller counts once it answers."""
        enter = self.hosts[(int(machine[1:]) - 1) % len(self.hosts)].enter if self.hosts else ()
        self.start(machine, [*enter, "slurmd", "-D", "-f", f"{self.folder}/slurm.conf", "-N", machine])

    def kill(self, machine: str) -> None:
        """Kill the daemon of a machine and all processes that it started with SIGKILL."""
        self.daemons[machine].kill()
        self.daemons[machine].wait()
        on_it = [process for process in self.processes() if process.machine == machine]
        # first those that would tell of the others' death
        for pid in [*(p.parent for p in on_it if _line(p.parent).startswith("slurmstepd")), *(p.pid for p in on_it)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def call(self, *words: str) -> str:
        call = [*self.enter, *words]
        done = subprocess.run(call, env=self.environment, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def about(self, job: str) -> dict[str, str]:
        """Return the controller's fields of a job."""
        words = self.call("scontrol", "show", "job", "--oneliner", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def state(self, job: str) -> str:
        """Return the state of a job: PENDING, RUNNING, ..."""
        return self.about(job)["JobState"]

    def ended(self, job: str, timeout: float) -> str:
        """Wait for the end of a job; return its last state."""
        deadline = time.monotonic() + timeout
        while (state := self.state(job)) in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED"):
            assert time.monotonic() < deadline, f"job {job} is still {state}: {self.logs()}"
            time.sleep(0.5)
        return state

    def processes(self) -> list[Process]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = [word.partition("=") for word in (folder / "environ").read_text(errors="replace").split("\0")]
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            values = {name: value for name, _, value in words}
            if values.get("SLURM_CONF") == self.environment["SLURM_CONF"] and "SLURMD_NODENAME" in values:
                pid = int(folder.name)
                found.append(Process(pid, parent, values["SLURMD_NODENAME"], _line(pid), values))
        return found

    def idle(self) -> int:
        """Return the number of idle machines; 0 while the controller does not answer."""
        words = [*self.enter, "sinfo", "--noheader", "--states", "idle", "--format", "%D"]
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=30, check=False)
        return int(done.stdout.strip() or 0) if done.returncode == 0 else 0

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))


@contextlib.contextmanager
def running(folder: Path, machines: int, gpus: int = 0, hosts: Sequence[Host] = ()) -> Iterator[Slurm]:
    """Run a Slurm until the end of the block; then nothing of it is left."""
    addresses = [hosts[i % len(hosts)].address if hosts else "127.0.0.1" for i in range(machines)]
    host, free = socket.gethostname(), [free_port() for _ in range(machines + 1)]
    names = [f"n{i + 1}" for i in range(machines)]
    for name in ("state", "spool", "munge"):
        (folder / name).mkdir(mode=0o700)
    key = folder / "munge" / "key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o600)
    settings = f"""
ClusterName=test
SlurmctldHost={host}({addresses[0]})
SlurmctldPort={free[0]}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire={REQUEUE_SECONDS}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
KillWait=5
SlurmdTimeout={LOST_SECONDS}
SchedulerParameters=bf_interval=1,sched_interval=2
"""
    gres = f" Gres=gpu:{gpus}" if gpus else ""
    if gpus:
        settings += "GresTypes=gpu\n"
        for i in range(gpus):
            (folder / f"gpu{i}").touch()
        devices = "".join(f"NodeName={name} Name=gpu File={folder}/gpu[0-{gpus - 1}]\n" for name in names)
        (folder / "gres.conf").write_text(devices)
    settings += "".join(
        f"NodeName={name} NodeHostname={host} NodeAddr={address} Port={port} CPUs=1 RealMemory=1000{gres} State=UNKNOWN\n"
        for name, address, port in zip(names, addresses, free[1:], strict=True)
    )
    settings += f"PartitionName=all Nodes={','.join(names)} Default=YES MaxTime=INFINITE State=UP\n"
    (folder / "slurm.conf").write_text(settings)
    environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}
    files = {"key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed", "socket": "socket"}
    munge = [f"--{word}={folder}/munge/{name}" for word, name in files.items()]
    with contextlib.ExitStack() as stack:
        slurm = Slurm(folder, environment, stack, hosts=hosts)
        slurm.start("munged", ["munged", "--foreground", "--force", "--num-threads=1", *munge])
        _until(lambda: (folder / "munge" / "socket").exists(), "munged is not up")
        slurm.start("slurmctld", [*slurm.enter, "slurmctld", "-D", "-f", f"{folder}/slurm.conf"])
        for name in names:
            slurm.boot(name)
        _until(lambda: slurm.idle() == machines, "no machines", slurm)
        try:
            yield slurm
        finally:  # its daemons may go, what runs the jobs would stay
            for job in slurm.call("squeue", "--noheader", "--format", "%i").split():
                slurm.call("scancel", job)
            _until(lambda: not slurm.call("squeue", "--noheader"), "jobs are left", slurm)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
    except OSError:
        return ""


def _until(condition: Callable[[], bool], what: str, slurm: Slurm | None = None, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what}: {slurm.logs() if slurm else ''}"
        time.sleep(0.2)


def free_port() -> int:
    """Return a free port below the range of ephemeral ports, so that the kernel gives it to nobody else before it is used."""
    while True:
        port = random.SystemRandom().randrange(20_000, 29_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
