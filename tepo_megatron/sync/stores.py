"""Transports `shm` and `ipc`: the engine loads a round from where the ranks stored it.

A bucket is a safetensors file in shared memory or in `sync.transport.folder` (here; on several machines: `relay.py`), or a
byte buffer in the memory of its sender, which servers of this machine map.
"""

import collections
import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tepo_megatron.base import scratch
from tepo_megatron.base.errors import CheckpointError, ConfigError
from tepo_megatron.base.storage import replacing
from tepo_megatron.config import SyncConfig
from tepo_megatron.dist.objects import broadcast_object
from tepo_megatron.dist.parallel import ParallelDims
from tepo_megatron.dist.platform.memory import HostArena
from tepo_megatron.sync.buckets import BucketPlan
from tepo_megatron.wire.bucket_format import Bucket, IpcBuffer, Source, crc32, export_buffer, pack
from tepo_megatron.wire.transport import Pending, StagedBucket, WeightReceiver

SHARED_MEMORY = scratch.SHARED_MEMORY
PURPOSE = "sync"  # in the names of the folders, see `scratch.claim`


class StoredTransport:
    """The common part of the transports whose rounds the engine reads by itself: rank 0 gives it their locations.

    Each round replaces the one before the last. `start`, `wait` and `complete` make no collective call.
    """

    def __init__(self, cfg: SyncConfig, plan: BucketPlan, receiver: WeightReceiver | None) -> None:
        self._plan, self._receiver = plan, receiver
        self._loading: Pending | None = None
        self._sources: Sequence[Source] = ()

    def start(self, sources: Sequence[Source]) -> None:
        if self._receiver is not None:
            self._loading, self._sources = self._receiver.load(sources), sources

    def wait(self) -> None:
        """Return when the engine has loaded the round, and release its sources. See `WeightTransport.wait`."""
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.result()
            self._release(self._sources)

    def complete(self, reports: Sequence[None]) -> None:
        """Do nothing: the engine has loaded the round once rank 0 has waited. See `WeightTransport.complete`."""

    def finish(self) -> None:
        """Do nothing: all sources are released. See `WeightTransport.finish`."""

    def file_name(self, version: int, number: int, owner: str) -> str:
        """Return the name of a round's file."""
        return f"v{version}-{number:05d}-{owner}.safetensors"

    def _release(self, sources: Sequence[Source]) -> None:
        pass


class FileTransport(StoredTransport):
    """Stores buckets as safetensors files in one folder, which rank 0 makes and empties. See `WeightTransport`.

    Collectives: `open` takes one broadcast over the host group; a push takes none.
    """

    def __init__(self, cfg: SyncConfig, plan: BucketPlan, groups: ParallelDims, receiver: WeightReceiver | None) -> None:
        super().__init__(cfg, plan, receiver)
        self.folder = Path()
        self._owned: scratch.PrivateFolder | None = None
        self._owner, self._for_others = groups.owner, cfg.shared_folder is not None
        self._staging = PinnedStaging(plan.largest, groups.device) if groups.device.type == "cuda" else None

    @classmethod
    def open(cls, cfg: SyncConfig, plan: BucketPlan, groups: ParallelDims, receiver: WeightReceiver | None) -> "FileTransport":
        """Return a transport whose folder rank 0 has made."""
        transport = cls(cfg, plan, groups, receiver)
        if groups.is_main:
            transport._owned = scratch.PrivateFolder(*make_folder(cfg.shared_folder))
            transport.folder = transport._owned.path
        transport.folder = broadcast_object(transport.folder, groups.host)
        return transport

    def stage(self, version: int, number: int, tensors: Iterable[tuple[str, Tensor]], checked: bool) -> StagedBucket | None:
        if self._staging is None:
            staged = {name: on_host(t) for name, t in tensors}
        else:
            staged = self._staging.copy(tensors)
        if not staged:
            return None
        path = self.folder / self.file_name(version, number, self._owner)
        checksums = {name: crc32(t) for name, t in staged.items()} if checked else {}
        write_file(staged, path, checksums, for_others=self._for_others)
        return StagedBucket(path, checksums, sum(t.nbytes for t in staged.values()))

    def _release(self, sources: Sequence[Source]) -> None:
        """Delete files that the engine has read, so that two rounds lie in the folder at most."""
        for source in sources:
            assert isinstance(source, Path)
            source.unlink()

    def abort(self) -> None:
        """Delete the files that are left; only the rank that made the folder does."""
        self._loading = None
        if self._owned is not None:
            for file in self.folder.iterdir():
                file.unlink()

    def close(self) -> None:
        if self._owned is not None:
            self._owned.remove()


