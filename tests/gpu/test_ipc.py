"""Weights by CUDA IPC: a bucket in one process's memory, an inbox in another process on the same GPU. Not run so far."""

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from tepo_megatron.wire.bucket_format import Bucket, export_buffer, pack

ROUNDS = 6  # each of two rows is written, and its handle opened, three times
NUMEL = 2**24
DEVICE = torch.device("cuda", 0)
RECEIVER = """
import sys, torch
from tepo_megatron.wire.receiver.receiver import RankReceiver

device = torch.device("cuda", 0)
inbox = RankReceiver()
inbox.begin(sys.argv[1], False, device)
for line in sys.stdin:
    for name, tensor in inbox.take([line]):
        assert tensor.device == device
        row = tensor.clone().view(torch.uint8).cpu()
    del tensor
    print(name, *row[[0, 1, -2, -1]].tolist(), row.long().sum().item(), torch.cuda.memory_allocated(), flush=True)
inbox.finish()
"""


def test_buckets_are_read_where_they_lie_and_their_memory_is_free_afterwards(tmp_path: Path) -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    model = {f"{i}.weight": torch.randn(NUMEL, device=DEVICE, generator=generator).bfloat16() for i in range(ROUNDS)}
    save_file({name: tensor.cpu() for name, tensor in model.items()}, tmp_path / "model.safetensors")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(DEVICE)
    receiver = subprocess.Popen(
        [sys.executable, "-c", RECEIVER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert receiver.stdin is not None and receiver.stdout is not None
        rows = [export_buffer(2 * NUMEL, DEVICE) for _ in range(2)]
        for i, (name, tensor) in enumerate(model.items()):
            row = rows[i % 2]
            contents = pack([(name, tensor)], row.bytes, with_checksums=True)
            row.flush()
            receiver.stdin.write(Bucket(i, 0, contents, row.handle).to_json() + "\n")
            receiver.stdin.flush()
            there, *printed = receiver.stdout.readline().split()
            sent = tensor.view(torch.uint8).cpu()
            expected = [*sent[[0, 1, -2, -1]].tolist(), sent.long().sum().item()]
            assert there == name and json.loads(f"[{','.join(printed[:-1])}]") == expected
            assert int(printed[-1]) <= 2 * 2 * NUMEL  # the receiver's own copy, and no more with each round
            row.bytes.fill_(255)
        receiver.stdin.close()
        assert receiver.wait(timeout=60) == 0
        for row in rows:
            row.close()
        del row, rows
        assert torch.cuda.memory_allocated(DEVICE) <= before
    finally:
        receiver.kill()
        receiver.wait()
