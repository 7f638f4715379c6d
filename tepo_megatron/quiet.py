"""Warnings of other packages that say nothing to the user of a run, each with its reason."""

from __future__ import annotations

import warnings


def quiet_upstream() -> None:
    """Silence them in this process."""
    for category, message in (
        # Megatron-Core calls the names of collectives that torch 2.13 renamed
        (FutureWarning, r"`torch\.distributed\.\w+` is deprecated"),
        # Megatron-Core looks at .grad of the distributed optimizer's shards, which are views
        (UserWarning, r"The \.grad attribute of a Tensor that is not a leaf"),
        # Megatron-Core's own default for CUDA graphs, which are off
        (UserWarning, r"full scope is deprecated"),
        # Megatron-Core compares CPU and CUDA generator states; on the CPU they are one
        (UserWarning, r"CPU RNG state changed within GPU RNG context"),
    ):
        warnings.filterwarnings("ignore", message=message, category=category)
