"""Transformer Engine's user buffers for `parallel.tp_comm_overlap`, which overlaps products with communication over tp."""

from __future__ import annotations

import torch.distributed as dist

from tepo_megatron.config import ModelConfig, ParallelConfig


def open_buffers(model: ModelConfig, parallel: ParallelConfig, tokens: int, hidden_size: int) -> None:
    """Allocate the buffers, once per process, after the mesh is built and before the model (Transformer Engine 2.7 and later).

    Args:
        model: Its precision.
        parallel: The mesh.
        tokens: Tokens of every microbatch on a context-parallel rank. The buffers are [tokens, hidden_size], and Transformer
            Engine refuses any other shape.
        hidden_size: Hidden size of the model.
    """
    from transformer_engine.pytorch.module import base

    modes = [base.UserBufferQuantizationMode.FP8 if model.fp8 else base.UserBufferQuantizationMode.NONE]
    if model.bf16_end_layers:
        modes.append(base.UserBufferQuantizationMode.NONE)
    base.initialize_ub(
        shape=[tokens, hidden_size], tp_size=parallel.tp, quantization_modes=modes, bootstrap_backend=dist.get_backend()
    )
