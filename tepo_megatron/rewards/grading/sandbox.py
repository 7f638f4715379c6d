"""Start a Python program in a sandbox made by bubblewrap (`bwrap`), and wait for it within its limits.

The program sees the machine's system folders and Python's own, read-only, and an empty /tmp of limited size. It does not see
other files, environment variables, processes or the network. Its processes are in a namespace that ends with its first process,
which ends with ours, however that ends. bubblewrap is used because it is small, old and reviewed; the kernel must allow user
namespaces.
"""

import contextlib
import fcntl
import json
import os
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

from tepo_megatron.base.processes import reap

PROGRAM = "/program.py"  # where the program is in its sandbox
_INFO = "--info-fd"
_ALIVE, _OTHERS = 9, 20  # file descriptors in the sandbox: a pipe that we read while we live, and the least of all others
# bubblewrap binds its processes to ours step by step while it starts. If we ended meanwhile, this write and the start fail.
_BEGIN = f'echo >&{_ALIVE} && exec {_ALIVE}>&- && exec "$@"'
_CHUNK_BYTES = 65536
# Limit since the end of a program: the kernel ends a sandbox of at most some GiB in milliseconds; then SIGKILL
_END_SECONDS = 10.0
# Limit since the first start of a sandbox: the interpreter may lie on a cold file system; then the run is refused; a start
_CHECK_SECONDS = 1200.0
_FILES = 64  # open files of each process
_OWN = 2  # processes of bubblewrap
_LOOK_SHARE = 10  # times as long as a look takes is the pause before the next, at least
_LOOK_SECONDS = 0.05  # between two looks at the processes: root is exempt from the kernel's limit on their number
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/lib32", "/etc/ld.so.cache", "/etc/alternatives")
INSTALL = "install bubblewrap (Debian: apt-get install bubblewrap) and allow user namespaces (sysctl user.max_user_namespaces)"


@dataclass(frozen=True)
class Limits:
    """Limits of one program.

    Attributes:
        cpu_seconds: Processor time of each of its processes.
        wall_seconds: Time after which it is killed. It should be several times the former: other work delays it.
        memory_mib: Address space of each of its processes, and resident memory of all together, in MiB.
    """

    cpu_seconds: float
    wall_seconds: float
    memory_mib: int = 512
    processes: int = 16
    output_bytes: int = 2**20
    disk_mib: int = 16


@dataclass(frozen=True)
class Finished:
    """The end of a program.

    Attributes:
        why: `exited`, or why it was killed: `timeout` (of either kind), `output` (it wrote too much), `processes` or `memory`
            (it had more of them).
        status: Exit status; 128 + N after signal N.
        stdout, stderr: At most `Limits.output_bytes` of each.
    """

    why: str
    status: int
    stdout: bytes
    stderr: bytes

    @property
    def well(self) -> bool:
        """Return whether it ended by itself with status 0."""
        return self.why == "exited" and self.status == 0


