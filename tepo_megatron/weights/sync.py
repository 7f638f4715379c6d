"""Delivery of the actor's weights to the inference engine after every step.

Each owner of a pipeline stage, or of experts in it, writes its own tensors, in HF layout, to files in shared memory; rank 0
tells the engine their names. No rank holds more than one bucket and one tensor beyond the model; the shared memory holds all
of it until it is loaded.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self

import torch
import torch.distributed as dist

from tepo_megatron.config import SyncConfig
from tepo_megatron.errors import ConfigError, SyncError
from tepo_megatron.parallel import Groups
from tepo_megatron.weights import hf_io
from tepo_megatron.weights.gather import Binding, iterate_hf, sent_by
from tepo_megatron.weights.ops import Architecture


class Receiver(Protocol):
    """The side of an engine that takes weights."""

    def update_weights(self, files: Sequence[Path], version: int) -> None:
        """Load all tensors of `files` and serve them as `version`. Raises SyncError."""


class WeightSync:
    """Pushes the weights of `bindings` to `receiver` (given on rank 0 only).

    Collectives of a push: one gather over tp per split parameter, one barrier.
    """

    def __init__(
        self,
        cfg: SyncConfig,
        bindings: Sequence[Binding],
        arch: Architecture,
        groups: Groups,
        receiver: Receiver | None,
    ) -> None:
        self.cfg, self.bindings, self.arch, self.groups, self.receiver = cfg, bindings, arch, groups, receiver
        self._in_use: int | None = None
        folder = Path()
        if groups.is_main:
            folder, self._in_use = _make_folder()
        name = [str(folder)]
        dist.broadcast_object_list(name, src=0, group=groups.host, device=torch.device("cpu"))
        self.folder = Path(name[0])

    def push(self, version: int) -> None:
        """All ranks call it; when rank 0 returns, the engine serves `version`."""
        if sent := sent_by(self.bindings, self.groups):
            stream = iterate_hf(sent, self.arch, self.groups.tp)
            hf_io.write_shards(stream, self.folder, f"v{version}-{self.groups.owner}", limit=self.cfg.bucket_mib * 2**20)
        dist.barrier(group=self.groups.host)
        if self.receiver is not None:
            files = sorted(self.folder.glob(f"v{version}-*.safetensors"))
            try:
                self.receiver.update_weights(files, version)
            finally:
                for file in files:
                    file.unlink()

    def close(self) -> None:
        """Remove the shared folder. A second call does nothing."""
        if self._in_use is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._in_use)
            self._in_use = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class NoSync:
    """In the place of a sync when nobody serves the weights."""

    def push(self, version: int) -> None:
        """Nothing to do."""


def check_one_host(cfg: SyncConfig) -> None:
    """Raise ConfigError when torchrun started ranks on several machines: files in shared memory reach one."""
    here, everywhere = (int(os.environ.get(name, "1")) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    if here != everywhere:
        raise ConfigError(
            f"sync.transport={cfg.transport} needs all ranks on one machine, but only {here} of {everywhere} are here"
        )


def check_mismatch(mean_logprob_diff: float, version: int, cfg: SyncConfig) -> None:
    """Raise SyncError when the engine's log-probs say that it serves other weights than the version it echoes."""
    if not mean_logprob_diff <= cfg.max_logprob_diff:  # nan too
        raise SyncError(
            f"mean |rollout - actor| log-prob difference is {mean_logprob_diff:.2e} nats at version {version}, above "
            f"sync.max_logprob_diff={cfg.max_logprob_diff}: the engine does not serve the weights that were sent "
            f"(or, in low precision, the gate is too tight: raise sync.max_logprob_diff)"
        )


def _make_folder() -> tuple[Path, int]:
    """A private folder in shared memory and the open lock that marks it as in use, after removing those of killed runs.

    The kernel drops a lock with its process, and containers that share the memory share the locks, unlike process ids.
    """
    root = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    for folder in root.glob("tepo-sync-*"):
        with contextlib.suppress(OSError):  # another user's, in use, or removed meanwhile
            lock = _lock(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
    # locked before it gets the name by which others would find and remove it; the lock stays with the folder
    unnamed = Path(tempfile.mkdtemp(prefix=".tepo-", dir=root))
    lock = _lock(unnamed)
    return unnamed.rename(unnamed.with_name(f"tepo-sync-{unnamed.name.removeprefix('.tepo-')}")), lock


def _lock(folder: Path) -> int:
    """Lock a folder without waiting; returns the file to keep open. Raises OSError."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file
