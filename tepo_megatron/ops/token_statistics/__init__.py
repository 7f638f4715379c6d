"""The two passes over the logits, statistics and gradient, in two back ends with one contract (`RowKernels`).

Both work on d = (x - top) / temperature, where x are the logits of a row and top is their maximum: the difference first, so
logits far from zero lose no precision. `pytorch` runs anywhere; `triton_kernels` on CUDA, and on a CPU in Triton's interpreter.
"""

import importlib
import importlib.util
import os
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

BACKENDS = {"torch": "pytorch", "triton": "triton_kernels"}

# The maximum that a rank reports if all its columns are padding. It is finite, so that the weight exp(m - max) is 0, never NaN.
NO_COLUMNS = -1e30


@dataclass(frozen=True)
class Coefficients:
    """The coefficients of each row's gradient, all [R], in the type of the arithmetic.

    With d = (x_j - top) / temperature, the gradient at column j is (constant + slope d) exp(d), plus `label` if j is the label.
    """

    top: Tensor  # largest logit of the row, over all ranks
    constant: Tensor  # factor of exp(d)
    slope: Tensor | None  # factor of d exp(d). None: the loss does not depend on the entropy.
    label: Tensor  # term at the label's column, 0 if another rank owns the label

    def rows(self, rows: slice) -> "Coefficients":
        """Return the coefficients of some rows."""
        slope = None if self.slope is None else self.slope[rows]
        return Coefficients(self.top[rows], self.constant[rows], slope, self.label[rows])


class RowKernels(Protocol):
    """The two passes over logits [R, W], each row contiguous: C real columns, 0 < C <= W, then padding.

    Real logits must be finite. Padding may hold any value, infinities and NaN included, and does not affect a result. Passes
    take the whole width because a vector load must not end at C: W is a multiple of 16 where C may be odd.
    """

    def statistics(self, logits: Tensor, columns: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return top = max x, sum exp(d) and sum d exp(d) over the real columns, with d = (x - top) / temperature.

        `logits`: [R, W]. Returns three tensors [R], in `compute_dtype(logits)`.
        """

    def gradient(
        self, logits: Tensor, columns: int, column_R: Tensor, temperature: float, row: Coefficients, out: Tensor
    ) -> None:
        """Write the gradient of the logits into `out`, and zeros into its padding.

        Args:
            logits: [R, W].
            column_R: int64, the label's column. It may be any real column where `row.label` is 0.
            out: [R, W], written in full. It may be `logits`.
        """


def row_kernels(backend: str | None, device: torch.device) -> RowKernels:
    """Return the kernels of a back end.

    `backend`: "torch" or "triton". None: Triton on CUDA where it is installed, else PyTorch. Raises ValueError if the name is
    unknown, or Triton can neither compile for the device nor interpret.
    """
    if backend is None:
        backend = "triton" if device.type == "cuda" and importlib.util.find_spec("triton") is not None else "torch"
    if backend not in BACKENDS:
        raise ValueError(f"unknown back end {backend!r} of the token statistics; choose from {', '.join(BACKENDS)}")
    if backend == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"Triton does not compile for {device.type}; choose torch, or set TRITON_INTERPRET=1 before the start")
    return cast(RowKernels, importlib.import_module(f"{__name__}.{BACKENDS[backend]}"))


def compute_dtype(logits: Tensor) -> torch.dtype:
    """Return the type of the arithmetic: fp64 for fp64 logits, else fp32."""
    return torch.promote_types(logits.dtype, torch.float32)
