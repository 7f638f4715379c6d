"""Where the buckets of a round lie until the engine has read them: files in shared memory or in `sync.folder`, or rows of bytes
in the memory of who sends them.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tepo_megatron import scratch
from tepo_megatron.channel import Bucket, Source, crc32, pack
from tepo_megatron.config import SyncConfig
from tepo_megatron.errors import CheckpointError, ConfigError
from tepo_megatron.ipc import Row, lend
from tepo_megatron.parallel import Groups
from tepo_megatron.platform.host_memory import HostArena
from tepo_megatron.weights.rounds import Rounds

SHARED_MEMORY = scratch.SHARED_MEMORY
PURPOSE = "sync"  # of folders
# what the engine is told, and CRC-32 of tensors
Stored = tuple[Source, dict[str, int]]


class Store(Protocol):
    """One rank's. A round takes the place of the one before the last."""

    def put(self, version: int, number: int, tensors: Iterable[tuple[str, Tensor]], checked: bool) -> Stored | None:
        """Keep this rank's bucket of the round `number` of an update; None: it is empty. Raises CheckpointError when it cannot.

        checked: the engine is to compare each tensor's CRC-32.
        """
        ...

    def remove(self, sources: Sequence[Source]) -> None:
        """On rank 0: the engine has read these."""
        ...

    def rest(self) -> None:
        """The engine has read everything; other ranks may have begun the next update."""
        ...

    def clear(self) -> None:
        """The update has failed."""
        ...

    def close(self) -> None:
        """The last. A second call does nothing."""
        ...


class Files:
    """safetensors files in one folder, which rank 0 makes and empties. Collectives: one broadcast over the host group."""

    def __init__(self, cfg: SyncConfig, plan: Rounds, groups: Groups) -> None:
        self._in_use: int | None = None
        self._owner, self._for_others = groups.owner, cfg.folder is not None
        folder = Path()
        if groups.is_main:
            folder, self._in_use = make_folder(cfg.folder)
        name = [str(folder)]
        dist.broadcast_object_list(name, src=0, group=groups.host, device=torch.device("cpu"))
        self.folder = Path(name[0])
        self._staging = Staging(plan.largest, groups.device) if groups.device.type == "cuda" else None

    def put(self, version: int, number: int, tensors: Iterable[tuple[str, Tensor]], checked: bool) -> Stored | None:
        """See `Store.put`."""
        there = {name: on_host(t) for name, t in tensors} if self._staging is None else self._staging.copy(tensors)
        if not there:
            return None
        path = self.folder / f"v{version}-{number:05d}-{self._owner}.safetensors"
        checksums = {name: crc32(t) for name, t in there.items()} if checked else {}
        write_file(there, path, checksums, for_others=self._for_others)
        return path, checksums

    def remove(self, sources: Sequence[Source]) -> None:
        """Two rounds lie there at most."""
        for source in sources:
            assert isinstance(source, Path)
            source.unlink()

    def rest(self) -> None:
        """They are removed."""

    def clear(self) -> None:
        """Remove what is left."""
        if self._in_use is not None:
            for file in self.folder.iterdir():
                file.unlink()

    def close(self) -> None:
        """Remove the folder."""
        if self._in_use is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._in_use)
            self._in_use = None


class Rows:
    """Two rows on the sender's device, in turn, held during an update alone; servers of this machine map them (`ipc.py`)."""

    def __init__(self, cfg: SyncConfig, plan: Rounds, groups: Groups) -> None:
        self._nbytes, self._device = plan.largest, groups.device
        self._sender = plan.senders.index(groups.rank) if groups.rank in plan.senders else -1
        self._rows: dict[int, Row] = {}

    def put(self, version: int, number: int, tensors: Iterable[tuple[str, Tensor]], checked: bool) -> Stored | None:
        """See `Store.put`."""
        if not self._nbytes:  # its tensor-parallel group gathers with it
            collections.deque(tensors, maxlen=0)
            return None
        row = self._row(number % 2)
        contents = pack(tensors, row.bytes, checked)
        if not contents:
            return None
        row.written()
        checksums = {c.name: c.crc32 for c in contents if c.crc32 is not None}
        return Bucket(number, self._sender, contents, row.handle), checksums

    def _row(self, which: int) -> Row:
        if which not in self._rows:
            self._rows[which] = lend(self._nbytes, self._device)
        return self._rows[which]

    def remove(self, sources: Sequence[Source]) -> None:
        """The next but one is written over it."""

    def rest(self) -> None:
        """Give the memory back."""
        self.clear()

    def clear(self) -> None:
        """Who still maps it belongs to an engine that can only be closed."""
        for row in self._rows.values():
            row.close()
        self._rows = {}

    def close(self) -> None:
        """See `clear`."""
        self.clear()


class Staging:
    """Page-locked host memory through which a sender's bucket leaves its GPU; it is kept from one update to the next.

    A copy to pageable memory goes through a small buffer of the driver, one tensor after the other, and waits for each.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Take no memory yet.

        Args:
            nbytes: of the largest bucket, its tensors one after the other at multiples of their dtypes' sizes.
            device: of the tensors.
        """
        self._nbytes, self._device, self._arena = nbytes, device, HostArena(device)

    def copy(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return the tensors on the host, until the next call. Waits once, for all copies."""
        row = self._arena.pieces([self._nbytes])[0]
        there: dict[str, Tensor] = {}
        end = 0
        for name, tensor in tensors:
            start = -(-end // tensor.element_size()) * tensor.element_size()
            end = start + tensor.nbytes
            there[name] = row[start:end].view(tensor.dtype).view(tensor.shape)
            there[name].copy_(tensor.detach(), non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return there


def on_host(tensor: Tensor) -> Tensor:
    """As a file takes it; a tensor that is like that already is not copied: it is written before training goes on."""
    return tensor.detach().to("cpu").contiguous()


def write_file(tensors: dict[str, Tensor], path: Path, checksums: Mapping[str, int], for_others: bool = False) -> None:
    """Write a file, with the CRC-32 of tensors in its header where there are any. Raises CheckpointError when it cannot.

    for_others: on another machine, so it gets its name when all of it has left this one. `rollout/in_server/weight_files.py`
    reads it.
    """
    header = {"format": "pt"}
    if checksums:
        header["crc32"] = json.dumps(checksums)
    try:
        if for_others:
            part = path.with_suffix(".part")
            save_file(tensors, part, header)
            _flush(part)
            part.rename(path)
            with contextlib.suppress(OSError):  # some file systems flush no folders
                _flush(path.parent)
        else:
            save_file(tensors, path, header)
    except (OSError, SafetensorError) as e:
        wanted, free = sum(t.nbytes for t in tensors.values()), shutil.disk_usage(path.parent).free
        raise CheckpointError(
            f"{path}: cannot be written ({e}): {wanted / 2**20:.0f} MiB wanted, {free / 2**20:.0f} MiB free; lower "
            "sync.bucket_mib or free some space (in a container, /dev/shm grows with --shm-size)"
        ) from None


def _flush(path: Path) -> None:
    """Return when a file, or what a folder lists, is where others see it. Raises OSError."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def make_folder(shared: str | None = None) -> tuple[Path, int]:
    """See `scratch.claim`: in `shared`, or in shared memory. Raises ConfigError."""
    root = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    if shared is not None:
        root = Path(shared).absolute()  # the servers have working directories of their own
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ConfigError(
                f"sync.folder={shared}: cannot be made ({e.strerror}); give a folder that all machines share"
            ) from None
    return scratch.claim(root, scratch.new_name(PURPOSE))
