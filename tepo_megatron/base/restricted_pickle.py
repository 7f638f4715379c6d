"""Load a checkpoint's `.metadata`. This is the only place that unpickles data not written by the same process.

A pickle is a program, and the pickle in PyTorch's and Megatron's distributed checkpoints is read on every resume, evaluation
and conversion. Here it may name the classes that such metadata consists of, and nothing else; the only allowed function looks
up a memory layout by name. tests/unit/test_unpickling.py lists every other call that could execute what it reads.
"""

import collections
import contextlib
import io
import pathlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint import planner as dcp_planner
from torch.serialization import _get_layout

from tepo_megatron.base.errors import CheckpointError

METADATA = ".metadata"
_CLASSES: dict[str, Any] = {
    f"{found.__module__}.{found.__qualname__}": found
    for found in (
        dcp.BytesStorageMetadata, dcp.ChunkStorageMetadata, dcp.Metadata, dcp.MetadataIndex, dcp.StorageMeta,
        dcp.TensorProperties, dcp.TensorStorageMetadata, dcp._MEM_FORMAT_ENCODING, dcp_filesystem._StorageInfo,
        # parts of each rank's plan, which Megatron-Core keeps for its next save
        dcp_planner.BytesIOWriteData, dcp_planner.SavePlan, dcp_planner.TensorWriteData, dcp_planner.WriteItem,
        dcp_planner.WriteItemType,
        collections.OrderedDict, pathlib.PosixPath, pathlib.PurePosixPath,
    )
}  # fmt: skip
_ALLOWED: dict[str, Any] = _CLASSES | {
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": _get_layout,
    **{f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}
# Placeholder classes for what Megatron-Core 0.15 and older wrote next to the metadata; imported only if a file names them.
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_MEGATRON_CLASSES = ("MCoreMetadata", "MCoreSavePlan")


class _Refused(pickle.UnpicklingError):
    pass


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class by its full name, without looking it up in a module: dots in a name lead nowhere."""
        full = f"{module}.{name}"
        if full in _ALLOWED:
            return _ALLOWED[full]
        if module == _MEGATRON and name in _MEGATRON_CLASSES:
            from megatron.core.dist_checkpointing.strategies import torch as theirs

            return getattr(theirs, name)
        raise _Refused(f"names {full}, which is no part of checkpoint metadata")


def load_metadata(folder: Path) -> dcp.Metadata:
    """Return the metadata of a checkpoint without executing anything that `.metadata` names.

    Raises CheckpointError if the file is missing or damaged, names anything but metadata classes, or places data outside the
    folder.
    """
    path = folder / METADATA
    try:
        data = path.read_bytes()
    except OSError:
        raise CheckpointError(
            f"{path}: not found; {folder} is no torch_dist checkpoint, or one whose writing did not end"
        ) from None
    before = {kind: dict(vars(kind)) for kind in _CLASSES.values() if kind.__module__.startswith("torch.")}
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
    except _Refused as e:
        raise CheckpointError(f"{path}: {e}; nothing of it was executed. Copy the checkpoint again") from None
    except Exception as e:  # a damaged pickle can raise anything
        raise CheckpointError(f"{path}: truncated or corrupt ({e!r}); copy the checkpoint again") from None
    finally:
        changed = [kind for kind, attributes in before.items() if _restored(kind, attributes)]
    if changed:
        raise CheckpointError(f"{path}: changes the class {changed[0].__qualname__}, which metadata never does; do not use it")
    if not isinstance(metadata, dcp.Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"{path}: holds no checkpoint metadata; copy the checkpoint again")
    for place in metadata.storage_data.values():
        inside = getattr(place, "relative_path", None)
        if not isinstance(inside, str) or inside != Path(inside).name or inside in ("", ".", ".."):
            raise CheckpointError(f"{path}: puts data into {inside!r}, no file of its folder; copy the checkpoint again")
    return metadata


def _restored(kind: Any, attributes: dict[str, Any]) -> bool:
    """Restore a class whose attributes a pickle changed (its BUILD instruction can). Return whether it had changed."""
    now = dict(vars(kind))
    differing = {name for name in now.keys() | attributes.keys() if now.get(name) is not attributes.get(name)}
    for name in differing:
        if name in attributes:
            setattr(kind, name, attributes[name])
        else:
            delattr(kind, name)
    return bool(differing)


class MetadataReader(FileSystemReader):
    """PyTorch's checkpoint reader for a folder, with `load_metadata` instead of PyTorch's own unpickling."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        return _restricted(self)


def _restricted(reader: FileSystemReader) -> dcp.Metadata:
    metadata = load_metadata(Path(reader.path))
    metadata.storage_meta = metadata.storage_meta or dcp.StorageMeta()
    metadata.storage_meta.load_id = reader.load_id
    return metadata


@contextlib.contextmanager
def restricted_loading() -> Iterator[None]:
    """Make every PyTorch reader in this block, such as Megatron's own, read its metadata with `load_metadata`."""
    original = FileSystemReader.read_metadata
    FileSystemReader.read_metadata = lambda self, *args, **kwargs: _restricted(self)
    try:
        yield
    finally:
        FileSystemReader.read_metadata = original
