"""A Slurm of several machines that are all this one: its daemons as our children, its files in one folder. Needs root."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tepo_megatron.processes import die_with_parent

PATH = os.pathsep.join(("/usr/sbin", "/sbin", os.environ.get("PATH", "")))
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
REQUEUE_SECONDS = 5  # no job is started again before the credentials of its former start expire: two minutes by default


def missing() -> str | None:
    """Why there can be none here."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if lacking:
        return f"{', '.join(lacking)} not installed (Debian: slurm-wlm, munge)"
    return None if os.geteuid() == 0 else "slurmd needs root to start tasks"


@dataclass
class Slurm:
    """environment: with which its commands find it."""

    folder: Path
    environment: dict[str, str]

    def call(self, *words: str) -> str:
        """The output of one of its commands."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def state(self, job: str) -> str:
        """PENDING, RUNNING, ..."""
        words = self.call("scontrol", "show", "job", "--oneliner", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)["JobState"]

    def ended(self, job: str, timeout: float) -> str:
        """Wait for the end of a job; how it ended."""
        deadline = time.monotonic() + timeout
        while (state := self.state(job)) in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED"):
            assert time.monotonic() < deadline, f"job {job} is still {state}: {self.logs()}"
            time.sleep(0.5)
        return state

    def idle(self) -> int:
        """Machines that wait for work; 0 while the controller does not answer."""
        words = ["sinfo", "--noheader", "--states", "idle", "--format", "%D"]
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=30, check=False)
        return int(done.stdout.strip() or 0) if done.returncode == 0 else 0

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        return "\n".join(f"== {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))


@contextlib.contextmanager
def running(folder: Path, machines: int) -> Iterator[Slurm]:
    """Until the end of the block; then nothing of it is left."""
    host, free = socket.gethostname(), [_free_port() for _ in range(machines + 1)]
    names = [f"n{i + 1}" for i in range(machines)]
    for name in ("state", "spool", "munge"):
        (folder / name).mkdir(mode=0o700)
    key = folder / "munge" / "key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o600)
    settings = f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
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
SchedulerParameters=bf_interval=1,sched_interval=2
"""
    settings += "".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1 RealMemory=1000 State=UNKNOWN\n"
        for name, port in zip(names, free[1:], strict=True)
    )
    settings += f"PartitionName=all Nodes={','.join(names)} Default=YES MaxTime=INFINITE State=UP\n"
    (folder / "slurm.conf").write_text(settings)
    environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}
    files = {"key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed", "socket": "socket"}
    munge = [f"--{word}={folder}/munge/{name}" for word, name in files.items()]
    commands = [
        ["munged", "--foreground", "--force", "--num-threads=1", *munge],
        ["slurmctld", "-D", "-f", f"{folder}/slurm.conf"],
        *(["slurmd", "-D", "-f", f"{folder}/slurm.conf", "-N", name] for name in names),
    ]
    with contextlib.ExitStack() as stack:
        for command in commands:
            _start(stack, command, environment, folder / f"{command[0]}-{command[-1].rpartition('/')[2]}.log")
            if command[0] == "munged":
                _until(lambda: (folder / "munge" / "socket").exists(), "munged is not up")
        slurm = Slurm(folder, environment)
        _until(lambda: slurm.idle() == machines, "no machines", slurm)
        try:
            yield slurm
        finally:  # its daemons may go, what runs the jobs would stay
            for job in slurm.call("squeue", "--noheader", "--format", "%i").split():
                slurm.call("scancel", job)
            _until(lambda: not slurm.call("squeue", "--noheader"), "jobs are left", slurm)


def _start(stack: contextlib.ExitStack, command: list[str], environment: dict[str, str], log: Path) -> None:
    with log.open("w") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )  # fmt: skip

    def end() -> None:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(end)


def _until(condition: Callable[[], bool], what: str, slurm: Slurm | None = None, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what}: {slurm.logs() if slurm else ''}"
        time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
