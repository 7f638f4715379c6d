"""Caches that Transformer Engine, Megatron-Core and this package keep on the device between two updates.

No parameter, gradient or optimizer state is among them: each cache can be computed again from these, or holds no values. They
must not take device memory while the inference engine uses the device, so `Offload.release` drops them with the parameters.
"""

import sys
from collections.abc import Iterable

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import nn

from tepo_megatron.actor.rotary import PACKED


def drop_device_caches(chunks: Iterable[nn.Module]) -> None:
    """Drop all caches. The next forward pass computes what it needs again."""
    drop_fp8_workspaces(chunks)
    drop_dummy_gradients()
    drop_rotary_tables()


def drop_fp8_workspaces(chunks: Iterable[nn.Module]) -> None:
    """Drop the FP8 copies of weights that Transformer Engine's modules keep: about 2 bytes for each parameter in FP8.

    In 2.20.2 every module has them in `_fp8_workspaces`, a dict by the weight's name. The first microbatch of an update or of a
    pass, which Megatron's schedules announce (`is_first_microbatch`), fills them, and the other microbatches use them. A
    forward pass that finds none quantizes the weight and keeps the result, in any microbatch.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if (workspaces := getattr(module, "_fp8_workspaces", None)) is not None:
                workspaces.clear()


def drop_dummy_gradients() -> None:
    """Drop the dummy gradients that autograd gets where a fused product adds the real gradient to `main_grad`.

    Transformer Engine 2.20.2 keeps one for each shape of a weight in `_dummy_wgrads`; Megatron's own layers share them.
    """
    if (base := sys.modules.get("transformer_engine.pytorch.module.base")) is not None:
        base._dummy_wgrads.clear()


def drop_rotary_tables() -> None:
    """Drop the rotary angles and tables.

    Megatron keeps the angles of up to 32 lengths (`lru_cache` of `RotaryEmbedding.forward`), `rotary.py` its last tables.
    """
    RotaryEmbedding.forward.cache_clear()
    PACKED.clear()
