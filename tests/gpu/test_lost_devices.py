"""The launcher finds out which GPUs work."""

import torch

from tepo_megatron.launcher.lost_devices import working


def test_a_gpu_works_and_one_that_is_not_there_does_not() -> None:
    there = [str(i) for i in range(torch.cuda.device_count())]
    assert working([*there, "63"]) == there
