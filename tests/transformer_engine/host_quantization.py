"""Casts to FP8 of Transformer Engine's C++ module, written with PyTorch for a CPU: real e4m3 and e5m2 values with real scales.

They fill the storages of Transformer Engine's own Python, in the layouts that its quantizers describe and its `dequantize`
reads. A product then takes the dequantized values (host_kernels.py): it is rounded as on a GPU, but added up otherwise.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

BLOCK = 128
LIMITS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def install(tex: Any) -> None:
    """Put the functions into the stub of the C++ module."""
    tex.quantize = quantize
    tex.create_empty_quantized_tensor = create_empty
    tex.fp8_transpose = transpose
    tex.split_quantize = split_quantize
    tex.dequantize = lambda tensor, dtype: tensor.dequantize(dtype=tensor.dtype)


def plain(tensor: Any) -> Tensor:
    """Return the values of an operand of a product, whether it is quantized or not."""
    values: Tensor = tensor.dequantize(dtype=torch.float32) if hasattr(tensor, "_quantizer") else tensor
    return values


def quantize(tensor: Tensor, quantizer: Any, out: Any = None, noop: Tensor | None = None) -> Any:
    """Cast to the quantizer's format; into `out`, if there is one."""
    assert noop is None
    x = tensor.detach()
    if out is None:
        out = create_empty(quantizer, x.shape, x.dtype)
    if hasattr(quantizer, "block_scaling_dim"):
        _fill_blockwise(out, x.reshape(-1, x.shape[-1]), quantizer)
    else:
        _fill_per_tensor(out, x, quantizer)
    return out


def create_empty(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, *_: Any) -> Any:
    """Return a quantized tensor without values, for row-wise and column-wise use as the quantizer says."""
    shape = torch.Size(shape)
    if hasattr(quantizer, "scale"):  # fp8-delayed's describes no layout
        data = torch.empty(shape, dtype=torch.uint8)
        out = quantizer.create_tensor_from_data(data, fake_dtype=dtype, internal=quantizer.internal)
        if quantizer.columnwise_usage:
            out._transpose = torch.empty(shape[-1:] + shape[:-1], dtype=torch.uint8)
        return out
    context = quantizer.create_metadata(shape, dtype=dtype)
    inner = quantizer.alloc_tensors(shape, device="cpu")
    return context["cls"].__tensor_unflatten__(inner, context, shape, torch.empty(shape, device="meta").stride())


def split_quantize(tensor: Tensor, sizes: list[int], quantizers: list[Any], **_: Any) -> list[Any]:
    """Cast the parts of a tensor's rows, each by its own quantizer."""
    return [quantize(part, quantizer) for part, quantizer in zip(tensor.split(list(sizes)), quantizers, strict=True)]


def transpose(data: Tensor, dtype: Any, out: Tensor | None = None) -> Tensor:
    """Return the values of a tensor with its last dimension first."""
    moved = data.movedim(-1, 0)
    return moved.contiguous() if out is None else out.copy_(moved)


def _format(quantizer: Any) -> torch.dtype:
    from tests.transformer_engine.host_kernels import torch_dtype

    return torch_dtype(quantizer.dtype)


def _fill_per_tensor(out: Any, x: Tensor, quantizer: Any) -> None:
    """Cast with one scale for the tensor: the quantizer's (delayed), or that of the tensor's maximum (current)."""
    dtype = _format(quantizer)
    amax = x.float().abs().max() if x.numel() else torch.zeros(())
    if hasattr(quantizer, "scale"):
        scale = quantizer.scale.reshape(())
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax.reshape(1)))
    else:
        if quantizer.with_amax_reduction:  # under sequence parallelism the parts that are gathered have one scale
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=quantizer.amax_reduction_group)
        scale = torch.where(amax > 0, LIMITS[dtype] / amax, 1.0)
    data = _cast(x.float() * scale, dtype)
    out._scale_inv.fill_(1 / scale)
    if out._data is not None:
        out._data.copy_(data)
    if out._transpose is not None:
        out._transpose.copy_(data.movedim(-1, 0))
        out._transpose_invalid = False


def _fill_blockwise(out: Any, x: Tensor, quantizer: Any) -> None:
    """Cast with one power-of-two scale for 128 values of a row (block_scaling_dim 1) or for 128 x 128 values (2)."""
    dtype, both = _format(quantizer), quantizer.block_scaling_dim == 2
    for name, values in (("rowwise", x), ("columnwise", x.T)):
        data, scale_inv = getattr(out, f"_{name}_data"), getattr(out, f"_{name}_scale_inv")
        if data is None:
            continue
        scale = _block_scales(values.float(), dtype, both)  # [rows or their blocks, blocks of columns]
        whole = scale.repeat_interleave(BLOCK, 1)[:, : values.shape[1]]
        if both:
            whole = whole.repeat_interleave(BLOCK, 0)[: values.shape[0]]
        data.view(values.shape).copy_(_cast(values.float() * whole, dtype))
        stored = (1 / scale) if both else (1 / scale).T
        scale_inv.zero_()
        scale_inv[: stored.shape[0], : stored.shape[1]] = stored


def _block_scales(x: Tensor, dtype: torch.dtype, both: bool) -> Tensor:
    rows, columns = x.shape
    x = torch.nn.functional.pad(x.abs(), (0, -columns % BLOCK, 0, -rows % BLOCK if both else 0))
    blocks = x.shape[1] // BLOCK  # written out, because an expert may get no token
    shape = (x.shape[0] // BLOCK, BLOCK, blocks, BLOCK) if both else (x.shape[0], 1, blocks, BLOCK)
    amax = x.reshape(shape).amax((1, 3))
    return torch.where(amax > 0, torch.exp2(torch.floor(torch.log2(LIMITS[dtype] / amax.clamp_min(1e-30)))), 1.0)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.clamp(-LIMITS[dtype], LIMITS[dtype]).to(dtype).view(torch.uint8)
