"""Write Megatron-Core's `torch_dist` checkpoints: PyTorch's distributed checkpoint (DCP) format and two more files.

A `.distcp` file is a sequence of torch.save archives, one for each piece of a global tensor; `.metadata` is a pickle of where
each piece is. DCP's own writer is not used, because it keeps the last piece of every key in memory until its file ends (torch
2.13, `filesystem._write_files_from_queue`). That is the whole model if layers have keys of their own.
"""

import contextlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from tepo_megatron.checkpoint.tensors import Stored, write_metadata

_FILE_BYTES = 4 * 2**30
_ALIGNMENT = 64  # bytes; archives begin at multiples of it, so that mapped tensors are aligned as torch.save aligns them


@dataclass(frozen=True)
class _Written:
    """One archive that was written: a piece of a tensor, or an object if `properties` is None.

    Attributes:
        offsets: where the piece begins in it.
    """

    key: str
    place: _StorageInfo  # file, start and length of the archive, in bytes
    properties: dcp.TensorProperties | None = None  # dtype of the tensor
    size: torch.Size = torch.Size()  # noqa: RUF009  immutable
    offsets: torch.Size = torch.Size()  # noqa: RUF009
    shape: torch.Size = torch.Size()  # noqa: RUF009


class DistCheckpointWriter:
    """Writes a checkpoint piece by piece, into files of about 4 GiB. It can be read once `finish` has returned.

    Every method raises OSError for a file that cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._written: list[_Written] = []
        self._files = 0
        self._file: _File | None = None

    def add(self, piece: ShardedTensor) -> None:
        """Write one piece with its data. No reference to the data is kept."""
        assert piece.data is not None
        data = _alone(piece.data).view((1,) * piece.prepend_axis_num + tuple(piece.local_shape))
        place = self._write(data)
        size, offsets = torch.Size(piece.global_shape), torch.Size(piece.global_offset)
        self._written.append(_Written(piece.key, place, dcp.TensorProperties(dtype=data.dtype), size, offsets, data.shape))

    def add_object(self, piece: ShardedObject) -> None:
        """Write an object that a module keeps in addition to its parameters."""
        self._written.append(_Written(piece.unique_key, self._write([piece.data])))

    def finish(self, common: Mapping[str, Any]) -> None:
        """Write `common.pt`, `.metadata` and `metadata.json`."""
        if self._file is not None:
            self._file.close()
        tensors: dict[str, Any] = {}
        stored: Stored = {}
        for w in sorted(self._written, key=lambda w: (w.key, w.offsets)):
            if w.properties is None:
                tensors[w.key], index = dcp.BytesStorageMetadata(), dcp.MetadataIndex(w.key)
            else:
                entry = tensors.setdefault(w.key, dcp.TensorStorageMetadata(w.properties, w.size, []))
                index = dcp.MetadataIndex(w.key, w.offsets, len(entry.chunks))
                entry.chunks.append(dcp.ChunkStorageMetadata(w.offsets, w.shape))
            stored[index] = w.place
        write_metadata(self._directory, dcp.Metadata(tensors), stored, common)

    def _write(self, value: object) -> _StorageInfo:
        """Append one archive to the current file, and return its place."""
        if self._file is None or self._file.tell() >= _FILE_BYTES:
            if self._file is not None:
                self._file.close()
            self._file = _File(self._directory / f"__0_{self._files}.distcp", "wb")
            self._files += 1
        self._file.write(bytes(-self._file.tell() % _ALIGNMENT))
        start = self._file.tell()
        with _without_checksums():
            try:
                torch.save(value, self._file)
            except RuntimeError:
                if self._file.failure is None:
                    raise
                raise self._file.failure from None
        return _StorageInfo(Path(self._file.name).name, start, self._file.tell() - start)


class _File(io.FileIO):
    """A file whose `write` writes all bytes, and keeps the error that torch.save replaces by a RuntimeError without a cause."""

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Append all of `data`, and return the number of bytes."""
        rest = memoryview(data).cast("B")
        try:
            while rest.nbytes:
                rest = rest[super().write(rest) :]
        except OSError as e:
            self.failure = e
            raise
        return memoryview(data).nbytes


@contextlib.contextmanager
def _without_checksums() -> Iterator[None]:
    """Make torch.save compute no checksums: torch.load ignores them, and they take six times as long as writing."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _alone(tensor: Tensor) -> Tensor:
    """Return the same values in a storage of their own, because torch.save writes whole storages. Contiguous ones are not
    copied.
    """
    flat = tensor.detach().contiguous().view(-1)
    if flat.untyped_storage().nbytes() == flat.nbytes or not flat.numel():
        return flat.view(tensor.shape)
    return torch.frombuffer(flat.view(torch.uint8).numpy(), dtype=tensor.dtype).view(tensor.shape)
