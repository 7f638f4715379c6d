"""Hostile programs in the sandbox: none escapes its limits, none leaves a process or a file, none reads what is not its own."""

import concurrent.futures
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tepo_megatron.rewards.grading.sandbox import PROGRAM, Finished, Limits, check, run
from tests.waiting import until

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bwrap (Debian: apt-get install bubblewrap)")
LIMITS = Limits(cpu_seconds=1, wall_seconds=4, memory_mib=256, processes=8, output_bytes=10_000, disk_mib=4)
# A marker in the environment of this process, a file next to it, and a port on which it listens stand for what is protected.
PROLOGUE = (
    "import ctypes, os, signal, socket, subprocess, sys, threading, time\nMARK, SECRET, PORT = {mark!r}, {secret!r}, {port}\n"
)
FORK_FOREVER = "while True:\n  try: os.fork()\n  except OSError: pass"
# name -> (program, the ends that are allowed); a program that gets what it should not prints GOT, one that fails at it LOST
LOST, KILLED, ANY = (
    ("LOST",),
    ("timeout", "processes", "memory", "output"),
    ("LOST", "timeout", "processes", "memory", "output", "exited"),
)
TRY = "try:\n  {}\n  print('GOT')\nexcept BaseException as e: print('LOST', type(e).__name__)"


def tries(*lines: str) -> str:
    return TRY.format("\n  ".join(lines))


