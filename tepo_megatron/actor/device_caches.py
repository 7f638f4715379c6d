"""Tensors that Transformer Engine, Megatron-Core and this package keep on the device between two updates, to be made again.

No parameter, gradient or optimizer state is among them: each is computed from those, or holds no values at all. While the
engine has the device they must not take its memory, so that `Offload.release` drops them together with the parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import nn

from tepo_megatron.actor.rotary import PACKED


def drop_device_caches(chunks: Iterable[nn.Module]) -> None:
    """Drop all of them. The next forward pass makes what it needs again.

    Args:
        chunks: this rank's model chunks. No backward pass of theirs may be under way.
    """
    drop_fp8_workspaces(chunks)
    drop_dummy_gradients()
    drop_rotary_tables()


def drop_fp8_workspaces(chunks: Iterable[nn.Module]) -> None:
    """Drop the FP8 copies of weights that Transformer Engine's modules keep: about 2 bytes for each parameter in FP8.

    In 2.20.2 every module has them in `_fp8_workspaces`, a dict by the weight's name. They are filled in the first microbatch
    of an update or a pass, which Megatron's schedules announce (`is_first_microbatch`), and used in its other microbatches.
    A forward pass that finds none quantizes the weight and keeps the result, whichever microbatch it is.
    """
    for chunk in chunks:
        for module in chunk.modules():
            workspaces = getattr(module, "_fp8_workspaces", None)
            if workspaces is not None:
                workspaces.clear()


def drop_dummy_gradients() -> None:
    """Drop the gradients without values that autograd gets where the real ones are added to `main_grad` inside the product.

    Transformer Engine 2.20.2 keeps one for each shape of a weight in `_dummy_wgrads`; Megatron's own layers share them.
    """
    base = sys.modules.get("transformer_engine.pytorch.module.base")
    if base is not None:
        base._dummy_wgrads.clear()


def drop_rotary_tables() -> None:
    """Drop the angles of up to 32 lengths that Megatron keeps (`lru_cache` of `RotaryEmbedding.forward`) and the last tables
    of `rotary.py`.
    """
    RotaryEmbedding.forward.cache_clear()
    PACKED.clear()
