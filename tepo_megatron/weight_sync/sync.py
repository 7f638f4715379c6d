"""Deliver the actor's weights to the inference engine after every step, through files or shared buffers that the engine reads.

The delivery goes in rounds (the bucket plan in `buckets.py`). In each round every sender stores its next bucket, in Hugging
Face layout, where the engine can read it (`stores.py`): in a file in shared memory (of each machine, if colocated servers and
ranks span several machines: `relay.py`), in a file in `sync.folder`, or in its own memory, which servers of this machine map.
When all have, rank 0 sends the engine their locations, and while the engine loads them the next round is stored. The space of a
round is free before the round after the next begins. So two rounds are held at most, each of `sync.bucket_mib` (or, if that is
larger, of one parameter from each sender). With `sync.delta` parameters that did not change since the last push are left out
(see `delta.py`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol, Self

from tepo_megatron.config import SyncConfig
from tepo_megatron.distributed.parallel import ParallelDims
from tepo_megatron.errors import ConfigError, SyncError
from tepo_megatron.weight_sync.broadcast_group import Source
from tepo_megatron.weight_sync.buckets import BucketPlan, is_check_due
from tepo_megatron.weight_sync.delta import Delta
from tepo_megatron.weight_sync.relay import Relay
from tepo_megatron.weight_sync.stores import Files, Rows, WeightStore
from tepo_megatron.weights.gather import Binding
from tepo_megatron.weights.ops import Architecture


class Receiver(Protocol):
    """The side of an engine that receives weights. See `rollout.engine.RolloutEngine`."""

    def begin_update(self, version: int) -> None:
        """Begin an update to `version`, of which all weights follow. Raises SyncError."""

    @property
    def base(self) -> int | None:
        """The version that all servers in the update had before it; None: they have no version in common."""

    def keep(self, names: Sequence[str]) -> None:
        """Keep these tensors as they are in the version before; the update does not send them. Raises SyncError."""

    def load(self, sources: Sequence[Source]) -> Future[None]:
        """Load some of the update's tensors. The sources are in use until the future is done; its error is a SyncError."""

    def finish_update(self) -> None:
        """Serve the new weights: all of them have been sent. Raises SyncError."""

    def verify(self, sent: Mapping[str, int]) -> None:
        """Compare the served tensors with the CRC-32 of the sent ones, by Hugging Face name. Raises SyncError."""


class WeightSync:
    """Pushes the weights to the engine, which reads them where the ranks store them (`stores.py`).

    Collectives: at construction, two all-gathers over the host group, and those of the store; in a push, one gather over tp for
    each split parameter that is sent, one all-gather over the host group for each round and one at the end, with `sync.delta`
    four more, and two more if the delivery is checked; with ranks on several machines those of `Relay` in each round.
    """

    def __init__(
        self,
        cfg: SyncConfig,
        bindings: Sequence[Binding],
        arch: Architecture,
        groups: ParallelDims,
        receiver: Receiver | None,
    ) -> None:
        """Plan the buckets and make the store.

        Args:
            cfg: `transport` selects the store.
            bindings: This rank's parameters.
            arch: The model's architecture.
            groups: The mesh of this run.
            receiver: The engine, on rank 0; None on other ranks.
        """
        self.cfg, self.groups, self.receiver = cfg, groups, receiver
        self._sent: dict[str, int] = {}  # CRC-32 of each tensor that this rank sent, as of its last check
        self._delivered: int | None = None  # version of the last delivery
        self._plan = BucketPlan(cfg, bindings, arch, groups)
        self.rounds = self._plan.count
        self.store: WeightStore = _STORES[cfg.transport](cfg, self._plan, groups)
        self._delta = Delta(self._plan) if cfg.delta else None

    def push(self, version: int) -> None:
        """Deliver the weights as `version`. All ranks call it.

        When it returns, the engine serves `version`, and no bucket of this rank is left. After an error the engine can only be
        closed.

        Raises:
            SyncError: The engine refuses the weights. This and the other errors are raised on every rank.
            CheckpointError: A rank cannot store a bucket.
            ConversionError: A rank cannot quantize a tensor.
        """
        loading: Future[None] | None = None
        before: list[Source] = []
        number = 0  # of the next round, counting only those in which any rank has something to send
        try:
            only = self._begin(version) if self._delta is not None else None
            for i in range(self.rounds):
                with self._plan.agreed() as said:
                    said.mine = self._put(version, i, number, only)
                    if self.receiver is not None:
                        if loading is not None:
                            loading.result()
                            self.store.remove(before)
                        elif i == 0 and self._delta is None:
                            self.receiver.begin_update(version)
                loading, before = None, [source for source in said.all if source is not None]
                number += bool(before)
                if self.receiver is not None and before:
                    loading = self.receiver.load(before)
            with self._plan.agreed():
                if self.receiver is not None:
                    if loading is not None:
                        loading.result()
                        self.store.remove(before)
                    self.receiver.finish_update()
            if self._is_due(version):
                self._plan.verify(self.receiver, self._sent)
            self._delivered = version
        except BaseException:
            self.store.clear()
            raise
        self.store.rest()

    def _put(self, version: int, i: int, number: int, only: Sequence[Binding] | None) -> Source | None:
        """Store this rank's bucket of round `i` where the engine can read it. Raises CheckpointError, ConversionError."""
        put = self.store.put(version, number, self._plan.tensors(i, only), self._is_due(version))
        if put is None:
            return None
        source, checksums = put
        self._sent |= checksums
        return source

    def _is_due(self, version: int) -> bool:
        """Return whether this delivery is checked."""
        return is_check_due(version, self._delivered, self.cfg.verify_every)

    def _begin(self, version: int) -> list[Binding] | None:
        """Begin a delta update; return the parameters to send of those that leave through this rank, None for all of them."""
        assert self._delta is not None
        with self._plan.agreed() as said:
            if self.receiver is not None:
                self.receiver.begin_update(version)
                said.mine = self.receiver.base
        only = self._delta.changed(version, said.all[0])
        told = self._plan.from_all(self._plan.names_without(only))
        with self._plan.agreed():
            if self.receiver is not None:
                self.receiver.keep([name for names in told for name in names])
        return only

    def close(self) -> None:
        """Release the store's memory. A second call does nothing."""
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class NoSync:
    """Stands in for a sync when no engine serves the weights."""

    def push(self, version: int) -> None:
        """Do nothing."""


