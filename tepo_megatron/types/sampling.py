"""Inputs of a generation request: prompts, sampling settings, and the shape of a model's expert routing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tepo_megatron.limits import MOST_MASKED

NO_EXPERT = -1  # marks a token for which no router ran; see `no_expert` for unsigned types


def no_expert(dtype: torch.dtype) -> int:
    """Return the value that marks a token for which no router ran: NO_EXPERT, or the largest value of an unsigned type.

    Both have the same bits, so `Tensor.to` turns one into the other.
    """
    return NO_EXPERT if dtype.is_signed else torch.iinfo(dtype).max


@dataclass(frozen=True)
class Prompt:
    """A tokenized question.

    Attributes:
        id: Unique number, stable across runs (the row's line in the dataset).
        meta: Everything else in the dataset row.
    """

    id: int
    token_ids: tuple[int, ...]
    answer: str
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Routing:
    """The shape of a model's MoE routing.

    Attributes:
        sparse_layers: Indices of the layers with experts, ascending.
        per_token: Experts chosen per token and layer (top-k).
        number: Experts per layer.
    """

    num_layers: int
    sparse_layers: tuple[int, ...]
    per_token: int
    number: int

    @property
    def dtype(self) -> torch.dtype:
        """Return the narrowest type of `Rollout.experts_LKT`: uint8 for fewer than 256 experts, else int16."""
        return torch.uint8 if self.number <= torch.iinfo(torch.uint8).max else torch.int16

    def check(self, experts_LKT: Tensor) -> None:
        """Raise ValueError unless these are valid choices: distinct experts for every token. The last token may have none."""
        shape = (experts_LKT.shape[0], len(self.sparse_layers), self.per_token)
        if experts_LKT.shape != shape:
            raise ValueError(f"experts of shape {list(experts_LKT.shape)} instead of {list(shape)} (tokens, layers, per token)")
        chosen_LKT = experts_LKT[:-1] if bool((experts_LKT[-1:] == no_expert(experts_LKT.dtype)).all()) else experts_LKT
        if chosen_LKT.numel():
            self.check_range(*map(int, chosen_LKT.aminmax()))
        # Compare each expert with those at a distance. In numpy, expert by expert, this is faster than a sort.
        chosen_TLK = np.ascontiguousarray(np.moveaxis(chosen_LKT.numpy(), -1, 0))
        if any((chosen_TLK[i:] == chosen_TLK[:-i]).any() for i in range(1, self.per_token)):
            raise ValueError("an expert was chosen twice for one token")

    def check_range(self, least: int, most: int) -> None:
        """Raise ValueError unless all experts of a range exist."""
        if not 0 <= least <= most < self.number:
            raise ValueError(f"experts {least} to {most} of a model that has {self.number}")


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of a request.

    Sampling options without a field are switched off in the engine (min_p=0, repetition_penalty=1), because the actor
    recomputes log-probs under temperature, top-k and top-p alone.

    Attributes:
        samples: Responses per prompt.
        stop_token_ids: Tokens that end a response; the response includes them. Empty: the engine decides.
        routing: Routing of the model, if the engine is to return the experts that it chose. None: not requested.
        top_k, top_p: See `Truncation`.
    """

    samples: int = 1
    temperature: float = 1.0
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    routing: Routing | None = None
    top_k: int = -1
    top_p: float = 1.0

    @property
    def returns_masks(self) -> bool:
        """Return whether the engine is asked for the sampling mask of each token."""
        return 0 < self.top_k <= MOST_MASKED
