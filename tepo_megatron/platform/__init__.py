"""The only place that names cpu and gloo, or cuda and nccl.

A process activates one platform, before its first `import megatron.core`. `cuda` is Megatron-Core as it comes; `cpu` redirects
what Megatron-Core asks of `torch.cuda` to the CPU, so that the same model, schedules, optimizer and checkpoints run without a
GPU. The choice is the config's: a GPU in the machine changes nothing under `cpu`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from tepo_megatron.platform import cpu, cuda

PlatformName = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Platform:
    """Where tensors live and what carries collectives.

    name: the config's `platform`, which is also the device type; backend: of torch.distributed;
    host_backend: of a group for objects on the host.
    """

    name: PlatformName
    backend: Literal["gloo", "nccl"]
    host_backend: Literal["gloo"] = "gloo"

    def device(self, local_rank: int) -> torch.device:
        """The device of a rank, from its index among the ranks of its machine."""
        return torch.device(self.name, local_rank) if self.name == "cuda" else torch.device(self.name)


_PLATFORMS: dict[PlatformName, tuple[Platform, Callable[[], None]]] = {
    "cpu": (Platform("cpu", "gloo"), cpu.install),
    "cuda": (Platform("cuda", "nccl"), cuda.require),
}
_active: Platform | None = None


def activate(name: PlatformName) -> Platform:
    """Make this process a `cpu` or a `cuda` process; again with the same name, it returns the same platform.

    `cpu` imports Megatron-Core (about 3 s); `cuda` imports nothing.

    Raises ConfigError for `cuda` where PyTorch sees no GPU; RuntimeError when the process already runs on the other platform,
    or for `cpu` after `megatron.core` was imported without it: both are mistakes of the calling code.
    """
    global _active
    platform, prepare = _PLATFORMS[name]
    if _active is not None and _active is not platform:
        raise RuntimeError(
            f"platform {_active.name} is active in this process, {name} needs another process; the redirections of `cpu` "
            "cannot be undone"
        )
    if _active is None:
        if name == "cpu" and "megatron.core" in sys.modules:
            raise RuntimeError(
                "megatron.core was imported before activate('cpu'), which came too late to redirect it; activate first"
            )
        prepare()
        _active = platform
    return platform
