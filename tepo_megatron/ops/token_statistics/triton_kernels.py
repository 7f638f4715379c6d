"""The two passes in Triton: statistics, with one program per row that reads the logits once, and the gradient, which may be
written over the logits.

Loads and stores cover the padded width W of a row, and padding is masked by value. Where W and the stride are multiples of 16,
Triton then moves 16 bytes per lane, even if the number C of real columns is odd (vocabulary 32001). Where they are not, the
compiler specializes the same kernel for narrower accesses. `python -m benchmarks.triton_aot` compiles both and counts.

Without a GPU the kernels run in Triton's interpreter: set TRITON_INTERPRET=1 before anything imports triton.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from tepo_megatron.ops.token_statistics import NO_COLUMNS, Coefficients, compute_dtype

# Columns that a program processes at a time.
BLOCK = 4096
# Compiler options. FP fusion is set explicitly because its default differs between Triton's versions.
OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}

_LOG2_E = tl.constexpr(math.log2(math.e))
_LN_2 = tl.constexpr(math.log(2))
_NO_COLUMNS = tl.constexpr(NO_COLUMNS)


def statistics(logits: Tensor, columns: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Implement `RowKernels.statistics`. Args: see there."""
    rows, width = logits.shape
    top, total, moment = logits.new_empty(3, rows, dtype=compute_dtype(logits)).unbind(0)
    block = min(BLOCK, triton.next_power_of_2(columns))
    _statistics[(rows,)](logits, logits.stride(0), width, columns, top, total, moment, temperature, block, **OPTIONS)
    return top, total, moment


def gradient(logits: Tensor, columns: int, column_R: Tensor, temperature: float, row: Coefficients, out: Tensor) -> None:
    """Implement `RowKernels.gradient`. Args: see there."""
    rows, width = logits.shape
    block = min(BLOCK, triton.next_power_of_2(width))
    slope = row.constant if row.slope is None else row.slope
    _gradient[(rows, triton.cdiv(width, block))](
        logits, logits.stride(0), out, out.stride(0), width, columns, column_R,
        row.top, row.constant, slope, row.label, temperature, row.slope is not None, block, **OPTIONS,
    )  # fmt: skip


@triton.jit
def _statistics(
    x_ptr, stride, width, columns, top_ptr, total_ptr, moment_ptr, temperature: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """Compute one row. Running sums are kept per lane, rescaled when the maximum grows, and reduced over lanes at the end."""
    row = tl.program_id(0).to(tl.int64)
    dtype = top_ptr.dtype.element_ty
    lane = tl.arange(0, block)
    factor: tl.constexpr = _LOG2_E / temperature
    top = tl.full((), _NO_COLUMNS, dtype)
    total = tl.zeros((block,), dtype)
    moment = tl.zeros((block,), dtype)  # of d in base 2
    for at in range(0, columns, block):
        real = at + lane < columns
        x = tl.load(x_ptr + row * stride + at + lane, mask=at + lane < width, other=0).to(dtype)
        new_top = tl.maximum(top, tl.max(tl.where(real, x, _NO_COLUMNS), 0))
        move = (top - new_top) * factor
        shrink = tl.exp2(move)
        d = tl.where(real, x - new_top, 0) * factor
        e = tl.where(real, tl.exp2(d), 0)
        moment = (moment + total * move) * shrink + d * e
        total = total * shrink + e
        top = new_top
    tl.store(top_ptr + row, top)
    tl.store(total_ptr + row, tl.sum(total, 0))
    tl.store(moment_ptr + row, tl.sum(moment, 0) * _LN_2)


@triton.jit
def _gradient(
    x_ptr, x_stride, out_ptr, out_stride, width, columns, column_ptr,
    top_ptr, constant_ptr, slope_ptr, label_ptr,
    temperature: tl.constexpr, with_slope: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Compute `block` columns of one row. The same lane reads and overwrites a logit."""
    row = tl.program_id(0).to(tl.int64)
    dtype = top_ptr.dtype.element_ty
    column = tl.program_id(1) * block + tl.arange(0, block)
    real = column < columns
    factor: tl.constexpr = _LOG2_E / temperature
    x = tl.load(x_ptr + row * x_stride + column, mask=column < width, other=0).to(dtype)
    d = tl.where(real, x - tl.load(top_ptr + row), 0) * factor
    weight = tl.load(constant_ptr + row)
    if with_slope:
        weight += tl.load(slope_ptr + row) * _LN_2 * d
    g = weight * tl.exp2(d)
    g += tl.where(column == tl.load(column_ptr + row), tl.load(label_ptr + row), 0)
    g = tl.where(real, g, 0)
    tl.store(out_ptr + row * out_stride + column, g.to(out_ptr.dtype.element_ty), mask=column < width)
