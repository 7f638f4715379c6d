"""The pinned memory through which files of `sync.transport: shm` are written. Not run so far."""

import torch

from tepo_megatron.sync.stores import PinnedStaging


def test_what_is_staged_is_what_was_on_the_gpu() -> None:
    sent = {f"{i}.weight": torch.randn(257, 129, device="cuda", dtype=torch.bfloat16) for i in range(8)}
    staging = PinnedStaging(sum(t.nbytes for t in sent.values()), torch.device("cuda", 0))
    for factor in (1, 2):
        staged = staging.copy((name, tensor * factor) for name, tensor in sent.items())  # each is freed at once
        assert all(staged[name].is_pinned() and torch.equal(staged[name], sent[name].cpu() * factor) for name in sent)
