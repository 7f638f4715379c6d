"""Tiny random models of the Qwen3.5 family: three layers with the gated delta rule and one with attention."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from tests.tiny import hybrid_config, tiny_model, tiny_multimodal

SERVED = {"head_dim": 32}  # the smallest heads for which vLLM has attention on a CPU


def tiny_hybrid(path: Path, *, seed: int = 0, **fields: Any) -> PreTrainedModel:
    """Write a tiny hybrid and its tokenizer to `path`; return the model (fp32, eval)."""
    return tiny_model(path, hybrid_config(**SERVED | fields), seed=seed)


def hybrid_with_vision(path: Path) -> PreTrainedModel:
    """Write the same model as `tiny_hybrid` with a vision tower next to it; return the text model (fp32, eval)."""
    return tiny_multimodal(path, hybrid_config(**SERVED))
