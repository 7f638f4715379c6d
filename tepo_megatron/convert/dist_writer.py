"""Write Megatron-Core's `torch_dist` checkpoints: PyTorch's distributed checkpoint (DCP) format and two more files.

A `.distcp` file is a sequence of torch.save archives, one for each piece of a global tensor; `.metadata` is a pickle of where
each piece is. DCP's own writer is not used, because it keeps the last piece of every key in memory until its file ends (torch
2.13, `filesystem._write_files_from_queue`). That is the whole model if layers have keys of their own.
"""

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from tepo_megatron.checkpoint.tensors import Stored, write_metadata
from tepo_megatron.convert.sink import Sink

_FILE_BYTES = 4 * 2**30
_ALIGNMENT = 64  # bytes; archives begin at multiples of it, so that mapped tensors are aligned as torch.save aligns them


class DistCheckpointWriter:
    """Writes a checkpoint piece by piece through several streams. It can be read once `finish` has returned.

    Each stream has files of its own, so each can be used by a thread of its own. What is written does not depend on the order
    in which the streams work relative to each other.
    """

    def __init__(self, directory: Path, streams: int = 1) -> None:
        self._directory = directory
        self.streams = tuple(ArchiveWriter(directory, i, streams) for i in range(streams))

    def finish(self, common: Mapping[str, Any]) -> None:
        """Close the streams, then write `common.pt`, `.metadata` and `metadata.json`."""
        self.close()
        tensors: dict[str, Any] = {}
        stored: Stored = {}
        for w in sorted((w for s in self.streams for w in s.written), key=lambda w: (w.key, w.offsets)):
            if w.properties is None:
                tensors[w.key], index = dcp.BytesStorageMetadata(), dcp.MetadataIndex(w.key)
            else:
                entry = tensors.setdefault(w.key, dcp.TensorStorageMetadata(w.properties, w.size, []))
                index = dcp.MetadataIndex(w.key, w.offsets, len(entry.chunks))
                entry.chunks.append(dcp.ChunkStorageMetadata(w.offsets, w.shape))
            stored[index] = w.place
        write_metadata(self._directory, dcp.Metadata(tensors), stored, common)

    def close(self, sync: bool = True) -> None:
        """Close the files that are being written; with `sync`, sync them to disk first."""
        for stream in self.streams:
            stream.close(sync)


@dataclass(frozen=True)
class _Written:
    """One archive that was written: a piece of a tensor, or an object if `properties` is None.

    Attributes:
        place: file, start and length of the archive, in bytes.
        properties: dtype of the tensor.
        offsets: where the piece begins in it.
    """

    key: str
    place: _StorageInfo
    properties: dcp.TensorProperties | None = None
    size: torch.Size = torch.Size()  # noqa: RUF009  immutable
    offsets: torch.Size = torch.Size()  # noqa: RUF009
    shape: torch.Size = torch.Size()  # noqa: RUF009


class ArchiveWriter:
    """Writes archives one after the other, into files of about 4 GiB. Only one thread may use it.

    The files are `__0_{first}.distcp`, `__0_{first + step}.distcp` and so on.
    """

    def __init__(self, directory: Path, first: int, step: int) -> None:
        self.written: list[_Written] = []
        self._directory = directory
        self._next, self._step = first, step
        self._sink: Sink | None = None

    def add(self, piece: ShardedTensor) -> None:
        """Write one piece with its data. No reference to the data is kept."""
        assert piece.data is not None
        data = _alone(piece.data).view((1,) * piece.prepend_axis_num + tuple(piece.local_shape))
        place = self._write(lambda sink: torch.save(data, sink))
        size, offsets = torch.Size(piece.global_shape), torch.Size(piece.global_offset)
        self.written.append(_Written(piece.key, place, dcp.TensorProperties(dtype=data.dtype), size, offsets, data.shape))

    def add_object(self, piece: ShardedObject) -> None:
        """Write an object that a module keeps in addition to its parameters."""
        archive = io.BytesIO()
        torch.save([piece.data], archive)
        self.written.append(_Written(piece.unique_key, self._write(lambda sink: sink.write(archive.getbuffer()))))

    def close(self, sync: bool = True) -> None:
        """Close the file that is being written; with `sync`, sync it to disk first."""
        if self._sink is not None:
            self._sink.close(sync)
            self._sink = None

    def _write(self, write: Callable[[Any], object]) -> _StorageInfo:
        """Let `write` append one archive to the current file, and return its place."""
        if self._sink is not None and self._sink.tell() >= _FILE_BYTES:
            self.close()
        if self._sink is None:
            self._name = f"__0_{self._next}.distcp"
            self._sink = Sink(self._directory / self._name)
            self._next += self._step
        self._sink.write(bytes(-self._sink.tell() % _ALIGNMENT))
        start = self._sink.tell()
        try:
            write(self._sink)
        except RuntimeError:
            if self._sink.failure is None:
                raise
            raise self._sink.failure from None
        return _StorageInfo(self._name, start, self._sink.tell() - start)


@contextlib.contextmanager
def without_checksums() -> Iterator[None]:
    """Make torch.save compute no checksums within the block. torch.load ignores them, and they take six times as long as
    writing.

    The option belongs to the process or, from PyTorch 2.13 on, to a thread's context (contextvars). Other threads must then run
    in a copy of this context.
    """
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
