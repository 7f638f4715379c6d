"""The device mesh. This module is the only wrapper of Megatron-Core's `parallel_state`.

Axes: dp (data), tp (tensor), pp (pipeline), cp (context) and ep (expert parallelism, which divides the ranks of dp x cp).
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import math
import os
import socket
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from tepo_megatron.base.errors import ConfigError, LostRanks
from tepo_megatron.base.processes import ATTEMPT, START_ID
from tepo_megatron.base.scratch import WORLD_FOLDER, check_private
from tepo_megatron.config import ParallelConfig
from tepo_megatron.config.io import differences
from tepo_megatron.dist.own_peers import own_peers_only
from tepo_megatron.dist.platform import Platform
from tepo_megatron.monitor.hang_watchdog import BeatStore

_BYTES = 1024  # minimum size of a file; rewriting it takes no new space, so that a full disk does not stop the heartbeats
_ATTEMPTS = 100


class HeartbeatFolder:
    """The heartbeats of a machine's ranks: `check`, `get`, `set` and `compare_set` of a torch `Store`, one small file per key.

    The files are in the run's private folder, which exists. A torch `FileStore` does not fit: it appends every `set` for ever,
    and every rank reads all of it (136 bytes per second and rank, torch 2.13).
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._path(key).exists() for key in keys)

    def get(self, key: str) -> bytes:
        """Return the value of a key. Raise RuntimeError if it is missing or damaged."""
        with _as_runtime_error():
            for _ in range(_ATTEMPTS):
                checksum, _, value = self._path(key).read_bytes().rstrip(b" ").partition(b" ")
                if checksum == _checksum(value):
                    return value
                time.sleep(0.001)  # it was read during a write
        raise RuntimeError(f"{self._path(key)}: damaged")

    def set(self, key: str, value: str) -> None:
        """Replace the value of a key. Only one process may set a given key."""
        with _as_runtime_error():
            file = os.open(self._path(key), os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.ftruncate(file, os.pwrite(file, _record(value), 0))
            finally:
                os.close(file)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Set a key if it does not exist yet. Returns the value that the key has afterwards."""
        assert expected == "", "a heartbeat is never exchanged for another"
        with _as_runtime_error():
            own = self._folder / f".{os.getpid()}"
            own.write_bytes(_record(value))
            with contextlib.suppress(FileExistsError):
                os.link(own, self._path(key))  # the key appears with its full value, and only the first process succeeds
            own.unlink()
        return self.get(key)

    def _path(self, key: str) -> Path:
        return self._folder / quote(key, safe="")


def _record(value: str) -> bytes:
    data = value.rstrip(" ").encode()
    return (_checksum(data) + b" " + data).ljust(_BYTES)


def _checksum(data: bytes) -> bytes:
    return b"%08x" % zlib.crc32(data)


@contextlib.contextmanager
def _as_runtime_error() -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise RuntimeError(str(e)) from None


# Limit since a rank waits for rank 0, as while it samples: heartbeats end a wait for a dead or frozen rank, requests have
# limits; then gloo fails; key parallel.heartbeat_timeout
HOST_LIMIT = datetime.timedelta(days=30)


@dataclass(frozen=True)
class Axis:
    """One mesh axis as this rank sees it: its size, this rank's index on it, and the process group of the ranks along it."""

    size: int
    rank: int
    group: dist.ProcessGroup

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Axis:
        """Return the axis of an initialised process group."""
        return cls(group.size(), group.rank(), group)


@dataclass(frozen=True)
class ParallelDims:
    """The mesh of this run, as this rank sees it."""

    dp: Axis
    tp: Axis
    pp: Axis
    cp: Axis
    ep: Axis
    dp_cp: Axis  # the ranks over which a gradient is summed, dp x cp
    # The ranks of dp_cp that hold the same experts, dp x cp / ep. Experts are split over tp like other weights.
    expert_dp: Axis
    # All ranks, for objects on the host. Ranks wait here for rank 0 while it generates, for as long as it takes: rank 0's own
    # requests have deadlines, and if rank 0 ends, the other ranks end too.
    host: dist.ProcessGroup
    vpp: int  # virtual pipeline stages (model chunks) per rank
    device: torch.device
    limit: datetime.timedelta  # time limit of the collectives of every other group

    @property
    def rank(self) -> int:
        """Return this rank's index in the world."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """Return the number of ranks in the world."""
        return dist.get_world_size()

    @property
    def is_main(self) -> bool:
        """Return whether this is rank 0, which communicates with engines, graders and the user."""
        return self.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Return whether this rank is on the last pipeline stage, which has the output layer and computes the loss."""
        return self.pp.rank == self.pp.size - 1

    @property
    def is_first_replica(self) -> bool:
        """Return whether this rank exports its shards to engines and files: the first of dp x cp."""
        return self.dp_cp.rank == 0

    @property
    def is_first_expert_replica(self) -> bool:
        """Return whether this rank exports its experts' shards to engines and files: the first of `expert_dp`."""
        return self.expert_dp.rank == 0

    @property
    def owner(self) -> str:
        """Return a file name part, unique to each rank of pp x ep. Tensor-parallel rank 0 writes the file."""
        return f"stage{self.pp.rank:02d}" + (f"-experts{self.ep.rank:02d}" if self.ep.size > 1 else "")

    def broadcast_from_last_stage(self, x: torch.Tensor) -> torch.Tensor:
        """Overwrite `x` on every pipeline stage with the last stage's values. Collectives: one broadcast over pp if pp > 1."""
        if self.pp.size > 1:
            dist.broadcast(x, group_src=self.pp.size - 1, group=self.pp.group)
        return x


def initialize(cfg: ParallelConfig, platform: Platform, seed: int, config: Mapping[str, Any] | None = None) -> ParallelDims:
    """Join the world that the launcher describes (RANK, WORLD_SIZE, ...) and build the mesh.

    Args:
        config: This rank's whole config as plain JSON, to be compared with rank 0's. None: it is not compared.
    Raises:
        ConfigError: The world size is not tp*pp*cp*dp, or (raised on all ranks) a rank has another config than rank 0.
        ForeignPeer: Another user of this machine took part in forming the groups.
        LostRanks: This rank was restarted, and those of another machine did not come back.
    """
    world_size, local_rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    if world_size != cfg.world_size:
        raise ConfigError(
            f"parallel: tp*pp*cp*dp = {cfg.tp}*{cfg.pp}*{cfg.cp}*{cfg.dp} = {cfg.world_size} ranks, but {world_size} were "
            f"started; set parallel.dp so that the product is {world_size}, or start {cfg.world_size} ranks"
        )
    device = platform.device(local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with own_peers_only():
        if not dist.is_initialized():
            _join_world(platform.backend, world_size, cfg)
        if config is not None:
            _refuse_other_configs(config)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=cfg.tp,
            pipeline_model_parallel_size=cfg.pp,
            virtual_pipeline_model_parallel_size=cfg.vpp if cfg.vpp > 1 else None,
            context_parallel_size=cfg.cp,
            expert_model_parallel_size=cfg.ep,
            expert_tensor_parallel_size=cfg.tp,
            distributed_timeout_minutes=math.ceil(cfg.group_seconds / 60),
        )
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        host = dist.new_group(backend=platform.host_backend, timeout=HOST_LIMIT, group_desc="HOST_GROUP")
    return _mesh(device, host, datetime.timedelta(seconds=cfg.group_seconds))


def _join_world(backend: str, world_size: int, cfg: ParallelConfig) -> None:
    """Initialise torch.distributed through the launcher's private folder if there is one, else through a store."""
    timeout = datetime.timedelta(seconds=cfg.group_seconds)
    if WORLD_FOLDER not in os.environ:
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        attempt = int(os.environ.get(ATTEMPT, "0"))
        # the store outlives the ranks, and still has the addresses of those that were restarted
        store = dist.PrefixStore(f"{os.environ.get(START_ID, 'none')}/attempt-{attempt}", store)
        if attempt:
            _wait_for_restarted(store, rank, size, cfg.heartbeat_timeout + cfg.restart_seconds)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        return
    folder = Path(os.environ[WORLD_FOLDER])
    check_private(folder)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(backend, store=store, rank=int(os.environ["RANK"]), world_size=world_size, timeout=timeout)


def _wait_for_restarted(store: dist.Store, rank: int, world_size: int, seconds: float) -> None:
    """Wait until all ranks are restarted. Each launcher restarts those of its machine once one of them has failed."""
    store.set(f"restarted/{rank}", "")
    try:
        store.wait([f"restarted/{other}" for other in range(world_size)], datetime.timedelta(seconds=seconds))
    except RuntimeError:  # DistStoreError after the time
        if lost := [str(other) for other in range(world_size) if not store.check([f"restarted/{other}"])]:
            raise LostRanks(
                f"ranks {', '.join(lost)} did not come back within {seconds:.0f} s (parallel.start_seconds) after all ranks "
                "had to be restarted: their machine is lost, or its launcher has ended; go on with tepo resume"
            ) from None


def _refuse_other_configs(config: Mapping[str, Any]) -> None:
    """Raise ConfigError on all ranks if one has another config than rank 0, and name that rank."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    own = json.dumps(config, sort_keys=True)
    store.set(f"config/{rank}", json.dumps({"host": socket.gethostname(), "sha256": _sha256(own), "config": own}))
    if rank == 0:
        configs = (json.loads(store.get(f"config/{other}")) for other in range(1, dist.get_world_size()))
        store.set("config/verdict", _verdict(config, _sha256(own), list(configs)))
    if verdict := store.get("config/verdict").decode():
        raise ConfigError(verdict)


def _verdict(config: Mapping[str, Any], sha256: str, others: Sequence[Mapping[str, str]]) -> str:
    for rank, other in enumerate(others, start=1):
        if other["sha256"] != sha256:
            changed = "; ".join(differences(config, json.loads(other["config"]))) or "only the order of keys"
            return (
                f"rank {rank} on {other['host']} was started with another config than rank 0 ({changed}); start all ranks of a "
                f"run with the same file and the same options"
            )
    return ""


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def world_store() -> BeatStore:
    """Return the hang watchdog's store: the launcher's private folder, or a connection of its own to the store."""
    if WORLD_FOLDER in os.environ:
        return HeartbeatFolder(Path(os.environ[WORLD_FOLDER]) / "heartbeats")
    return dist.distributed_c10d._get_default_store().clone()


def _mesh(device: torch.device, host: dist.ProcessGroup, limit: datetime.timedelta) -> ParallelDims:
    return ParallelDims(
        host=host,
        dp=Axis.of(parallel_state.get_data_parallel_group()),
        tp=Axis.of(parallel_state.get_tensor_model_parallel_group()),
        pp=Axis.of(parallel_state.get_pipeline_model_parallel_group()),
        cp=Axis.of(parallel_state.get_context_parallel_group()),
        ep=Axis.of(parallel_state.get_expert_model_parallel_group()),
        dp_cp=Axis.of(parallel_state.get_data_parallel_group(with_context_parallel=True)),
        expert_dp=Axis.of(parallel_state.get_expert_data_parallel_group()),
        vpp=parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        device=device,
        limit=limit,
    )


def shutdown() -> None:
    """Destroy the mesh's process groups and leave the world."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
