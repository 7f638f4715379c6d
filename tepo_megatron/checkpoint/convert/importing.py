"""Import a Hugging Face directory as a Megatron-Core checkpoint that loads on any layout.

It is in Megatron-Core's `torch_dist`: PyTorch's distributed checkpoint (DCP) format and two more files. A `.distcp` file is a
sequence of torch.save archives, one for each piece of a global tensor; `.metadata` is a pickle of where each piece is. DCP's
own writer is not used, because it keeps the last piece of every key in memory until its file ends (torch 2.13,
`filesystem._write_files_from_queue`). That is the whole model if layers have keys of their own.
"""

from __future__ import annotations

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

from tepo_megatron.base.errors import ConversionError
from tepo_megatron.checkpoint.convert import HF_FOLDER
from tepo_megatron.checkpoint.convert.directories import new_directory, progress_bar
from tepo_megatron.checkpoint.convert.plan import ConversionPlan, make_plan, world_of_one
from tepo_megatron.checkpoint.tensors import Stored, write_metadata
from tepo_megatron.models.families import check_tokenizer, read_config
from tepo_megatron.models.hf_io import CarriedTensors, HfReader, carry_over, check_tensors, write_shards

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


CARRIED_FILE = 512 * 2**20  # most bytes of a file of carried tensors, which is in memory while it is written


def import_hf(source: Path, out: Path) -> int:
    """Write a HF model as a torch_dist checkpoint, every tensor in its dtype, and return the bytes of tensors written.

    Peak memory is the program itself and the tensors of one parameter (HF's, and Megatron's if it is not the same tensor).
    Tensors that the family carries over are copied to the folder of config.json and tokenizer.

    Raises:
        ConversionError: the model is not supported, or its tensors do not fit or are not finite. The message names file and
            tensor.
        CheckpointError: a file is missing or damaged, or `out` cannot be written.
    """
    hf_config = read_config(source)
    with world_of_one() as groups:
        reader = HfReader(source)
        plan = read_plan(source, hf_config, reader, groups)
        tensors = reader.shapes()
        for slot in plan.slots:
            # on the meta device: this checks shapes and dtypes before anything is written
            slot.from_hf([tensors[n] for n in slot.hf_names])
        sizes = [sum(tensors[n].nbytes for n in slot.hf_names) for slot in plan.slots]
        carried = CarriedTensors(source, plan.family.carries)
        total = sum(sizes) + sum(t.nbytes for t in carried.shapes().values())
        with new_directory(out, total) as filling, progress_bar("import", total) as advance:
            (filling / HF_FOLDER).mkdir()
            carry_over(source, filling / HF_FOLDER)
            write_shards(carried, filling / HF_FOLDER, "carried", CARRIED_FILE)
            advance(total - sum(sizes))
            writer = DistCheckpointWriter(filling)
            for kept in plan.objects:
                writer.add_object(kept)
            for slot in plan.slots:
                parameter = slot.from_hf([reader.get(n) for n in slot.hf_names])
                check_finite(parameter, f"{reader.path}: {', '.join(slot.hf_names)}")
                for piece in slot.pieces(parameter):
                    writer.add(piece)
                advance(parameter.nbytes)
                del parameter
            writer.finish({})
    return total


def read_plan(source: Path, hf_config: Mapping[str, Any], reader: HfReader, groups: Any) -> ConversionPlan:
    """Return the plan of a HF directory, after a check that its tensors and its tokenizer fit its config.json. Raises
    ConversionError if the model is quantized or not supported, a tensor is missing or left over, or the tokenizer has ids
    beyond the vocabulary.
    """
    if "quantization_config" in hf_config:
        raise ConversionError(
            f"{source / 'config.json'}: the weights are quantized (quantization_config), which is not read; "
            "give the checkpoint from which they were made"
        )
    plan = make_plan(hf_config, groups)
    check_tokenizer(source, plan.arch.vocab_size)
    check_tensors(reader, plan.family, plan.arch)
    return plan


def check_finite(tensor: Tensor, what: str) -> None:
    """Raise ConversionError when a value is infinite or NaN."""
    # A sum is several times faster than a test of each value. It is not finite if a value is not, but may also overflow.
    if not bool(torch.isfinite(tensor.sum())) and not bool(torch.isfinite(tensor).all()):
        raise ConversionError(f"{what} hold values that are not finite; the file is damaged, or the model has diverged")
