"""Models and the reference copy for the benchmarks that deliver weights. Imports no engine."""

from __future__ import annotations

import tempfile
import time

import torch

SHAPE = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32_000,
}  # fmt: skip
QUICK = SHAPE | {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "head_dim": 32, "vocab_size": 512}


def copy_seconds(source: torch.Tensor) -> float:
    """Return the seconds of writing these bytes to a file in shared memory."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", buffering=0) as file:
        start = time.perf_counter()
        left = memoryview(source.numpy())
        while left:
            left = left[file.write(left[: 16 * 2**20]) :]
        return time.perf_counter() - start
