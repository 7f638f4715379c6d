"""transformers' Qwen3.5 in the precision of its inputs: its sources compute norms, softmax and delta rule in fp32 in any case.

`widen` compiles these sources again with "fp32" replaced by "fp32, or fp64 for fp64". A model in fp32 or bf16 computes the same
as before, bit for bit. A model in fp64 becomes a reference in fp64.
"""

import inspect
import re
import textwrap
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

_FUNCTIONS = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "eager_attention_forward")
_CLASSES = ("Qwen3_5RMSNorm", "Qwen3_5RMSNormGated", "Qwen3_5GatedDeltaNet")


def wide(x: Tensor) -> Tensor:
    """Return fp64 as it is, and anything else in fp32."""
    return x if x.dtype == torch.float64 else x.float()


def widen() -> None:
    """Replace the functions and methods of transformers; a second call does nothing."""
    if hasattr(modeling, "wide"):
        return
    modeling.wide = wide
    for name in _FUNCTIONS:
        _recompile(modeling, name)
    for name in _CLASSES:
        _recompile(getattr(modeling, name), "forward")


def _recompile(owner: Any, name: str) -> None:
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(owner, name))))
    source = source[re.search(r"^def ", source, re.MULTILINE).start() :]  # without decorators
    changed = re.sub(r"((?:self\.)?\w+)\.float\(\)", r"wide(\1)", source)
    changed = re.sub(r"(\w+)((?:\.transpose\(1, 2\))?)\.to\(torch\.float32", r"wide(\1)\2.to(wide(\1).dtype", changed)
    changed = changed.replace("dtype=torch.float32", "dtype=wide(attn_weights).dtype")
    assert changed != source and "torch.float32" not in changed, name
    found: dict[str, Any] = {}
    exec(compile(changed, f"<{name} of transformers, widened>", "exec"), modeling.__dict__, found)
    setattr(owner, name, found[name])
