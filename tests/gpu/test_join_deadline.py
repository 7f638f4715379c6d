"""The deadline of forming an NCCL group, where the other member never comes: one GPU is enough. Not run so far."""

import time

import pytest
import torch

from tepo_megatron.dist.rendezvous_store import open_store
from tepo_megatron.wire.broadcast_group import SENDER, BroadcastGroup, BrokenGroup, GroupSpec


def test_a_member_that_never_comes_does_not_hang_the_sender() -> None:
    store = open_store("127.0.0.1")
    spec = GroupSpec("127.0.0.1", store.port, "lonely", 1, 2, SENDER + 1, seconds=60.0, join_seconds=5.0)
    start = time.monotonic()
    with pytest.raises(BrokenGroup, match="called off, or not formed within 5 s"):
        BroadcastGroup.form(spec, 0, SENDER, torch.device("cuda", 0))
    assert time.monotonic() - start < 8.0
    assert torch.ones(3, device="cuda").sum().item() == 3.0  # the GPU is as usable as before
