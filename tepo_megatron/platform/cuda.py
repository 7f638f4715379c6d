"""Require a GPU for the CUDA platform, which redirects nothing."""

import torch

from tepo_megatron.errors import ConfigError


def require() -> None:
    """Raise ConfigError when PyTorch cannot use a GPU."""
    if torch.cuda.is_available():
        return
    reason = "torch.cuda finds no usable GPU; check `nvidia-smi` and CUDA_VISIBLE_DEVICES"
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} is built without CUDA"
    raise ConfigError(f"platform=cuda, but {reason}; use platform=cpu, or a machine with a GPU and a CUDA build of torch")
