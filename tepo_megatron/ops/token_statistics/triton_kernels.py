"""The two passes in Triton: statistics, with one program per row that reads the logits once, and the gradient, which may be
written over the logits.

Loads and stores cover the padded width W of a row, and padding is masked by value. Where W and the stride are multiples of 16,
Triton then moves 16 bytes per lane, even if the number C of real columns is odd (vocabulary 32001). Where they are not, the
compiler specializes the same kernel for narrower accesses.

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
_LANES = 32 * 8  # threads of a program
_ACCESS_BYTES = 16  # of a lane

_LOG2_E = tl.constexpr(math.log2(math.e))
_LN_2 = tl.constexpr(math.log(2))
_NO_COLUMNS = tl.constexpr(NO_COLUMNS)


def statistics(logits: Tensor, columns: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Implement `RowKernels.statistics`. Args: see there."""
    rows, width = logits.shape
    top, total, moment = logits.new_empty(3, rows, dtype=compute_dtype(logits)).unbind(0)
    _statistics[(rows,)](
        logits, logits.stride(0), width, columns, top, total, moment, temperature,
        **columns_of_lanes(logits.element_size()), **OPTIONS,
    )  # fmt: skip
    return top, total, moment


def columns_of_lanes(item_bytes: int) -> dict[str, int]:
    """Return how the statistics share BLOCK columns out: as many neighbours to a lane as one load moves."""
    each = _ACCESS_BYTES // item_bytes
    return {"parts": BLOCK // (_LANES * each), "lanes": _LANES, "each": each}


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
    x_ptr, stride, width, columns, top_ptr, total_ptr, moment_ptr,
    temperature: tl.constexpr, parts: tl.constexpr, lanes: tl.constexpr, each: tl.constexpr,
):  # fmt: skip
    """Compute one row. Each lane keeps a maximum and sums of its own, so that lanes wait for each other only at the end.

    Of each `parts * lanes * each` columns a lane has `parts` times `each` neighbours.
    """
    row = tl.program_id(0).to(tl.int64)
    dtype = top_ptr.dtype.element_ty
    factor: tl.constexpr = _LOG2_E / temperature
    part, lane, neighbour = (
        tl.arange(0, parts)[:, None, None],
        tl.arange(0, lanes)[None, :, None],
        tl.arange(0, each)[None, None],
    )
    column = (part * lanes + lane) * each + neighbour
    top = tl.full((lanes,), _NO_COLUMNS, dtype)
    total = tl.zeros((lanes,), dtype)
    moment = tl.zeros((lanes,), dtype)  # of d in base 2
    for at in range(0, columns, parts * lanes * each):
        real = at + column < columns
        x = tl.load(x_ptr + row * stride + at + column, mask=at + column < width, other=0).to(dtype)
        new_top = tl.maximum(top, tl.max(tl.max(tl.where(real, x, _NO_COLUMNS), 2), 0))
        move = (top - new_top) * factor
        shrink = tl.exp2(move)
        d = tl.where(real, x - new_top[None, :, None], 0) * factor
        e = tl.where(real, tl.exp2(d), 0)
        moment = (moment + total * move) * shrink + tl.sum(tl.sum(d * e, 2), 0)
        total = total * shrink + tl.sum(tl.sum(e, 2), 0)
        top = new_top
    whole = tl.max(top, 0)
    move = (top - whole) * factor
    shrink = tl.exp2(move)
    tl.store(top_ptr + row, whole)
    tl.store(total_ptr + row, tl.sum(total * shrink, 0))
    tl.store(moment_ptr + row, tl.sum((moment + total * move) * shrink, 0) * _LN_2)


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
