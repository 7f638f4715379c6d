"""Two hosts that are both this machine: network namespaces joined by a veth pair, whose link can be cut, and mount namespaces
with a /dev/shm of their own each. All other folders are shared.

They need root, or a kernel that gives every user namespaces of their own. They last as long as the processes in them: nothing
has to be removed, whatever happens.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("ip", "unshare", "nsenter", "mount")
PATH = os.pathsep.join(("/usr/sbin", "/sbin", os.environ.get("PATH", "")))
DEVICE = "veth0"  # on both
ADDRESSES = ("10.213.77.1", "10.213.77.2")


@dataclass(frozen=True)
class Host:
    enter: tuple[str, ...]
    address: str

    def call(self, *words: str) -> str:
        """Run a command on this host and return its output."""
        done = subprocess.run([*self.enter, *words], env=_ENV, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        return done.stdout

    def link(self, state: str) -> None:
        """Set this end of the link `up` or `down`; both ends lose the carrier of one that is down."""
        self.call("ip", "link", "set", DEVICE, state)


_ENV = {**os.environ, "PATH": PATH}


def missing() -> str | None:
    """Return why this machine cannot provide the two hosts; None if it can."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if lacking:
        return f"{', '.join(lacking)} not installed (Debian: iproute2, util-linux)"
    try:
        with two_hosts():
            return None
    except AssertionError as e:
        return f"no network namespaces: {e}"


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Yield two hosts. Raise AssertionError where the kernel or this user's rights do not allow it."""
    own = ["--user", "--map-root-user"] if os.geteuid() else []
    with contextlib.ExitStack() as stack:
        first = _held(stack, [], own)
        of_user = ["nsenter", f"--target={first}", "--user", "--preserve-credentials"] if own else []
        second = _held(stack, of_user, [])
        hosts = tuple(
            Host((*(of_user or ["nsenter"]), *_spaces(pid), "env", f"--chdir={Path.cwd()}"), address)
            for pid, address in zip((first, second), ADDRESSES, strict=True)
        )
        a, b = hosts
        a.call("ip", "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", str(second))
        for host in hosts:
            host.call("ip", "address", "add", f"{host.address}/30", "dev", DEVICE)
            host.call("ip", "link", "set", "lo", "up")
            host.link("up")
        yield a, b


def _spaces(pid: int) -> list[str]:
    return [f"--{option}=/proc/{pid}/ns/{name}" for option, name in (("net", "net"), ("mount", "mnt"))]


def _held(stack: contextlib.ExitStack, enter: Sequence[str], own: Sequence[str]) -> int:
    """Keep namespaces open until our end of the process's input is closed, by us or because we end."""
    keep = "mount -t tmpfs tmpfs /dev/shm && echo ready && read line"
    command = [*enter, "unshare", *own, "--net", "--mount", "sh", "-c", keep]
    pipe = subprocess.PIPE
    holder = stack.enter_context(subprocess.Popen(command, env=_ENV, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
    assert holder.stdout is not None and holder.stderr is not None
    if holder.stdout.readline() != "ready\n":
        raise AssertionError(holder.stderr.read().strip())
    return holder.pid
