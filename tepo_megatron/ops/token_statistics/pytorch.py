"""The two passes in PyTorch. Rows are processed in chunks that fit into the cache, in two buffers that all chunks share.

exp(d) is computed as 2 ** (d log2 e): `exp` goes through MKL, which takes three times as long as `exp2` on some CPUs, and the
factor shares one multiplication with 1 / temperature. Rounding it costs exp(d) a relative error of |d| 2^-24.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tepo_megatron.ops.token_statistics import Coefficients, compute_dtype

# Size of each of the two buffers. On a CPU it is per thread, for at most four threads: both buffers then fit into the
# last-level cache, and a chunk is large enough to outweigh the calls and the barriers between threads. On a GPU a call costs
# more than a cache miss.
CPU_CHUNK_BYTES = 2 * 2**20
GPU_CHUNK_BYTES = 64 * 2**20

# PyTorch splits an elementwise operation over threads by elements, and computes elements that do not fill a vector with another
# implementation of exp2, which would make the bits depend on the split.
_VECTOR, _GRAIN = 64, 32768


class _Chunk(NamedTuple):
    """Some rows and their part of the two buffers: `d`, `e` are [rows, C]; `flat_d`, `flat_e` the same memory plus slack."""

    rows: slice
    d: Tensor
    e: Tensor
    flat_d: Tensor
    flat_e: Tensor


def statistics(logits: Tensor, columns: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits[:, :columns]
    dtype = compute_dtype(logits)
    top, total, moment = logits.new_empty(3, logits.size(0), 1, dtype=dtype).unbind(0)
    for rows, d, e, flat_d, flat_e in _chunks(logits, dtype):
        x = logits[rows] if logits.dtype == dtype else d.copy_(logits[rows])
        torch.amax(x, 1, keepdim=True, out=top[rows])
        torch.sub(x, top[rows], out=d).mul_(math.log2(math.e) / temperature)
        torch.exp2(flat_d, out=flat_e)
        torch.sum(e, 1, keepdim=True, out=total[rows])
        torch.sum(e.mul_(d), 1, keepdim=True, out=moment[rows])
    return top.squeeze(1), total.squeeze(1), moment.squeeze(1).mul_(math.log(2))


def gradient(logits: Tensor, columns: int, column_R: Tensor, temperature: float, row: Coefficients, out: Tensor) -> None:
    out[:, columns:] = 0
    logits, out = logits[:, :columns], out[:, :columns]
    dtype = compute_dtype(logits)
    for rows, d, e, flat_d, flat_e in _chunks(logits, dtype):
        x = logits[rows] if logits.dtype == dtype else d.copy_(logits[rows])
        torch.sub(x, row.top[rows, None], out=d).mul_(math.log2(math.e) / temperature)
        torch.exp2(flat_d, out=flat_e)
        if row.slope is None:
            torch.mul(e, row.constant[rows, None], out=d)
        else:
            d.mul_(row.slope[rows, None] * math.log(2)).add_(row.constant[rows, None]).mul_(e)
        d.scatter_add_(1, column_R[rows, None], row.label[rows, None])
        out[rows] = d


def _chunks(logits: Tensor, dtype: torch.dtype) -> Iterator[_Chunk]:
    """Yield chunks of rows of nearly equal size. The result of a row does not depend on the rows next to it, to the bit."""
    rows, columns = logits.shape
    on_cpu = logits.device.type == "cpu"
    chunk_bytes = CPU_CHUNK_BYTES * min(4, torch.get_num_threads()) if on_cpu else GPU_CHUNK_BYTES
    chunks = -(-rows // max(1, chunk_bytes // (dtype.itemsize * columns)))
    if not chunks:
        return
    flat_d, flat_e = logits.new_empty(2, _whole_vectors(-(-rows // chunks) * columns), dtype=dtype).unbind(0)
    for i in range(chunks):
        chunk = slice(i * rows // chunks, (i + 1) * rows // chunks)
        size = chunk.stop - chunk.start
        d, e = (flat[: size * columns].view(size, columns) for flat in (flat_d, flat_e))
        whole = _whole_vectors(size * columns)
        yield _Chunk(chunk, d, e, flat_d[:whole], flat_e[:whole])


def _whole_vectors(elements: int) -> int:
    """Return the number of elements rounded up so that each thread of an elementwise operation gets whole vectors."""
    threads = max(1, min(torch.get_num_threads(), -(-elements // _GRAIN)))
    return -(-elements // (threads * _VECTOR)) * threads * _VECTOR
