"""Weights are split into rounds of bounded size, and bytes damaged in transit are noticed. No server, no ranks."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tepo_megatron.config import ShmTransportConfig, SyncConfig
from tepo_megatron.errors import ConfigError
from tepo_megatron.weight_sync import broadcast
from tepo_megatron.weight_sync.bucket_format import crc32
from tepo_megatron.weight_sync.buckets import is_check_due, split_into_buckets, whole_bytes
from tepo_megatron.weight_sync.receiver.weight_files import tensors
from tepo_megatron.weight_sync.relay import group_by_memory, memory_identity, recipients
from tepo_megatron.weight_sync.stores import PinnedStaging, make_folder, write_file
from tepo_megatron.weight_sync.sync import check_one_host
from tepo_megatron.weights.ops import Replicated

SENT = {
    "a.weight": torch.arange(6.0).reshape(2, 3),
    "b.weight": torch.linspace(-1, 1, 7, dtype=torch.bfloat16),
    "scale": torch.tensor(2.5),
}


def sent(path: Path, with_checksums: bool) -> Path:
    write_file(SENT, path, {name: crc32(t) for name, t in SENT.items()} if with_checksums else {})
    return path


@pytest.mark.parametrize("with_checksums", [True, False])
def test_what_is_sent_arrives(tmp_path: Path, with_checksums: bool) -> None:
    read = dict(tensors([str(sent(tmp_path / "sent", with_checksums))]))
    assert read.keys() == SENT.keys() and all(torch.equal(read[name], SENT[name]) for name in SENT)


def test_a_bucket_is_staged_in_one_row_and_the_row_is_used_again(tmp_path: Path) -> None:
    widest_first = dict(sorted(SENT.items(), key=lambda item: -item[1].element_size()))
    staging = PinnedStaging(sum(t.nbytes for t in SENT.values()), torch.device("cpu"))
    for name, factor in (("first", 1), ("second", 2)):
        sent = {name: tensor * factor for name, tensor in widest_first.items()}
        staged = staging.copy(sent.items())
        assert len({tensor.untyped_storage().data_ptr() for tensor in staged.values()}) == 1
        write_file(staged, tmp_path / name, {name: crc32(t) for name, t in sent.items()})
        read = dict(tensors([str(tmp_path / name)]))
        assert read.keys() == sent.keys() and all(torch.equal(read[name], sent[name]) for name in sent)
    assert PinnedStaging(0, torch.device("cpu")).copy([]) == {}  # on ranks that send nothing


def test_a_file_for_another_machine_has_its_name_once_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "sent.safetensors", []

    def fsync(file: int) -> None:
        seen.append((os.fstat(file).st_size, path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    write_file(SENT, path, {name: crc32(t) for name, t in SENT.items()}, for_others=True)
    assert seen[0] == (path.stat().st_size, False) and seen[1][1]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert dict(tensors([str(path)])).keys() == SENT.keys()


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


def binding(name: str, numel: int, replicated: bool = False) -> Any:
    op = Replicated() if replicated else object()
    return SimpleNamespace(name=name, parameter=torch.zeros(numel), row=SimpleNamespace(op=op))


def cut(bindings: list[Any], tied: bool = True) -> list[list[str]]:
    arch: Any = SimpleNamespace(tied_embeddings=tied)
    return [[b.name for b in bucket] for bucket in split_into_buckets(bindings, arch, lambda b: whole_bytes(b, 2), limit=80)]


def test_buckets_hold_whole_parameters_up_to_the_limit() -> None:
    """Buckets of 80 bytes hold 10 numbers of a parameter that is sharded over two ranks, or 20 of one that both have."""
    assert cut([binding(n, 5) for n in "abcde"]) == [["a", "b"], ["c", "d"], ["e"]]
    assert cut([binding("a", 10, replicated=True), binding("b", 10, replicated=True), binding("c", 1)]) == [["a", "b"], ["c"]]
    assert cut([binding("a", 1), binding("large", 50), binding("b", 1), binding("c", 1)]) == [["a"], ["large"], ["b", "c"]]
    assert cut([]) == []


def test_a_tied_output_layer_takes_no_space() -> None:
    copy = binding("output_layer.weight", 50)
    assert cut([copy]) == [] and cut([binding("a", 1), copy, binding("b", 1)]) == [["a", "b"]]
    assert cut([copy], tied=False) == [["output_layer.weight"]]


def test_only_files_need_all_ranks_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("WORLD_SIZE", "16")
    for reaching in (SyncConfig(transport="group"), SyncConfig(transport=ShmTransportConfig(folder="shared"))):
        check_one_host(reaching, servers_with_ranks=False)
    with pytest.raises(
        ConfigError,
        match=r"sync\.transport=shm needs .* only 8 of 16 are here; set sync\.transport\.folder .*=group",
    ):
        check_one_host(SyncConfig(), servers_with_ranks=False)
    check_one_host(SyncConfig(), servers_with_ranks=True)
    with pytest.raises(ConfigError, match=r"sync\.transport=ipc needs all ranks on one machine, .*use sync\.transport=group"):
        check_one_host(SyncConfig(transport="ipc"), servers_with_ranks=True)


def test_a_bucket_goes_to_one_rank_of_every_other_machine_in_turn() -> None:
    machines = group_by_memory(["a", "b", "a", "b", "c"])
    assert machines == [[0, 2], [1, 3], [4]]
    assert recipients(machines, sender=0, turn=0) == (1, 4) and recipients(machines, sender=2, turn=1) == (3, 4)
    assert recipients(machines, sender=3, turn=1) == (2, 4) and recipients(machines, sender=4, turn=3) == (2, 3)
    assert recipients([[0, 1, 2]], sender=1, turn=0) == ()


def test_a_machine_is_who_sees_the_same_shared_memory(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "link").symlink_to("a")
    a, b, link = (memory_identity(tmp_path / name) for name in ("a", "b", "link"))
    assert a == link and a != b
    with pytest.raises(ConfigError, match=r"/none on .*: No such file or directory; .*set sync\.transport\.folder"):
        memory_identity(tmp_path / "none")


def test_the_store_is_at_an_address_that_those_see_who_are_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "8", "MASTER_ADDR": "elsewhere"}.items():
        monkeypatch.setenv(name, value)
    towards = {"127.0.0.1": "127.0.0.1", "a": "10.0.0.7", "elsewhere": "10.0.0.9"}
    monkeypatch.setattr(broadcast, "address_towards", towards.__getitem__)
    assert broadcast.own_address(["127.0.0.1", "127.0.0.1"]) == "127.0.0.1"
    assert broadcast.own_address(["127.0.0.1", "a"]) == "10.0.0.7"
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert broadcast.own_address(["127.0.0.1"]) == "10.0.0.9"


@pytest.mark.parametrize(
    ("every", "delivered", "checked"),
    [
        (0, [0, 1, 2], []),
        (1, [0, 1, 2, 4], [0, 1, 2, 4]),
        (2, [0, 1, 2, 3, 4], [0, 2, 4]),
        (2, [0, 1, 3, 5, 7], [0, 3, 5, 7]),  # sampled ahead: versions are passed over
        (4, [0, 3, 5, 7, 9], [0, 5, 9]),
        (3, [5, 6, 6, 7], [6, 6]),  # resumed at 5; a server that came back is given 6 again
    ],
)
def test_a_check_that_was_due_for_a_version_that_nobody_got_is_made_up_for(
    every: int, delivered: list[int], checked: list[int]
) -> None:
    before = [None, *delivered[:-1]]
    assert [v for v, last in zip(delivered, before, strict=True) if is_check_due(v, last, every)] == checked
