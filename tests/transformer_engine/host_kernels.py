"""Functions of Transformer Engine's C++ module that a training step calls, written with PyTorch for a CPU.

With them the real Python of Transformer Engine and Megatron-Core trains: the modules' autograd functions, what they save and
reduce, who adds a weight's gradient to `main_grad` and who tells the data-parallel hooks. Signatures are those with which the
Python of 2.20.2 calls. What they cannot show is the C++ itself: its numerics, its speed, its memory.
"""

from typing import Any

import torch
from torch import Tensor

from tests.transformer_engine import host_quantization
from tests.transformer_engine.host_quantization import plain

Lists = list[list[Tensor]]


def install(tex: Any) -> None:
    """Put the functions into the stub of the C++ module."""
    for function in (
        generic_gemm, te_general_grouped_gemm, rmsnorm_fwd, rmsnorm_bwd, fused_rope_forward, fused_rope_backward,
        convert_thd_to_bshd, convert_bshd_to_thd, fused_multi_row_padding, fused_multi_row_unpadding,
        multi_tensor_l2norm, multi_tensor_scale, multi_tensor_adam,
    ):  # fmt: skip
        setattr(tex, function.__name__, function)
    host_quantization.install(tex)
    for name in ("layernorm_fwd", "layernorm_bwd"):
        getattr(tex, name)  # looked up next to those of RMS norm, and not called
    tex.multi_tensor_scale_tensor = multi_tensor_scale  # the scale is a tensor
    tex.get_fused_attn_backend = lambda *_, **__: (tex.NVTE_Fused_Attn_Backend.NVTE_No_Backend, "there is no cuDNN")


def torch_dtype(dtype: Any) -> torch.dtype:
    """Return PyTorch's type of one of Transformer Engine's."""
    from transformer_engine.pytorch.constants import TE_DType_To_Torch

    found: torch.dtype = TE_DType_To_Torch[dtype]
    return found


def generic_gemm(
    a: Tensor, transa: bool, b: Tensor, transb: bool, out: Tensor | None, quantizer: Any, out_dtype: Any, bias: Tensor | None,
    bias_dtype: Any, gelu: bool, gelu_in: Tensor | None, grad: bool, workspace: Tensor, workspace_size: int, accumulate: bool,
    use_split_accumulator: bool, *, alpha: float = 1.0, beta: float | None = None, **overlap: Any,
) -> tuple[Tensor, Tensor | None, None, None]:  # fmt: skip
    """Compute the product op(b) @ op(a), in the order of cuBLAS.

    TN is a forward product, NN the gradient of an input, NT the gradient of a weight.
    """
    assert quantizer is None and not gelu and alpha == 1.0 and not any(overlap.values())
    a, b = plain(a), plain(b)
    left, right = b.reshape(-1, b.shape[-1]), a.reshape(-1, a.shape[-1])
    product = (left.T if transb else left).float() @ (right.T if transa else right).float()
    bias_grad = left.sum(0) if grad and bias is not None else None
    if bias is not None and not grad:
        product = product + bias
    if out is not None:
        flat = out.view(product.shape)
        flat.copy_(product + flat if accumulate else product)
        return out, bias_grad, None, None
    shape = product.shape if transb else (*b.shape[:-1], product.shape[-1])
    return product.to(torch_dtype(out_dtype) if out_dtype is not None else b.dtype).view(shape), bias_grad, None, None


def te_general_grouped_gemm(
    a: list[Tensor], transa: bool, b: list[Tensor], transb: bool, outs: list[Tensor], out_dtype: Any, m_splits: list[int],
    biases: list[Tensor], bias_dtype: Any, single_output: bool, gelu_ins: list[Tensor], grad: bool, workspaces: list[Tensor],
    workspace_size: int, accumulate: bool, use_split_accumulator: bool, sm_count: int,
) -> list[Tensor]:  # fmt: skip
    """Compute as many products as there are experts."""
    parts = list(outs[0].view(-1, outs[0].shape[-1]).split(list(m_splits))) if single_output else outs
    for one, other, part in zip(a, b, parts, strict=True):
        generic_gemm(
            one, transa, other, transb, part, None, None, None, None, False, None, grad, part, 0, accumulate, False
        )  # fmt: skip
    return biases


def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Tensor | None, quantizer: Any, dtype: Any, sm_margin: int, zero_centered: bool
) -> tuple[Any, None, Tensor]:
    """Return the RMS norm of the rows of x [S, H], and 1 / rms of each, in fp32."""
    rstd = torch.rsqrt(x.float().square().mean(-1) + eps)
    y = (x.float() * rstd[:, None] * (weight.float() + zero_centered)).to(torch_dtype(dtype))
    if quantizer is not None:
        return quantizer(y), None, rstd
    if out is not None:
        y = out.copy_(y)
    return y, None, rstd


