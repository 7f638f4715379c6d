"""How SGLang loads the weights of an update: it calls `load_files`, by its `--custom-weight-loader` option. Runs inside SGLang.

Facts about SGLang are of 0.5.23.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from tepo_megatron.rollout.weight_files import Update, tensors

LOADER = "tepo_megatron.rollout.sglang_loader.load_files"
MODEL_VARIABLE = "TEPO_MODEL_PATH"  # the folder that the server was started with
# instead of a path: the loader has no hook of its own for the two ends of an update
BEGIN, FINISH = "tepo:begin", "tepo:finish"

_update: Update | None = None  # the one under way in this process


def load_files(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Load the safetensors files whose paths are the names; their tensors are empty. Every tensor-parallel rank reads all.

    BEGIN alone forgets what an earlier update gave; FINISH alone raises ValueError unless all tensors of the model's checkpoint
    were given since. Files raise it, and leave the model as it was, if they hold a tensor that is not the model's, has not its
    shape, or was given before. SGLang ends on it.
    """
    global _update
    names = [name for name, _ in named_tensors]
    if names == [BEGIN]:
        _update = Update(os.environ[MODEL_VARIABLE], model.config.tie_word_embeddings)
        return
    assert _update is not None, "BEGIN comes first"
    if names == [FINISH]:
        _update.finish()
        return
    _update.add(names)
    model.load_weights(tensors(names))
