"""Rows of memory that others map, on the CPU: two processes, and what goes wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tepo_megatron.inference.servers.environment import devices
from tepo_megatron.weight_sync.bucket_format import Bucket, pack
from tepo_megatron.weight_sync.ipc import BufferHandle, export_buffer, open_buffer
from tepo_megatron.weight_sync.receiver.receiver import RankReceiver
from tepo_megatron.weights import fp8

CPU = torch.device("cpu")
MODEL = {
    "odd": torch.arange(7, dtype=torch.uint8),
    "a.weight": torch.arange(6.0).reshape(2, 3),
    "b.weight": torch.linspace(-1, 1, 7, dtype=torch.bfloat16),
    "c.weight": fp8.quantize(torch.linspace(-1, 1, 15).reshape(3, 5))[0],
    "scale": torch.tensor(2.5),
}
READER = """
import sys, torch
from tepo_megatron.weight_sync.bucket_format import Bucket
from tepo_megatron.weight_sync.ipc import open_buffer
bucket = Bucket.from_json(sys.stdin.readline())
with open_buffer(bucket.handle, torch.device("cpu")) as row:
    print(*row[:bucket.nbytes].tolist())
    row.zero_()
"""


def packed(number: int = 0) -> tuple[Bucket, torch.Tensor]:
    row = export_buffer(256, CPU)
    contents = pack(MODEL.items(), row.bytes, with_checksums=True)
    return Bucket(number, 0, contents, row.handle), row


@pytest.mark.slow
def test_another_process_reads_the_same_bytes_and_changes_none() -> None:
    bucket, row = packed()
    reader = subprocess.run([sys.executable, "-c", READER], input=bucket.to_json(), capture_output=True, text=True, check=True)
    assert [int(word) for word in reader.stdout.split()] == row.bytes[: bucket.nbytes].tolist()
    assert row.bytes[: bucket.nbytes].any()
    row.close()


def test_tensors_of_any_order_lie_where_their_dtype_allows_it() -> None:
    bucket, row = packed()
    assert Bucket.from_json(bucket.to_json()) == bucket
    with open_buffer(row.handle, CPU) as there:
        read = dict(bucket.tensors(there))
        for name, tensor in MODEL.items():
            assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape
            assert torch.equal(read[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    assert sum(t.nbytes for t in MODEL.values()) < bucket.nbytes <= 256
    row.close()


def test_memory_that_is_gone_is_an_error_with_a_fix() -> None:
    row = export_buffer(16, CPU)
    row.close()
    gone = BufferHandle(16, pid=2**22, file=3)  # above every process
    for handle in (row.handle, gone):
        with (
            pytest.raises(ValueError, match=r"cannot be mapped .*sync\.transport=ipc .*use shm or group"),
            open_buffer(handle, CPU),
        ):
            pass


def test_a_gpu_that_is_not_there_is_named() -> None:
    handle = BufferHandle(16, gpu="GPU-1234")
    with pytest.raises(ValueError, match=r"on the GPU GPU-1234, which cpu does not reach"), open_buffer(handle, CPU):
        pass


def test_an_inbox_takes_lent_rounds_in_turn_and_notices_damage(tmp_path: Path) -> None:
    save_file(MODEL, tmp_path / "model.safetensors")
    inbox = RankReceiver()
    inbox.begin(tmp_path, tied_embeddings=False)
    bucket, row = packed()
    with pytest.raises(ValueError, match="round 1 of the update came when round 0 was due"):
        inbox.take([replace(bucket, number=1).to_json()])
    arrived = inbox.take([bucket.to_json()])
    assert arrived is not None and [name for name, _ in arrived] == list(MODEL)
    inbox.finish()
    with pytest.raises(ValueError, match="round 0 of the update came when round 1 was due"):
        inbox.take([bucket.to_json()])
    inbox.begin(tmp_path, tied_embeddings=False)
    row.bytes[0] ^= 1
    arrived = inbox.take([bucket.to_json()])
    assert arrived is not None
    with pytest.raises(ValueError, match="tensor odd was damaged on its way"):
        list(arrived)
    row.close()


def test_nothing_is_left_mapped_once_the_last_view_is_gone() -> None:
    def mapped() -> bool:
        return "tepo-weights" in Path("/proc/self/maps").read_text()

    bucket, row = packed()
    with open_buffer(row.handle, CPU) as there:
        views = dict(bucket.tensors(there))
    row.close()
    assert mapped() and torch.equal(views["a.weight"], MODEL["a.weight"])  # the memory of a file lasts as long as its maps
    del there, views
    assert not mapped()
    assert not any("tepo-weights" in os.readlink(f"/proc/self/fd/{fd}") for fd in (row.handle.file,) if _open(fd))


def _open(file: int) -> bool:
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


def test_a_server_that_maps_memory_sees_all_gpus_its_own_first() -> None:
    seen = {"CUDA_VISIBLE_DEVICES": "0,1,GPU-abc,3"}
    assert devices(seen, 2, 1) == {"CUDA_VISIBLE_DEVICES": "GPU-abc"}
    assert devices(seen, 2, 1, others=True) == {"CUDA_VISIBLE_DEVICES": "GPU-abc,0,1,3"}
    assert devices({}, 1, 2, others=True) == {"CUDA_VISIBLE_DEVICES": "1,2,0"}