def rmsnorm_bwd(
    dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, sm_margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of an RMS norm to its input and its weight."""
    unit, grad = x.float() * rstd[:, None], dy.float()
    scaled = grad * (weight.float() + zero_centered)
    dx = rstd[:, None] * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))
    return dx.to(x.dtype), (grad * unit).sum(0).to(weight.dtype)


def fused_rope_forward(
    t: Tensor, freqs: Tensor, starts: None, form: Any, interleaved: bool, cu_seqlens: Tensor, cp_size: int, cp_rank: int
) -> Tensor:
    """Rotate the heads of packed tokens t [S, heads, D] by their position in their sequence."""
    return _turned(t, freqs, starts, interleaved, cu_seqlens, cp_size, 1)


def fused_rope_backward(
    t: Tensor, freqs: Tensor, starts: None, form: Any, interleaved: bool, cu_seqlens: Tensor, cp_size: int, cp_rank: int
) -> Tensor:
    """Rotate a gradient back."""
    return _turned(t, freqs, starts, interleaved, cu_seqlens, cp_size, -1)


def _turned(t: Tensor, freqs: Tensor, starts: None, interleaved: bool, cu_seqlens: Tensor, cp_size: int, sign: int) -> Tensor:
    assert starts is None and not interleaved and cp_size == 1 and t.ndim == 3
    pieces = []
    for first, end in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False):
        angle, whole = freqs[: end - first, 0], t[first:end].float()  # [length, 1, R], R <= D: the others pass
        x, rest = whole[..., : angle.size(-1)], whole[..., angle.size(-1) :]
        a, b = x.chunk(2, dim=-1)
        pieces.append(torch.cat((x * angle.cos() + sign * torch.cat((-b, a), dim=-1) * angle.sin(), rest), dim=-1))
    return torch.cat(pieces).to(t.dtype)


def convert_thd_to_bshd(thd: Tensor, cu_seqlens: Tensor, batch: int, longest: int) -> Tensor:
    """Return packed tokens [S, heads, D] as rows of a padded [batch, longest, heads, D]."""
    out = thd.new_zeros(batch, longest, *thd.shape[1:])
    for row, (first, end) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False)):
        out[row, : end - first] = thd[first:end]
    return out


def convert_bshd_to_thd(bshd: Tensor, cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Reverse `convert_thd_to_bshd`."""
    out = bshd.new_zeros(tokens, *bshd.shape[2:])
    for row, (first, end) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False)):
        out[first:end] = bshd[row, : end - first]
    return out


def fused_multi_row_padding(tokens: Tensor, out: Tensor, rows: list[int], padded: list[int]) -> None:
    """Copy each expert's rows, with zeros behind them up to the padded number of rows."""
    for part, target in zip(tokens.split(list(rows)), out.split(list(padded)), strict=True):
        target.zero_()
        target[: len(part)] = part


def fused_multi_row_unpadding(padded: Tensor, out: Tensor, padded_rows: list[int], rows: list[int]) -> None:
    """Reverse `fused_multi_row_padding`."""
    for part, target in zip(padded.split(list(padded_rows)), out.split(list(rows)), strict=True):
        target.copy_(part[: len(target)])


def multi_tensor_l2norm(chunk: int, noop: Tensor, lists: Lists, per_tensor: bool = False) -> tuple[Tensor, Tensor]:
    """Return the 2-norm over all tensors of the first list, and of each."""
    norms = torch.stack([t.float().norm() for t in lists[0]])
    return norms.norm().reshape(1), norms if per_tensor else norms.new_empty(0)


def multi_tensor_scale(chunk: int, noop: Tensor, lists: Lists, scale: float | Tensor) -> None:
    """Set the second list to the first list times `scale`."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_adam(
    chunk: int, noop: Tensor, lists: Lists, lr: float, beta1: float, beta2: float, eps: float, step: int, decoupled: bool,
    bias_correction: bool, weight_decay: float,
) -> None:  # fmt: skip
    """Take one step of AdamW."""
    assert decoupled
    first, second = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    for grad, parameter, m, v, *master in zip(*lists, strict=True):
        weight = master[0] if master else parameter
        m.lerp_(grad.float(), 1 - beta1)
        v.mul_(beta2).addcmul_(grad.float(), grad.float(), value=1 - beta2)
        update = (m / first) / ((v / second).sqrt() + eps) + weight_decay * weight.float()
        weight.sub_(lr * update)
        if master:
            parameter.copy_(weight)
