"""Weights over NCCL: a sender on one GPU, an inbox on another, each a process of its own. Not run so far."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tepo_megatron.dist.rendezvous_store import open_store
from tepo_megatron.wire.broadcast_group import SENDER, BroadcastGroup, GroupSpec
from tepo_megatron.wire.bucket_format import Bucket, TensorEntry

if torch.cuda.device_count() < 2:
    pytest.skip("NCCL takes no two ranks on one GPU", allow_module_level=True)

ROUNDS = 3
NUMEL = 2**24
RECEIVER = """
import json, sys, torch
from tepo_megatron.wire.broadcast_group import GroupSpec
from tepo_megatron.wire.receiver.receiver import RankReceiver

device = torch.device("cuda", 1)
torch.cuda.set_device(device)
inbox = RankReceiver()
inbox.join_groups(GroupSpec(**json.loads(sys.argv[1])), device)
assert inbox.membership.joined.wait(60)
inbox.begin(sys.argv[2], tied_embeddings=False)
for line in sys.stdin:
    for name, tensor in inbox.take([line]):
        assert tensor.device == device
        print(json.dumps([name, str(tensor.dtype), tensor.double().sum().item(), tensor.reshape(-1)[-1].item()]), flush=True)
inbox.finish()
"""


def test_rounds_arrive_on_the_other_gpu(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    generator = torch.Generator(device).manual_seed(0)
    model = {f"{i}.weight": torch.randn(NUMEL, device=device, generator=generator).bfloat16() for i in range(ROUNDS)}
    save_file({name: tensor.cpu() for name, tensor in model.items()}, tmp_path / "model.safetensors")
    store = open_store("127.0.0.1")
    spec = GroupSpec("127.0.0.1", store.port, "nccl", 1, 2, SENDER + 1, 60.0, 60.0)
    described = json.dumps(dataclasses.asdict(spec))
    receiver = subprocess.Popen(
        [sys.executable, "-c", RECEIVER, described, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert receiver.stdin is not None and receiver.stdout is not None
        channel = BroadcastGroup.form(spec, 0, SENDER, device)
        for i, (name, tensor) in enumerate(model.items()):
            bucket = Bucket(i, 0, (TensorEntry(name, tuple(tensor.shape), "bfloat16"),))
            receiver.stdin.write(bucket.to_json() + "\n")
            receiver.stdin.flush()
            channel.start(tensor.view(torch.uint8))
            channel.wait()
            expected = [name, "torch.bfloat16", tensor.double().sum().item(), tensor[-1].item()]
            assert json.loads(receiver.stdout.readline()) == expected
            assert store.check([spec.arrived_key(i, SENDER + 1)])
        receiver.stdin.close()
        assert receiver.wait(timeout=60) == 0
        channel.close()
    finally:
        receiver.kill()
        receiver.wait()