def command(limits: Limits, files: Mapping[str, int], python: Sequence[str]) -> list[str]:
    """Return the command that runs Python in a new sandbox."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise FileNotFoundError(f"programs run in a sandbox, and bwrap is not there; {INSTALL}")
    words = [
        bwrap,
        "--unshare-all",
        "--unshare-user",
        "--disable-userns",
        "--die-with-parent",
        "--new-session",
        "--clearenv",
        "--uid",
        "65534",
        "--gid",
        "65534",
    ]
    words += ["--hostname", "sandbox", "--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", "/tmp", "--setenv", "LANG"]
    words += ["C.UTF-8", "--setenv", "PYTHONHASHSEED", "0"]
    for path in _SYSTEM:
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            words += ["--ro-bind", path, path]
    if not sys.base_prefix.startswith("/usr"):
        words += ["--ro-bind", sys.base_prefix, sys.base_prefix]
    for path, file in files.items():
        words += [_INFO, str(file)] if path == _INFO else ["--ro-bind-data", str(file), path]
    words += ["--proc", "/proc", "--dev", "/dev", "--size", str(limits.disk_mib * 2**20), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    # /dev/shm would be memory without a limit, and the root folder is a tmpfs, too
    words += ["--remount-ro", "/dev", "--remount-ro", "/"]
    whole = max(1, round(limits.cpu_seconds + 0.499))
    # in here, because processes count per namespace and user: outside, those of the whole user would count
    words += ["prlimit", f"--as={limits.memory_mib * 2**20}", f"--cpu={whole}:{whole + 1}", f"--nproc={limits.processes}"]
    words += [f"--fsize={limits.disk_mib * 2**20}", f"--nofile={_FILES}", "--core=0", "--memlock=0", "--msgqueue=0"]
    return [*words, "sh", "-c", _BEGIN, "sh", os.path.realpath(sys.executable), "-I", "-B", *python]


@contextlib.contextmanager
def memory_files(files: Mapping[str, bytes]) -> Iterator[dict[str, int]]:
    """Yield a file descriptor with each content. A sandbox takes what is read from it, so it serves one start."""
    with contextlib.ExitStack() as stack:
        open_files = {}
        for path, content in files.items():
            descriptor = os.memfd_create("sandbox")
            file = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _OTHERS)
            os.close(descriptor)
            stack.callback(os.close, file)
            with open(os.dup(file), "wb") as out:
                out.write(content)
            os.lseek(file, 0, os.SEEK_SET)
            open_files[path] = file
        yield open_files


def run(python: Sequence[str], files: Mapping[str, bytes], stdin: bytes, limits: Limits) -> Finished:
    """Run Python in a sandbox and wait for its end."""
    with started(python, files, limits, subprocess.PIPE, subprocess.PIPE, subprocess.PIPE) as process:
        return _wait(process, stdin, limits, [process])


def run_pair(
    first: tuple[Sequence[str], Mapping[str, bytes]], second: tuple[Sequence[str], Mapping[str, bytes]], limits: Limits
) -> Finished:
    """Run two programs in a sandbox each, whose stdin and stdout are connected; return the end of the first."""
    pipes = [os.pipe(), os.pipe()]
    ends = [(pipes[0][0], pipes[1][1], subprocess.PIPE), (pipes[1][0], pipes[0][1], subprocess.DEVNULL)]
    with contextlib.ExitStack() as stack:
        processes = []
        try:
            for (python, files), streams in zip((first, second), ends, strict=True):
                processes.append(stack.enter_context(started(python, files, limits, *streams)))
        finally:
            for pipe in (*pipes[0], *pipes[1]):
                os.close(pipe)
        return _wait(processes[0], b"", limits, processes)


@contextlib.contextmanager
def started(
    python: Sequence[str], files: Mapping[str, bytes], limits: Limits, stdin: int, stdout: int, stderr: int
) -> "Iterator[subprocess.Popen[bytes]]":
    """Start Python in a sandbox. When the block ends, the sandbox is ended, and none of its processes is left."""
    # bubblewrap writes the pid of the sandbox's first process there. It could not write into a pipe after our end, and its
    # child, which waits for it, would stay.
    with memory_files({**files, _INFO: b""}) as opened:
        alive, written = os.pipe()
        info = os.dup(opened[_INFO])
        taken = fcntl.fcntl(written, fcntl.F_DUPFD_CLOEXEC, _ALIVE)  # Popen passes on what is open here: its number, or others'
        try:
            process = subprocess.Popen(
                # the first process in the sandbox keeps this environment, and /proc/1/environ can be read there
                command(limits, opened, python), env={}, cwd="/", stdin=stdin, stdout=stdout, stderr=stderr, bufsize=0,
                pass_fds=[*opened.values(), _ALIVE], preexec_fn=partial(os.dup2, written, _ALIVE),
            )  # fmt: skip
        except BaseException:
            os.close(info)
            os.close(alive)
            raise
        finally:
            os.close(written)
            os.close(taken)
    try:
        yield process
    finally:
        _end(process, info)
        os.close(alive)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _end(process: "subprocess.Popen[bytes]", info: int) -> None:
    """Kill the first process of a sandbox, with which the kernel kills all others, and wait for bubblewrap, which reaps it."""
    deadline = time.monotonic() + _END_SECONDS
    try:
        while process.poll() is None and time.monotonic() < deadline:
            try:
                os.kill(json.loads(os.pread(info, _CHUNK_BYTES, 0))["child-pid"], signal.SIGKILL)
                break
            except (ValueError, KeyError, ProcessLookupError):  # it has not begun, or it has just ended
                time.sleep(_LOOK_SECONDS / 10)
    finally:
        os.close(info)
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()  # the sandbox ends with it, too
        reap(process)


def _wait(
    process: "subprocess.Popen[bytes]", stdin: bytes, limits: Limits, watched: Sequence["subprocess.Popen[bytes]"]
) -> Finished:
    """Wait for a program; kill nothing. `watched`: the sandboxes whose processes and memory are limited."""
    deadline = time.monotonic() + limits.wall_seconds
    parts: dict[IO[bytes], bytearray] = {pipe: bytearray() for pipe in (process.stdout, process.stderr) if pipe is not None}
    unsent, why, next_look = memoryview(stdin), "exited", 0.0
    end = os.pidfd_open(process.pid)
    with contextlib.closing(os.fdopen(end)), selectors.DefaultSelector() as selector:
        for pipe in parts:
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_READ)
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
        selector.register(end, selectors.EVENT_READ)
        while why == "exited" and any(of in selector.get_map() for of in (end, *parts)):
            now = time.monotonic()
            if now >= next_look:
                why = next(filter(None, (_exceeded(each.pid, limits) for each in watched)), why)
                next_look = max(now + _LOOK_SECONDS, now + _LOOK_SHARE * (time.monotonic() - now))
            events = selector.select(max(0.0, min(deadline - now, _LOOK_SECONDS)))
            if why == "exited" and not events and now >= deadline:
                why = "timeout"
            for key, _ in events:
                if key.fileobj == end:
                    selector.unregister(end)
                    deadline = max(deadline, time.monotonic() + _END_SECONDS)  # others that hold the pipes are being killed
                elif process.stdin is not None and key.fileobj is process.stdin:
                    unsent = _written(process.stdin, unsent)
                    if not unsent:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                elif not _read(selector, key.fileobj, parts, limits.output_bytes):
                    why = "output"
    ended = reap(process) if why == "exited" else None
    status = -signal.SIGKILL if ended is None else ended
    out, err = (
        bytes(parts[pipe][: limits.output_bytes]) if pipe is not None else b"" for pipe in (process.stdout, process.stderr)
    )
    status = status if status >= 0 else 128 - status
    return Finished("timeout" if status == 128 + signal.SIGXCPU else why, status, out, err)


def _read(selector: selectors.BaseSelector, pipe: Any, parts: "dict[IO[bytes], bytearray]", most: int) -> bool:
    """Read what a pipe holds; return whether the program has written no more than it may."""
    chunk = os.read(pipe.fileno(), _CHUNK_BYTES)
    parts[pipe] += chunk
    if not chunk:
        selector.unregister(pipe)
    return len(parts[pipe]) <= most


def _exceeded(pid: int, limits: Limits) -> str | None:
    """Return `processes` or `memory` if the descendants of a process have more than the limits allow, else None."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
                children.setdefault(int(file.read().rpartition(b")")[2].split()[1]), []).append(int(entry))
    waiting, tasks, pages = [pid], 0, 0
    while waiting and tasks <= limits.processes + _OWN:
        at = waiting.pop()
        waiting += children.get(at, [])
        with contextlib.suppress(OSError, IndexError):  # it has ended meanwhile
            tasks += len(os.listdir(f"/proc/{at}/task"))
            with open(f"/proc/{at}/statm") as file:
                pages += int(file.read().split()[1])
    if tasks > limits.processes + _OWN:
        return "processes"
    return "memory" if pages * resource.getpagesize() > limits.memory_mib * 2**20 else None


def _written(pipe: IO[bytes], unsent: memoryview) -> memoryview:
    try:
        return unsent[os.write(pipe.fileno(), unsent[:_CHUNK_BYTES]) :] if unsent else unsent
    except BlockingIOError:
        return unsent
    except BrokenPipeError:
        return memoryview(b"")


def check() -> None:
    """Raise OSError if this machine cannot run a program in a sandbox."""
    limits = Limits(cpu_seconds=_CHECK_SECONDS, wall_seconds=_CHECK_SECONDS)
    finished = run(["-c", "print('sandbox')"], {}, b"", limits)
    if finished.stdout != b"sandbox\n":
        reason = " ".join(finished.stderr.decode(errors="replace").split())[-500:]
        raise OSError(f"programs run in a sandbox, and none can be made here ({reason or finished}); {INSTALL}")
