"""How SGLang loads the weights of an update: it calls `load_files`, by its `--custom-weight-loader` option. Runs inside SGLang.

Facts about SGLang are of 0.5.23.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from tepo_megatron.rollout.weight_files import check_tensors, tensors

LOADER = "tepo_megatron.rollout.sglang_loader.load_files"
MODEL_VARIABLE = "TEPO_MODEL_PATH"  # the folder that the server was started with


def load_files(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Load the safetensors files whose paths are the names; their tensors are empty. Every tensor-parallel rank reads all.

    Raises ValueError, with the model as it was, unless the files hold exactly the tensors of the model's checkpoint; SGLang
    ends on it.
    """
    paths = [path for path, _ in named_tensors]
    check_tensors(paths, os.environ[MODEL_VARIABLE], model.config.tie_word_embeddings)
    model.load_weights(tensors(paths))
