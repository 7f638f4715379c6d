"""Transformer Engine's buffers for `parallel.tp_comm_overlap`: products and communication at the same time."""

from __future__ import annotations

import torch.distributed as dist

from tepo_megatron.config import ModelConfig, ParallelConfig


def open_buffers(model: ModelConfig, parallel: ParallelConfig, tokens: int, hidden_size: int) -> None:
    """Once per process, after the mesh is built and before the model (2.7 and later). tokens: of every microbatch on a
    context-parallel rank: the buffers are [tokens, hidden_size], and Transformer Engine refuses any other shape.
    """
    from transformer_engine.pytorch.module import base

    modes = [base.UserBufferQuantizationMode.FP8 if model.fp8 else base.UserBufferQuantizationMode.NONE]
    if model.bf16_end_layers:
        modes.append(base.UserBufferQuantizationMode.NONE)
    base.initialize_ub(
        shape=[tokens, hidden_size], tp_size=parallel.tp, quantization_modes=modes, bootstrap_backend=dist.get_backend()
    )