def _files(cfg: SyncConfig, plan: BucketPlan, groups: ParallelDims) -> WeightStore:
    """Return the store for `transport: shm`: `Relay` if ranks are on several machines that share no `folder`, else `Files`."""
    here, everywhere = _ranks()
    return Files(cfg, plan, groups) if cfg.folder is not None or here == everywhere else Relay(cfg, plan, groups)


_STORES: Mapping[str, Callable[[SyncConfig, BucketPlan, ParallelDims], WeightStore]] = {"shm": _files, "ipc": Rows}


def _ranks() -> tuple[int, int]:
    """Return the number of ranks that torchrun started on this machine and on all machines; (1, 1) without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("WORLD_SIZE", "1"))


def check_one_host(cfg: SyncConfig, servers_beside_ranks: bool) -> None:
    """Raise ConfigError if torchrun started ranks on several machines and the transport would not reach the servers.

    Args:
        cfg: The transport and its folder.
        servers_beside_ranks: Whether servers run on the machines of the ranks, and nowhere else.
    """
    if cfg.transport == "group" or (cfg.transport == "shm" and (cfg.folder is not None or servers_beside_ranks)):
        return
    here, everywhere = _ranks()
    if here != everywhere:
        what, mend = f"sync.transport={cfg.transport}", "use sync.transport=group"
        if cfg.transport == "shm":
            what, mend = f"{what} without sync.folder", f"set sync.folder to a folder that all machines share, or {mend}"
        raise ConfigError(f"{what} needs all ranks on one machine, but only {here} of {everywhere} are here; {mend}")


def allowed_difference(tokens: int, cfg: SyncConfig) -> float:
    """Return the mean |log-prob difference|, in nats, that a server's sample of tokens may have.

    It is `cfg.max_logprob_diff` with a margin for chance that shrinks with the number of tokens n: 4 / sqrt(n) for the spread
    of a mean, and 20 / n because in bf16 a single token may differ by a nat. At 1,000 tokens it is 1.15 times the limit.

    Args:
        tokens: Number of tokens, all of one server.
        cfg: Has the limit.
    """
    return cfg.max_logprob_diff * (1 + 4 / math.sqrt(tokens) + 20 / tokens)


def check_mismatch(
    mean_logprob_diff: float, version: int, cfg: SyncConfig, server: str = "", tokens: int | None = None
) -> None:
    """Raise SyncError if the engine's log-probs show that it serves other weights than the version it echoes.

    Args:
        mean_logprob_diff: Mean |rollout - actor| in nats, under the weights of `version`.
        version: The version of the weights.
        cfg: Has the limit.
        server: The server that sampled the tokens; "": unknown.
        tokens: Number of tokens, all of one server (see `allowed_difference`); None: all tokens of a step, without that margin.
    """
    limit = cfg.max_logprob_diff if tokens is None else allowed_difference(tokens, cfg)
    if not mean_logprob_diff <= limit:  # nan too
        where = "" if tokens is None else f" over {tokens} tokens{f' of {server}' if server else ''}"
        raise SyncError(
            f"mean |rollout - actor| log-prob difference is {mean_logprob_diff:.2e} nats at version {version}{where}, above "
            f"sync.max_logprob_diff={cfg.max_logprob_diff}: {server or 'the engine'} does not serve the weights that were sent "
            f"(or, in low precision, the gate is too tight: raise sync.max_logprob_diff)"
        )
