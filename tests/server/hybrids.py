"""Tiny random models of the Qwen3.5 family: three layers with the gated delta rule and one with attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, Qwen3_5TextConfig

from tests.tiny import VOCAB_SIZE, tiny_model

# no kernel of vLLM on a CPU takes these heads: keys and values of different sizes, neither of 64 nor of 128 channels
ODD_HEADS = {"linear_key_head_dim": 16, "linear_value_head_dim": 24}
KERNEL_HEADS = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}  # the smallest ones that they take


def hybrid_config(**changes: Any) -> Qwen3_5TextConfig:
    """Return the config of a tiny hybrid with the vocabulary of the character tokenizer.

    Args:
        changes: Keys of the config that replace the defaults here.
    """
    shape = {
        "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "full_attention_interval": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "tie_word_embeddings": False,
    } | ODD_HEADS | changes  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    return Qwen3_5TextConfig(
        **shape, rope_parameters=rope, pad_token_id=0, bos_token_id=1, eos_token_id=2, attn_implementation="eager"
    )


def tiny_hybrid(path: Path, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Write a tiny hybrid and its tokenizer to `path`; return the model (fp32, eval).

    Args:
        path: Directory to write.
        seed: Seed of the weights.
        changes: See `hybrid_config`.
    """
    return tiny_model(path, hybrid_config(**changes), seed=seed)
