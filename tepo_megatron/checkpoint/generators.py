"""The random generators of a rank."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel


def capture() -> bytes:
    """The state of Python's, numpy's and torch's generators, and of Megatron's for parallel regions."""
    numpy: Any = np.random.get_state()
    kind, keys, *rest = numpy
    state = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "parallel": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def restore(data: bytes) -> None:
    """Put them back into the state that `capture` saw."""
    state: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    kind, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["device"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["parallel"])