class IpcTransport(StoredTransport):
    """Stores buckets in two byte buffers on the sender's device, used in turn, which servers on this machine map.

    The buffers (`wire/bucket_format.py`) exist only during an update. Collectives: none. See `WeightTransport`.
    """

    def __init__(self, cfg: SyncConfig, plan: BucketPlan, groups: ParallelDims, receiver: WeightReceiver | None) -> None:
        super().__init__(cfg, plan, receiver)
        self._nbytes, self._device = plan.largest, groups.device
        self._sender = plan.senders.index(groups.rank) if groups.rank in plan.senders else -1
        self._buffers: dict[int, IpcBuffer] = {}

    def stage(self, version: int, number: int, tensors: Iterable[tuple[str, Tensor]], checked: bool) -> StagedBucket | None:
        """Copy the bucket into one of the two buffers. See `WeightTransport.stage`."""
        if not self._nbytes:  # this rank does not send, but its tensor-parallel group gathers together with it
            collections.deque(tensors, maxlen=0)
            return None
        buffer = self._buffer(number % 2)
        if not (contents := pack(tensors, buffer.bytes, checked)):
            return None
        buffer.flush()
        bucket = Bucket(number, self._sender, contents, buffer.handle)
        return StagedBucket(bucket, bucket.checksums, bucket.nbytes)

    def _buffer(self, which: int) -> IpcBuffer:
        if which not in self._buffers:
            self._buffers[which] = export_buffer(self._nbytes, self._device)
        return self._buffers[which]

    def finish(self) -> None:
        self.abort()

    def abort(self) -> None:
        """Free the buffers. A process that still maps one belongs to an engine that can only be closed."""
        self._loading = None
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers = {}

    def close(self) -> None:
        self.abort()


class PinnedStaging:
    """Pinned host memory through which a sender's bucket leaves its GPU. It is kept from one update to the next.

    A copy to pageable memory would go through a small buffer of the driver, one tensor after the other, and wait for each.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._nbytes, self._device, self._arena = nbytes, device, HostArena(device)

    def copy(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return the tensors on the host, by name. They are valid until the next call. Waits once, for all copies."""
        row = self._arena.pieces([self._nbytes])[0]
        copies: dict[str, Tensor] = {}
        end = 0
        for name, tensor in tensors:
            start = -(-end // tensor.element_size()) * tensor.element_size()
            end = start + tensor.nbytes
            copies[name] = row[start:end].view(tensor.dtype).view(tensor.shape)
            copies[name].copy_(tensor.detach(), non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return copies


def on_host(tensor: Tensor) -> Tensor:
    """Return the tensor as a safetensors file takes it: on the CPU and contiguous.

    A tensor that already is both is not copied; that is safe because it is written before training goes on.
    """
    return tensor.detach().to("cpu").contiguous()


def write_file(tensors: dict[str, Tensor], path: Path, checksums: Mapping[str, int], for_others: bool = False) -> None:
    """Write tensors to a safetensors file, which `wire/receiver/receiver.py` reads."""
    header = {"format": "pt"}
    if checksums:
        header["crc32"] = json.dumps(checksums)
    try:
        if for_others:
            with replacing(path) as unfinished:
                save_file(tensors, unfinished, header)
        else:
            save_file(tensors, path, header)
    except (OSError, SafetensorError) as e:
        wanted, free = sum(t.nbytes for t in tensors.values()), shutil.disk_usage(path.parent).free
        raise CheckpointError(
            f"{path}: cannot be written ({e}): {wanted / 2**20:.0f} MiB wanted, {free / 2**20:.0f} MiB free; lower "
            "sync.bucket_mib or free some space (in a container, /dev/shm grows with --shm-size)"
        ) from None


def make_folder(shared: str | None = None) -> tuple[Path, int]:
    """Make a private folder in `shared`, by default in shared memory; return it with its lock (see `scratch.claim`)."""
    root = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    if shared is not None:
        root = Path(shared).absolute()  # absolute, because the servers have other working directories
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ConfigError(
                f"sync.transport.folder={shared}: cannot be made ({e.strerror}); give a folder that all machines share"
            ) from None
    return scratch.claim(root, scratch.new_name(PURPOSE))
