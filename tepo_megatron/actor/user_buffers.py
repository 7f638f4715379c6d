"""Transformer Engine's user buffers for `megatron.transformer.tp_comm_overlap`: overlap products with communication."""

from __future__ import annotations

import torch.distributed as dist


def open_buffers(fp8: bool, some_bf16: bool, tp: int, tokens: int, hidden_size: int) -> None:
    """Allocate the buffers, once per process, after the mesh is built and before the model (Transformer Engine 2.7 and later).

    Args:
        fp8: Whether layers multiply in FP8.
        some_bf16: Whether some layers of an FP8 model stay in bf16.
        tp: Tensor-parallel ranks.
        tokens: Tokens of every microbatch on a context-parallel rank. The buffers are [tokens, hidden_size], and Transformer
            Engine refuses any other shape.
        hidden_size: Hidden size of the model.
    """
    from transformer_engine.pytorch.module import base

    modes = [base.UserBufferQuantizationMode.FP8 if fp8 else base.UserBufferQuantizationMode.NONE]
    if some_bf16:
        modes.append(base.UserBufferQuantizationMode.NONE)
    base.initialize_ub(shape=[tokens, hidden_size], tp_size=tp, quantization_modes=modes, bootstrap_backend=dist.get_backend())
