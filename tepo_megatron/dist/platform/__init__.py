"""Activate the platform of this process. Only this package names cpu and gloo, or cuda and nccl.

A process activates one platform, before its first `import megatron.core`. `cuda` uses Megatron-Core as it is. `cpu` redirects
the calls that Megatron-Core makes to `torch.cuda` to the CPU, so that the same model, schedules, optimizer and checkpoints run
without a GPU. The config alone decides: under `cpu`, a GPU in the machine has no effect.
"""

import sys
from dataclasses import dataclass
from typing import Literal

import torch

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.dist.platform import cpu

PlatformName = Literal["cpu", "cuda"]


def device_name(device: torch.device) -> str:
    """Return the name that a GPU's driver gives it; empty for a CPU."""
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else ""


@dataclass(frozen=True)
class Platform:
    """The device of tensors, and the backends of collectives."""

    name: PlatformName  # the config's `platform`, which is also the device type
    backend: Literal["gloo", "nccl"]
    host_backend: Literal["gloo"] = "gloo"  # backend of a group for objects on the host

    def device(self, local_rank: int) -> torch.device:
        """Return the device of a rank, from its index among the ranks of its machine."""
        return torch.device(self.name, local_rank) if self.name == "cuda" else torch.device(self.name)


_PLATFORMS: dict[PlatformName, Platform] = {"cpu": Platform("cpu", "gloo"), "cuda": Platform("cuda", "nccl")}
_active: Platform | None = None


def activate(name: PlatformName, *, transformer_engine: bool = False) -> Platform:
    """Make this process a `cpu` or a `cuda` process. A second call with the same name returns the same platform.

    `cpu` imports Megatron-Core (about 3 s); `cuda` imports nothing.

    Raises:
        ConfigError: PyTorch sees no GPU under `cuda`.
        RuntimeError: the process already runs on the other platform, or `megatron.core` was imported before `cpu` was
            activated. Both are bugs of the caller.
    """
    global _active
    platform = _PLATFORMS[name]
    if _active is not None and _active.name != name:
        raise RuntimeError(
            f"platform {_active.name} is active in this process, {name} needs another process; the redirections of `cpu` "
            "cannot be undone"
        )
    if _active is None:
        if name == "cpu" and "megatron.core" in sys.modules:
            raise RuntimeError(
                "megatron.core was imported before activate('cpu'), which came too late to redirect it; activate first"
            )
        if name == "cpu":
            cpu.install(transformer_engine)
        else:
            _require_gpu()
        _active = platform
    return _active


def _require_gpu() -> None:
    """Raise ConfigError when PyTorch cannot use a GPU."""
    if torch.cuda.is_available():
        return
    reason = "torch.cuda finds no usable GPU; check `nvidia-smi` and CUDA_VISIBLE_DEVICES"
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} is built without CUDA"
    raise ConfigError(f"platform=cuda, but {reason}; use platform=cpu, or a machine with a GPU and a CUDA build of torch")