HOSTILE: dict[str, tuple[str, tuple[str, ...]]] = {
    "forks forever": (FORK_FOREVER, KILLED),
    "forks behind closed pipes": ("os.close(0); os.close(1); os.close(2)\n" + FORK_FOREVER, KILLED),
    "forks sleepers": ("for _ in range(500):\n  if os.fork() == 0: time.sleep(60); os._exit(0)\ntime.sleep(60)", KILLED),
    "starts threads": (tries("for _ in range(500): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"), ANY),
    "takes memory": (tries("x = bytearray(10**10)"), LOST),
    "takes memory in steps": (tries("x = [bytearray(10**6) for _ in range(10**5)]"), (*LOST, "memory")),
    "takes memory in children": (
        "for _ in range(6):\n  if os.fork() == 0: x = b'x' * 150_000_000; time.sleep(60)\ntime.sleep(60)", KILLED,
    ),
    "maps memory": (tries("import mmap", "m = mmap.mmap(-1, 10**10)"), LOST),
    "locks memory": (tries("assert ctypes.CDLL(None).mlockall(3) == 0", "x = bytearray(10**8)"), LOST),
    "computes a power": (tries("10**10**9"), ("timeout", *LOST)),
    "computes forever": ("while True: pass", ("timeout",)),
    "ignores SIGXCPU": ("signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", (*KILLED, "exited")),
    "ignores SIGTERM and sleeps": ("signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(100)", ("timeout",)),
    "sleeps": ("time.sleep(100)", ("timeout",)),
    "stops itself": ("os.kill(os.getpid(), signal.SIGSTOP)\nprint('GOT')", ("timeout",)),
    "reads stdin forever": ("while True: sys.stdin.read()", ("timeout",)),
    "leaves a daemon": ("if os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(100)", ("exited",)),
    "leaves a daemon that ignores everything": (
        "if os.fork() == 0:\n  os.setsid()\n  "
        "[signal.signal(s, signal.SIG_IGN) for s in range(1, 65) if s not in (9, 19, 32, 33)]\n"
        "  time.sleep(100)", ("exited",),
    ),
    "never joins its threads": ("t = threading.Thread(target=time.sleep, args=(100,)); t.start()", ("timeout",)),
    "floods stdout": ("while True: print('x' * 1000)", ("output",)),
    "floods stderr": ("while True: print('x' * 1000, file=sys.stderr)", ("output",)),
    "writes one endless line": ("while True: sys.stdout.write('x' * 1000)", ("output",)),
    "fills the disk": (tries("open('/tmp/x', 'wb').write(b'x' * 10**8)"), LOST),
    "fills the disk with small files": (
        tries("for i in range(10**5): open(f'/tmp/{i}', 'wb').write(b'x' * 4096)"), (*LOST, "timeout"),
    ),
    "opens many files": (tries("x = [open('/dev/null') for _ in range(10**4)]"), LOST),
    "writes into the system": (tries("open('/usr/bin/python3', 'ab').write(b'x')"), LOST),
    "writes into Python": (tries("open(os.__file__, 'ab').write(b'x')"), LOST),
    "writes its own program": (tries("open('/program.py', 'ab').write(b'x')"), LOST),
    "writes into the root folder": (tries("open('/x', 'wb')"), LOST),
    "writes into shared memory": (tries("open('/dev/shm/x', 'wb')"), LOST),
    "remounts": (tries("assert ctypes.CDLL(None).mount(b'none', b'/', None, 32 | 4096, None) == 0"), LOST),
    "mounts": (tries("assert ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0"), LOST),
    "makes a user namespace": (tries("assert ctypes.CDLL(None).unshare(0x10000000) == 0"), LOST),
    "makes a mount namespace": (tries("assert ctypes.CDLL(None).unshare(0x00020000) == 0"), LOST),
    "changes the root": (tries("os.chroot('/tmp')"), LOST),
    "makes a device": (tries("os.mknod('/tmp/mem', 0o666 | 0o20000, os.makedev(1, 1))"), LOST),
    "becomes root": (tries("os.setuid(0)"), LOST),
    "kills everybody": ("os.kill(-1, 9)", ("exited",)),
    "kills the first process": ("try: os.kill(1, 9)\nexcept OSError: pass\nprint('LOST')", (*LOST, "exited")),
    "kills its parent": (tries("os.kill(int('{parent}'), 9)"), LOST),
    # the first process of its own sandbox: this gains nothing, and the sandbox ends all the same
    "traces the first process": ("ctypes.CDLL(None).ptrace(16, 1, None, None)", ("exited", "timeout")),
    "reads a secret file": (tries("open(SECRET).read()"), LOST),
    "follows a link to it": (tries("os.symlink(SECRET, '/tmp/link')", "open('/tmp/link').read()"), LOST),
    "looks for it": (tries("assert any(MARK in f for _, _, files in os.walk('/') for f in files)"), (*LOST, "timeout")),
    "reads environments": (
        tries(
            "found = [open(f'/proc/{p}/environ', 'rb').read() for p in os.listdir('/proc') if p.isdigit()]",
            "assert any(MARK.encode() in text for text in found)",
        ), LOST,
    ),
    "reads its environment": (
        tries("assert set(os.environ) - {'PATH', 'HOME', 'LANG', 'PYTHONHASHSEED', 'PWD', 'LC_CTYPE'}"), LOST,
    ),
    "sees other processes": (tries("assert any(int(p) > 100 for p in os.listdir('/proc') if p.isdigit())"), LOST),
    "connects to this machine": (tries("socket.create_connection(('127.0.0.1', PORT), 1)"), LOST),
    "connects to an address": (tries("socket.create_connection(('192.0.2.1', 80), 1)"), LOST),
    "resolves a name": (tries("socket.getaddrinfo('localhost.example', 80)"), LOST),
    "sends a datagram": (tries("socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53))"), LOST),
    "uses an abstract socket": (tries("s = socket.socket(socket.AF_UNIX)", "s.connect('\\0' + MARK)"), LOST),
    "uses inherited files": (tries("assert [f for f in os.listdir('/proc/self/fd') if int(f) > 3]"), LOST),
    "recurses": (tries("sys.setrecursionlimit(10**9)", "f = lambda: f()", "f()"), (*LOST, "exited", "memory", "timeout")),
    "dereferences nothing": ("ctypes.string_at(0)", ("exited",)),
    "exits with an odd status": ("os._exit(255)", ("exited",)),
    "decompresses a bomb": (
        tries("import zlib", "zlib.decompress(zlib.compress(bytes(10**8)), bufsize=10**9)", "x = bytes(10**9)"),
        (*LOST, "timeout", "memory"),
    ),
    "changes its priority": (tries("os.setpriority(os.PRIO_PROCESS, 0, -20)"), LOST),
    "raises its limits": (
        tries("import resource", "resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)"), LOST,
    ),
    "loads a kernel module": (tries("assert ctypes.CDLL(None).syscall(313, 0, b'', 0) == 0"), LOST),
    "sets the clock": (tries("time.clock_settime(time.CLOCK_REALTIME, 0)"), LOST),
    "sets the host's name": (tries("socket.sethostname('x')"), LOST),
    "reads the kernel's log": (tries("open('/dev/kmsg').read(1)"), LOST),
    "makes programs set-uid": (
        tries(
            "import shutil", "shutil.copy(sys.executable, '/tmp/p')", "os.chmod('/tmp/p', 0o4755)",
            "assert subprocess.run(['/tmp/p', '-c', 'import os; os.setuid(0)']).returncode == 0",
        ), LOST,
    ),
}  # fmt: skip
SAMPLE = (
    "forks forever",
    "reads environments",
    "leaves a daemon",
    "floods stdout",
    "reads a secret file",
    "connects to this machine",
    "takes memory",
)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    mark = f"mark-{uuid.uuid4().hex}"
    secret = tmp_path_factory.mktemp("secret") / mark
    secret.write_text("secret")
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0" + mark)
        abstract.listen()
        os.environ["TEPO_TEST_MARK"] = mark
        yield {"mark": mark, "secret": str(secret), "port": server.getsockname()[1]}
        del os.environ["TEPO_TEST_MARK"]


