"""The random generators of a rank."""

from __future__ import annotations

import io
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel
from torch import Tensor

from tepo_megatron.checkpoint.tensors import pickled


@dataclass(frozen=True)
class States:
    """Of Python's, numpy's and torch's generators, and of Megatron's for parallel regions, as they gave them."""

    python: tuple[Any, ...]
    numpy: Any
    torch: Tensor
    device: Tensor | None
    parallel: dict[str, Any]


def capture() -> States:
    """The states now; what the generators do later does not change them."""
    parallel = tensor_parallel.get_cuda_rng_tracker().get_states()
    return States(
        random.getstate(),
        np.random.get_state(),
        torch.get_rng_state(),
        torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        {name: state.clone() if isinstance(state, Tensor) else state for name, state in parallel.items()},
    )


def packed(states: States) -> bytes:
    """For `restore`."""
    kind, keys, *rest = states.numpy
    return pickled({**vars(states), "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest)})


def restore(data: bytes) -> None:
    """Put them back into the states that were `packed`."""
    state: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    kind, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["device"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["parallel"])
