"""Delivery of the actor's weights to the inference engine after every step, in rounds (see `rounds.py`), through files.

In a round every owner writes its next bucket, in HF layout, to a file in shared memory, or in `sync.folder` where servers or
ranks are on other machines; when all have, rank 0 tells the engine the files' names, and while the engine loads them the next
round is written. A round's files are removed before the round after the next begins: the shared memory holds two rounds at
most, of `sync.bucket_mib` each (or, where that is larger, of one parameter from each owner), and no rank holds more than one
bucket beyond the model. With `sync.delta` what did not change since the last push is left out (see `delta.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol, Self

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tepo_megatron.channel import crc32
from tepo_megatron.config import SyncConfig
from tepo_megatron.errors import CheckpointError, ConfigError, SyncError
from tepo_megatron.parallel import Groups
from tepo_megatron.weights.delta import Delta, names_without
from tepo_megatron.weights.gather import Binding
from tepo_megatron.weights.ops import Architecture
from tepo_megatron.weights.rounds import Rounds


class Receiver(Protocol):
    """The side of an engine that takes weights. See `rollout.engine.RolloutEngine`."""

    def begin_update(self, version: int) -> None:
        """All weights of `version` are to follow. Raises SyncError."""

    @property
    def base(self) -> int | None:
        """The version that all who take the update had before it; None: there is no such version."""

    def keep(self, names: Sequence[str]) -> None:
        """These tensors do not follow: they stay as they were in the version before. Raises SyncError."""

    def load(self, files: Sequence[Path]) -> Future[None]:
        """Some of its tensors; the files are in use until the future has a result, or SyncError."""

    def finish_update(self) -> None:
        """That was all: serve them. Raises SyncError."""

    def verify(self, sent: Mapping[str, int]) -> None:
        """Whether what is served is what was sent: tensors with these CRC-32. Raises SyncError."""


class WeightSync:
    """Pushes the weights of `bindings` to `receiver` (given on rank 0 only) through shared memory.

    Collectives: here, one broadcast and three all-gathers over the host group; in a push, one gather over tp for each split
    parameter that is sent, one all-gather over the host group for each round and one at the end, with `sync.delta` six more.
    """

    def __init__(
        self,
        cfg: SyncConfig,
        bindings: Sequence[Binding],
        arch: Architecture,
        groups: Groups,
        receiver: Receiver | None,
    ) -> None:
        self.cfg, self.groups, self.receiver = cfg, groups, receiver
        self._in_use: int | None = None
        self._sent: dict[str, int] = {}  # CRC-32 of what this rank sent when it was checked last
        folder = Path()
        if groups.is_main:
            folder, self._in_use = _make_folder(cfg.folder)
        name = [str(folder)]
        dist.broadcast_object_list(name, src=0, group=groups.host, device=torch.device("cpu"))
        self.folder = Path(name[0])
        self._plan = Rounds(cfg.bucket_mib, bindings, arch, groups)
        self.rounds = self._plan.count
        # known, not looked up: another machine may see a new file before it sees it listed
        self._owners = self._from_owners(None)
        self._delta = Delta(self._plan) if cfg.delta else None

    def push(self, version: int) -> None:
        """All ranks call it; when it returns, the engine serves `version`, and no file is left.

        Raises, on every rank, SyncError when the engine refuses the weights, CheckpointError when a rank cannot write. The
        engine can only be closed then.
        """
        loading: Future[None] | None = None
        before: list[Path] = []
        try:
            only = self._begin(version) if self._delta is not None else None
            for i, files in self._files(version, only):
                with self._plan.agreed():
                    self._write(version, i, only)
                    if self.receiver is not None:
                        if loading is not None:
                            loading.result()
                            _remove(before)
                        elif self._delta is None:
                            self.receiver.begin_update(version)
                if self.receiver is not None:
                    loading, before = self.receiver.load(files), files
            with self._plan.agreed():
                if self.receiver is not None:
                    if loading is not None:
                        loading.result()
                        _remove(before)
                    self.receiver.finish_update()
            if _is_due(version, self.cfg):
                self._plan.verify(self.receiver, self._sent)
        except BaseException:
            if self.receiver is not None:
                for file in self.folder.iterdir():
                    file.unlink()
            raise

    def _write(self, version: int, i: int, only: Sequence[Binding] | None) -> None:
        """This rank's bucket of round `i`, if it has one. Raises CheckpointError."""
        tensors = {name: _on_host(t) for name, t in self._plan.tensors(i, only)}
        if tensors:  # on tensor-parallel rank 0
            path = self._path(version, i, self.groups.owner)
            checksums = {name: crc32(t) for name, t in tensors.items()} if _is_due(version, self.cfg) else {}
            self._sent |= checksums
            _save(tensors, path, checksums, for_others=self.cfg.folder is not None)

    def _begin(self, version: int) -> list[Binding] | None:
        """Begin an update of what changed: of this rank's parameters, those that it sends; None: all."""
        assert self._delta is not None
        base: int | None = None
        with self._plan.agreed():
            if self.receiver is not None:
                self.receiver.begin_update(version)
                base = self.receiver.base
        only = self._delta.changed(version, self._plan.from_all(base)[0])
        told = self._plan.from_all(names_without(self._plan.sent, only) if self._plan.mine else [])
        with self._plan.agreed():
            if self.receiver is not None:
                self.receiver.keep([name for names in told for name in names])
        return only

    def _files(self, version: int, only: Sequence[Binding] | None) -> list[tuple[int, list[Path]]]:
        """The rounds in which there is anything to send, and their files."""
        owners = self._owners if self._delta is None else self._from_owners(only)
        files = [(i, [self._path(version, i, owner) for owner, rounds in owners if i in rounds]) for i in range(self.rounds)]
        return [(i, there) for i, there in files if there]

    def _from_owners(self, only: Sequence[Binding] | None) -> list[tuple[str, frozenset[int]]]:
        """Who sends in which rounds."""
        return sorted(self._plan.from_all((self.groups.owner, self._plan.mine_of(only))), key=lambda told: told[0])

    def _path(self, version: int, i: int, owner: str) -> Path:
        return self.folder / f"v{version}-{i:05d}-{owner}.safetensors"

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
    """Raise ConfigError when torchrun started ranks on several machines, and files in shared memory would reach one."""
    if cfg.transport != "shm" or cfg.folder is not None:
        return
    here, everywhere = (int(os.environ.get(name, "1")) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    if here != everywhere:
        raise ConfigError(
            f"sync.transport={cfg.transport} without sync.folder needs all ranks on one machine, but only {here} of "
            f"{everywhere} are here; set sync.folder to a folder that all machines share, or use sync.transport=group"
        )


def check_mismatch(mean_logprob_diff: float, version: int, cfg: SyncConfig) -> None:
    """Raise SyncError when the engine's log-probs say that it serves other weights than the version it echoes."""
    if not mean_logprob_diff <= cfg.max_logprob_diff:  # nan too
        raise SyncError(
            f"mean |rollout - actor| log-prob difference is {mean_logprob_diff:.2e} nats at version {version}, above "
            f"sync.max_logprob_diff={cfg.max_logprob_diff}: the engine does not serve the weights that were sent "
            f"(or, in low precision, the gate is too tight: raise sync.max_logprob_diff)"
        )


def _remove(files: Sequence[Path]) -> None:
    for file in files:
        file.unlink()


def _is_due(version: int, cfg: SyncConfig) -> bool:
    """Whether this delivery is checked."""
    return cfg.verify_every > 0 and version % cfg.verify_every == 0


def _on_host(tensor: Tensor) -> Tensor:
    """As a file takes it; a tensor that is like that already is not copied: it is written before training goes on."""
    return tensor.detach().to("cpu").contiguous()


def _save(tensors: dict[str, Tensor], path: Path, checksums: Mapping[str, int], for_others: bool = False) -> None:
    """Write a file, with the CRC-32 of tensors in its header where there are any. Raises CheckpointError when it cannot.

    for_others: on another machine, so it gets its name when all of it has left this one. `rollout/weight_files.py` reads it.
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


def _make_folder(shared: str | None = None) -> tuple[Path, int]:
    """A private folder in `shared`, or in shared memory, and the open lock that marks it as in use, after removing those of
    killed runs. Raises ConfigError.

    The kernel drops a lock with its process, and containers that share the memory share the locks, unlike process ids.
    """
    root = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    if shared is not None:
        root = Path(shared).absolute()  # the servers have working directories of their own
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ConfigError(
                f"sync.folder={shared}: cannot be made ({e.strerror}); give a folder that all machines share"
            ) from None
    for folder in root.glob("tepo-sync-*"):
        with contextlib.suppress(OSError):  # another user's, in use, or removed meanwhile
            lock = _lock(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
    # locked before it gets the name by which others would find and remove it; the lock stays with the folder
    unnamed = Path(tempfile.mkdtemp(prefix=".tepo-", dir=root))
    try:
        lock = _lock(unnamed)
    except OSError:  # the file system has no locks: nobody can take this folder for an abandoned one
        lock = os.open(unnamed, os.O_RDONLY | os.O_DIRECTORY)
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
