"""Random models and the reference copy for the benchmarks of weights and checkpoints. Imports no engine."""

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch

SHAPE = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32_000,
}  # fmt: skip
QUICK = SHAPE | {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "head_dim": 32, "vocab_size": 512}


def write_model(shape: Mapping[str, int], folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write a random Qwen3 with tied embeddings, in files of half a gigabyte; return its folder."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(**shape, max_position_embeddings=512, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder / "model", max_shard_size="512MB")
    return folder / "model"


def copy_seconds(source: torch.Tensor) -> float:
    """Return the seconds of writing these bytes to a file in shared memory."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", buffering=0) as file:
        start = time.perf_counter()
        left = memoryview(source.numpy())
        while left:
            left = left[file.write(left[: 16 * 2**20]) :]
        return time.perf_counter() - start
