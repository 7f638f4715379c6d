"""Capture and restore the random generators of one rank."""

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
class RngStates:
    """The RNG states of one rank, as the libraries returned them."""

    python: tuple[Any, ...]
    numpy: Any
    torch: Tensor
    device: Tensor | None
    parallel: dict[str, Any]


def capture() -> RngStates:
    """Return the current RNG states. Later use of the generators does not change the result."""
    parallel = tensor_parallel.get_cuda_rng_tracker().get_states()
    copies = {name: state.clone() if isinstance(state, Tensor) else state for name, state in parallel.items()}
    device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return RngStates(random.getstate(), np.random.get_state(), torch.get_rng_state(), device, copies)


def packed(states: RngStates) -> bytes:
    """Return the states as bytes that `restore` reads."""
    kind, keys, *rest = states.numpy
    return pickled({**vars(states), "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest)})


def restore(data: bytes) -> None:
    """Set the random generators of this rank to states that `packed` returned."""
    state: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    kind, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["device"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["parallel"])
