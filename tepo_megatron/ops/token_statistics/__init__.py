"""What is done to the logits themselves, row by row: two passes, each in two back ends with one contract.

A row's numbers are taken of d = (x - top) / temperature, where x are the logits: a difference first, so that logits far from
zero lose nothing. `pytorch` runs anywhere; `triton_kernels` on CUDA, and on a CPU in Triton's interpreter.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

BACKENDS = {"torch": "pytorch", "triton": "triton_kernels"}

# The maximum of a rank whose columns are all padding: finite, so that its weight exp(m - max) is 0 and never nan.
NO_COLUMNS = -1e30


@dataclass(frozen=True)
class Coefficients:
    """Of each row: its gradient at column j is (constant + slope d) exp(d) + label [j = label], d = (x_j - top) / temperature.

    All [R], in the type of the arithmetic. slope: None where nothing depends on the entropy.
    """

    top: Tensor
    constant: Tensor
    slope: Tensor | None
    label: Tensor

    def rows(self, rows: slice) -> Coefficients:
        """The same of some rows."""
        slope = None if self.slope is None else self.slope[rows]
        return Coefficients(self.top[rows], self.constant[rows], slope, self.label[rows])


class RowKernels(Protocol):
    """The two passes over logits [R, W], each row contiguous: C real columns, 0 < C <= W, then padding.

    Real logits must be finite. Padding may hold anything, infinities and NaN included: it never reaches a result. Passes take
    the whole width because a vector load must not end at C: W is a multiple of 16 where C may be odd.
    """

    def statistics(self, logits: Tensor, columns: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return top = max x, sum exp(d) and sum d exp(d) over the real columns, with d = (x - top) / temperature.

        Args:
            logits: [R, W].
            columns: C.
            temperature: Divisor of the logits, above 0.

        Returns:
            Three tensors [R], in `compute_dtype(logits)`.
        """

    def gradient(
        self, logits: Tensor, columns: int, column_R: Tensor, temperature: float, row: Coefficients, out: Tensor
    ) -> None:
        """Write the gradient of the logits into `out`, and zeros into its padding.

        Args:
            logits: [R, W].
            columns: C.
            column_R: int64, the label's column. It may be any real column where `row.label` is 0.
            temperature: Divisor of the logits, above 0.
            row: Coefficients of each row.
            out: [R, W], written in full. It may be `logits`.
        """


def row_kernels(backend: str | None, device: torch.device) -> RowKernels:
    """The back end called `backend`; None: Triton on CUDA where it is installed, else PyTorch.

    Raises ValueError for a name that is none, and for Triton where it can neither compile nor interpret.
    """
    if backend is None:
        backend = "triton" if device.type == "cuda" and importlib.util.find_spec("triton") is not None else "torch"
    if backend not in BACKENDS:
        raise ValueError(f"unknown back end {backend!r} of the token statistics; choose from {', '.join(BACKENDS)}")
    if backend == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"Triton does not compile for {device.type}; choose torch, or set TRITON_INTERPRET=1 before the start")
    return cast(RowKernels, importlib.import_module(f"{__name__}.{BACKENDS[backend]}"))


def compute_dtype(logits: Tensor) -> torch.dtype:
    """fp32 at least; fp64 passes through."""
    return torch.promote_types(logits.dtype, torch.float32)
