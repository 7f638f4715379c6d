"""Write a sharded Hugging Face checkpoint tensor by tensor, so that no file is ever whole in memory.

A safetensors file is the length of its header (8 bytes, little endian), the header (JSON: dtype, shape and place of each
tensor) and the data. Names and shapes are known beforehand. So the header is written first and each tensor to its own place,
and the files do not depend on the order of writing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tepo_megatron.convert.sink import Sink
from tepo_megatron.weights import hf_io

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


@dataclass
class _File:
    """A file to write.

    Attributes:
        header: the header with its length, as written.
        starts: first byte of each tensor, from the beginning of the file.
        left: tensors that are not written yet.
        sink: the open file; None before the first tensor.
    """

    name: str
    header: bytes
    starts: dict[str, int]
    left: set[str]
    sink: Sink | None = None


class SafetensorsWriter:
    """Writes tensors that were announced, in any order; `finish` writes the index.

    One thread at a time may write to a file. Several threads may write at the same time, each to a file of its own.

    Args:
        files: for each file, its tensors by name, on the meta device (shapes and dtypes).
    """

    def __init__(self, directory: Path, files: Sequence[Mapping[str, Tensor]]) -> None:
        self._directory = directory
        self._tensors = {name: t for tensors in files for name, t in tensors.items()}
        self._files = [
            self._layout(f"model-{i:05d}-of-{len(files):05d}.safetensors", list(tensors))
            for i, tensors in enumerate(files, start=1)
        ]
        self._file_of = {name: file for file in self._files for name in file.starts}

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor to its place.

        Raises:
            ValueError: shape or dtype are not as announced, or the tensor was written before (a bug of the caller).
        """
        file, known = self._file_of[name], self._tensors[name]
        if tensor.shape != known.shape or tensor.dtype != known.dtype or name not in file.left:
            raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)} was announced as {known.dtype} {known.shape}")
        if file.sink is None:
            file.sink = Sink(self._directory / file.name)
            file.sink.write(file.header)
        file.sink.write_at(tensor.contiguous().view(-1).view(torch.uint8).numpy().data, file.starts[name])
        file.left.remove(name)
        if not file.left:
            file.sink.close()

    def finish(self) -> None:
        """Write the index. Raises ValueError when an announced tensor was not written."""
        if missing := [name for file in self._files for name in file.left]:
            raise ValueError(f"{missing[0]} (and {len(missing) - 1} more) was never written")
        total = sum(t.nbytes for t in self._tensors.values())
        hf_io.write_index(self._directory, {f.name: list(f.starts) for f in self._files}, total)

    def close(self) -> None:
        """Give up: close the files that are not complete, without a sync."""
        for file in self._files:
            if file.sink is not None:
                file.sink.close(sync=False)

    def _layout(self, name: str, tensors: list[str]) -> _File:
        """Assign a place to each tensor of a file.

        Tensors with larger elements come first. Then each starts at a multiple of its element size, as readers that map it
        expect.
        """
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        places, end = {}, 0
        for tensor in sorted(tensors, key=lambda n: -self._tensors[n].element_size()):
            t = self._tensors[tensor]
            header[tensor] = {"dtype": _DTYPES[t.dtype], "shape": list(t.shape), "data_offsets": [end, end + t.nbytes]}
            places[tensor], end = end, end + t.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        return _File(name, len(text).to_bytes(8, "little") + text, {n: start + p for n, p in places.items()}, set(tensors))
