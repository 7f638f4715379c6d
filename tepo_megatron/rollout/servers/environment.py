"""What a server inherits of this process's environment."""

from __future__ import annotations

from collections.abc import Mapping

import torch

# What torchrun tells its workers is not meant for a server that one of them starts.
_TORCHRUN = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
}


def without_torchrun(inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment without torchrun's part."""
    return {name: value for name, value in inherited.items() if name not in _TORCHRUN and not name.startswith("TORCHELASTIC_")}


def devices(inherited: Mapping[str, str], first: int, count: int, others: bool = False) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES with `count` of the GPUs that this process sees, from the `first` on (or what is left).

    others: after them the rest, which a server computes nothing on and whose memory it may map.
    """
    seen = inherited.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else [str(i) for i in range(max(first + count, torch.cuda.device_count() if others else 0))]
    taken = names[first : first + count]
    rest = [name for name in names if name not in taken] if others else []
    return {"CUDA_VISIBLE_DEVICES": ",".join([*taken, *rest])}