def outcome(name: str, given: dict[str, object]) -> tuple[str, float, Finished]:
    """Return how a hostile program ended, after how many seconds."""
    text = (PROLOGUE.format(**given) + HOSTILE[name][0]).replace("{parent}", str(os.getpid()))
    began = time.monotonic()
    limits = LIMITS if "timeout" in HOSTILE[name][1] else replace(LIMITS, wall_seconds=60)  # on a busy machine, too
    finished = run([PROGRAM], {PROGRAM: text.encode()}, b"", limits)
    assert b"GOT" not in finished.stdout, (name, finished)
    said = "LOST" if b"LOST" in finished.stdout and finished.why == "exited" else finished.why
    return said, time.monotonic() - began, finished


def try_all(names: list[str], given: dict[str, object]) -> None:
    before = {p.pid for p in psutil.process_iter()}
    files = {path: sorted(path.iterdir()) for path in (Path("/tmp"), Path("/dev/shm"))}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        ends = dict(zip(names, pool.map(lambda name: outcome(name, given), names), strict=True))
    wrong = {name: end for name, end in ends.items() if end[0] not in HOSTILE[name][1] or end[1] > 90}
    assert not wrong, wrong
    assert all(len(end[2].stdout) <= LIMITS.output_bytes for end in ends.values())
    left = [p for p in psutil.process_iter(["cmdline"]) if p.pid not in before and "/program.py" in (p.info["cmdline"] or [])]
    assert not psutil.wait_procs(left, timeout=60)[1]  # those of a test that runs at the same time end by themselves
    for path, held in files.items():
        new = [p for p in path.iterdir() if p not in held and p.name in ("x", "link", "mem", "p", "0", "1")]
        assert not new, new


def test_some_hostile_programs(given: dict[str, object]) -> None:
    try_all([*SAMPLE], given)


@pytest.mark.full
def test_all_hostile_programs(given: dict[str, object]) -> None:
    assert len(HOSTILE) >= 60
    try_all([*HOSTILE], given)


def assert_ends(mark: str) -> None:
    """Wait until no program with a mark in its command line runs. A bubblewrap that never began may idle (decision 44)."""

    def marked() -> list[psutil.Process]:
        found = (p for p in psutil.process_iter(["cmdline", "name"]) if p.info["name"] != "bwrap")
        return [p for p in found if any(mark in word for word in p.info["cmdline"] or [])]

    until(lambda: not marked())


def sleeper() -> tuple[str, str]:
    """Return a mark, and the source of a program that has it and sleeps."""
    mark = f"mark-{uuid.uuid4().hex}"
    return mark, f"import time # {mark}\ntime.sleep(100)"


@pytest.mark.parametrize("milliseconds", [5, 10, 20, 30, 60, 500])
def test_a_killed_parent_ends_its_sandboxes(milliseconds: int) -> None:
    """The processes of a sandbox end with the one that waits for it, also if that is killed while they start."""
    mark, program = sleeper()
    start = "from tepo_megatron.rewards.grading.sandbox import *; print('now', flush=True); "
    text = f"{start}run(['-c', {program!r}], {{}}, b'', Limits(9, 99))"
    parent = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE)
    assert parent.stdout is not None and parent.stdout.readline() == b"now\n"
    time.sleep(milliseconds / 1000)
    parent.kill()
    parent.communicate(timeout=10)
    assert_ends(mark)


def test_a_sandbox_of_a_parent_that_has_ended_does_not_begin() -> None:
    for _ in range(3):
        mark, program = sleeper()
        start = "import os, subprocess; from tepo_megatron.rewards.grading.sandbox import *; null = subprocess.DEVNULL; "
        text = f"{start}one = started(['-c', {program!r}], {{}}, Limits(9, 99), null, null, null); one.__enter__(); os._exit(0)"
        subprocess.run([sys.executable, "-c", text], check=True, timeout=60)
        assert_ends(mark)


def test_results_and_inputs() -> None:
    check()
    echo = run(["-c", "import sys; print(sys.stdin.read()[::-1]); sys.exit(3)"], {}, b"abc" * 100_000, Limits(5, 30))
    assert (echo.why, echo.status, len(echo.stdout)) == ("exited", 3, 300_001) and not echo.well
    deaf = run(["-c", "print(open('/data').read())"], {"/data": b"content"}, b"unread" * 10**6, Limits(5, 30))
    assert deaf.well and deaf.stdout == b"content\n"
