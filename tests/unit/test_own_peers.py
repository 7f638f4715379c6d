"""Membership in a process group on one machine, by real connections of two users; and the private folder of a group."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tepo_megatron.dist.own_peers import ForeignPeer, own_peers_only
from tepo_megatron.dist.rendezvous_store import FolderStore
from tepo_megatron.wire.broadcast_group import BrokenGroup, GroupSpec, join_store

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
# connects, says a number as a member of gloo would, and stays, or leaves what it said behind
CALLER = """
import encodings.idna, os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
with socket.create_connection((sys.argv[4], int(sys.argv[1]))) as connection:
    connection.sendall(bytes(8))
    print("said", flush=True)
    if sys.argv[3] == "stays":
        sys.stdin.read()
print("left", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def called(port: int, user: int, then: str, address: str = "127.0.0.1") -> Iterator[None]:
    pipe = subprocess.PIPE
    words = [sys.executable, "-c", CALLER, str(port), str(user), then, address]
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as caller:
        assert caller.stdout is not None and caller.stdout.readline() == "said\n"
        if then == "leaves":
            assert caller.stdout.readline() == "left\n"
        yield
        caller.communicate()


V4 = "127.0.0.1"


@as_root
@pytest.mark.parametrize(
    ("user", "then", "listens", "to", "said"),
    [
        (NOBODY, "stays", V4, V4, f"user {NOBODY}"),
        (NOBODY, "leaves", V4, V4, f"(user {NOBODY}|a process that has ended)"),
        (NOBODY, "stays", V4, "::ffff:127.0.0.1", f"user {NOBODY}"),  # the kernel lists sockets of IPv6 in a table of their own
        (NOBODY, "stays", "::1", "::1", f"user {NOBODY}"),
        (os.getuid(), "stays", V4, V4, None),
    ],
)
def test_a_group_that_another_user_connected_to_is_not_used(
    user: int, then: str, listens: str, to: str, said: str | None
) -> None:
    message = f"{said} of this machine connected to a process group of pid {os.getpid()}"
    refused = pytest.raises(ForeignPeer, match=message) if said else contextlib.nullcontext()
    with contextlib.ExitStack() as stack, refused, own_peers_only():
        door = stack.enter_context(
            socket.create_server((listens, 0), family=socket.AF_INET6 if ":" in listens else socket.AF_INET)
        )
        stack.enter_context(called(door.getsockname()[1], user, then, to))
        stack.enter_context(door.accept()[0])


@as_root
def test_ports_that_were_there_before_are_not_asked_about() -> None:
    with contextlib.ExitStack() as stack:
        door = stack.enter_context(socket.create_server((V4, 0)))
        stack.enter_context(called(door.getsockname()[1], NOBODY, "stays"))
        stack.enter_context(door.accept()[0])
        stack.enter_context(own_peers_only())


def test_keys_of_a_private_folder(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    store, other = FolderStore(folder), FolderStore(folder)
    assert not other.check(["m/came/1"]) and store.add("m/came/1") == 1 and store.add("m/came/1") == 1
    assert other.check(["m/came/1"]) and not other.check(["m/came/1", "m/came/2"])
    assert other.delete_key("m/came/1") and not store.delete_key("m/came/1") and not store.check(["m/came/1"])
    group = store.of_group("m/0")
    thread = threading.Thread(target=lambda: group.set("address", "here"))
    thread.start()
    assert isinstance(group, dist.Store) and other.of_group("m/0").get("address") == b"here"
    thread.join()


@pytest.mark.parametrize("fault", ["mode", "link", "another's", "missing", "a file"])
def test_a_folder_that_is_not_private_is_no_store(fault: str, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir(mode=0o700)
    if fault == "another's":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder to another user")
        os.chown(folder, NOBODY, NOBODY)
    if fault == "mode":
        folder.chmod(0o710)
    if fault == "link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    if fault in ("missing", "a file"):
        folder.rmdir()
    if fault == "a file":
        folder.touch(mode=0o700)
    with pytest.raises(BrokenGroup, match="No such file" if fault == "missing" else "not a folder of mode 0700 that user"):
        join_store(GroupSpec("127.0.0.1", 0, "m", 1, 2, 1, 1.0, 1.0, str(folder)))
