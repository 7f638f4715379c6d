"""Weights are split into rounds of bounded size, and bytes damaged in transit are noticed. No server, no ranks."""

import errno
import fcntl
import os
from pathlib import Path

import pytest
import torch

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.config import ShmTransportConfig, SyncConfig
from tepo_megatron.sync.push import check_one_host
from tepo_megatron.sync.stores import make_folder, write_file
from tepo_megatron.wire.bucket_format import crc32
from tepo_megatron.wire.receiver.receiver import tensors

SENT = {
    "a.weight": torch.arange(6.0).reshape(2, 3),
    "b.weight": torch.linspace(-1, 1, 7, dtype=torch.bfloat16),
    "scale": torch.tensor(2.5),
}


def sent(path: Path, with_checksums: bool) -> Path:
    write_file(SENT, path, {name: crc32(t) for name, t in SENT.items()} if with_checksums else {})
    return path


def test_ranks_of_several_machines_need_a_folder_that_all_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"only 2 of 4 are here; set sync\.transport\.folder"):
        check_one_host(SyncConfig(), servers_with_ranks=False)
    check_one_host(SyncConfig(transport=ShmTransportConfig(folder="/shared")), servers_with_ranks=False)


def test_a_shared_folder_works_without_locks_and_is_named_where_it_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    first, file = make_folder(str(tmp_path / "shared"))
    second, other = make_folder(str(tmp_path / "shared"))
    assert first.parent == second.parent == tmp_path / "shared" and first.exists() and second.exists()
    os.close(file)
    os.close(other)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"sync\.transport\.folder=.*: cannot be made"):
        make_folder(str(tmp_path / "file" / "folder"))


@pytest.mark.parametrize("back", [1, 30])
def test_a_damaged_byte_is_noticed(tmp_path: Path, back: int) -> None:
    """The error names the tensor with the damaged byte; without checksums nobody sees it."""
    for with_checksums in (True, False):
        path = sent(tmp_path / str(with_checksums), with_checksums)
        data = bytearray(path.read_bytes())
        data[-back] ^= 0x01
        path.write_bytes(data)
        if with_checksums:
            with pytest.raises(ValueError, match=r"tensor (a\.weight|b\.weight|scale) was damaged on its way"):
                dict(tensors([str(path)]))
        else:
            read = dict(tensors([str(path)]))
            assert sum(not torch.equal(read[name], SENT[name]) for name in SENT) == 1
