"""Delivery of the actor's weights to the inference engine after every step, in rounds (see `rounds.py`), which it reads itself.

In a round every owner puts its next bucket, in HF layout, where the engine can read it: into a file in shared memory (that of
each machine where servers take turns with ranks on several: `relay.py`) or in `sync.folder`, or into its own memory, which
servers of this machine map (`stores.py`). When all have, rank 0 tells the engine where, and while the engine loads them the
next round is put. A round's place is free before the round after the next begins: two rounds are held at most, of
`sync.bucket_mib` each (or, where that is larger, of one parameter from each owner). With `sync.delta` what did not change since
the last push is left out (see `delta.py`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol, Self

from tepo_megatron.channel import Source
from tepo_megatron.config import SyncConfig
from tepo_megatron.errors import ConfigError, SyncError
from tepo_megatron.parallel import Groups
from tepo_megatron.weights.delta import Delta
from tepo_megatron.weights.gather import Binding
from tepo_megatron.weights.ops import Architecture
from tepo_megatron.weights.relay import Relay
from tepo_megatron.weights.rounds import Rounds, is_check_due
from tepo_megatron.weights.stores import Files, Rows, Store


class Receiver(Protocol):
    """The side of an engine that takes weights. See `rollout.engine.RolloutEngine`."""

    def begin_update(self, version: int) -> None:
        """All weights of `version` are to follow. Raises SyncError."""

    @property
    def base(self) -> int | None:
        """The version that all who take the update had before it; None: there is no such version."""

    def keep(self, names: Sequence[str]) -> None:
        """These tensors do not follow: they stay as they were in the version before. Raises SyncError."""

    def load(self, sources: Sequence[Source]) -> Future[None]:
        """Some of its tensors; the sources are in use until the future has a result, or SyncError."""

    def finish_update(self) -> None:
        """That was all: serve them. Raises SyncError."""

    def verify(self, sent: Mapping[str, int]) -> None:
        """Whether what is served is what was sent: tensors with these CRC-32. Raises SyncError."""


class WeightSync:
    """Pushes the weights of `bindings` to `receiver` (given on rank 0 only), which reads them where they lie (`stores.py`).

    Collectives: here, two all-gathers over the host group, and those of the store; in a push, one gather over tp for each
    split parameter that is sent, one all-gather over the host group for each round and one at the end, with `sync.delta` five
    more; with ranks on several machines those of `Relay` in each round.
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
        self._sent: dict[str, int] = {}  # CRC-32 of what this rank sent when it was checked last
        self._delivered: int | None = None  # the version
        self._plan = Rounds(cfg, bindings, arch, groups)
        self.rounds = self._plan.count
        self.store: Store = _STORES[cfg.transport](cfg, self._plan, groups)
        self._delta = Delta(self._plan) if cfg.delta else None

    def push(self, version: int) -> None:
        """All ranks call it; when it returns, the engine serves `version`, and no bucket of this rank is left.

        Raises, on every rank, SyncError when the engine refuses the weights, CheckpointError when a rank cannot write,
        ConversionError when it cannot quantize. The engine can only be closed then.
        """
        loading: Future[None] | None = None
        before: list[Source] = []
        number = 0  # of the next round in which there is anything to send
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
        """Have this rank's bucket of round `i` where the engine can read it. Raises CheckpointError, ConversionError."""
        put = self.store.put(version, number, self._plan.tensors(i, only), self._is_due(version))
        if put is None:
            return None
        source, checksums = put
        self._sent |= checksums
        return source

    def _is_due(self, version: int) -> bool:
        """Whether this delivery is checked."""
        return is_check_due(version, self._delivered, self.cfg.verify_every)

    def _begin(self, version: int) -> list[Binding] | None:
        """Begin an update of what changed: of this rank's parameters, those that it sends; None: all."""
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
        """What is left of it in memory is given back. A second call does nothing."""
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class NoSync:
    """In the place of a sync when nobody serves the weights."""

    def push(self, version: int) -> None:
        """Nothing to do."""


def _files(cfg: SyncConfig, plan: Rounds, groups: Groups) -> Store:
    here, everywhere = _ranks()
    return Files(cfg, plan, groups) if cfg.folder is not None or here == everywhere else Relay(cfg, plan, groups)


_STORES: Mapping[str, Callable[[SyncConfig, Rounds, Groups], Store]] = {"shm": _files, "ipc": Rows}


def _ranks() -> tuple[int, int]:
    """That torchrun started: on this machine, and on all."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("WORLD_SIZE", "1"))


def check_one_host(cfg: SyncConfig, servers_beside_ranks: bool) -> None:
    """Raise ConfigError when torchrun started ranks on several machines, and what they send would not reach the servers.

    servers_beside_ranks: there are servers on the machines of the ranks, and nowhere else.
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
    """Return the mean |log-prob difference|, in nats, up to which `tokens` tokens of one server pass.

    It is `cfg.max_logprob_diff` with room for chance, which fades with the number of tokens n: 4 / sqrt(n) for the spread of
    a mean, and 20 / n because in bf16 a single token may differ by a nat. 1.15 times the limit at 1,000 tokens.
    """
    return cfg.max_logprob_diff * (1 + 4 / math.sqrt(tokens) + 20 / tokens)


def check_mismatch(
    mean_logprob_diff: float, version: int, cfg: SyncConfig, server: str = "", tokens: int | None = None
) -> None:
    """Raise SyncError when the engine's log-probs say that it serves other weights than the version it echoes.

    Args:
        mean_logprob_diff: mean |rollout - actor| in nats, under the weights of `version`.
        version: of the weights.
        cfg: the limit.
        server: whose tokens they are; "": not known.
        tokens: how many, of one server alone (see `allowed_difference`); None: all of a step, without that room.
    """
    limit = cfg.max_logprob_diff if tokens is None else allowed_difference(tokens, cfg)
    if not mean_logprob_diff <= limit:  # nan too
        where = "" if tokens is None else f" over {tokens} tokens{f' of {server}' if server else ''}"
        raise SyncError(
            f"mean |rollout - actor| log-prob difference is {mean_logprob_diff:.2e} nats at version {version}{where}, above "
            f"sync.max_logprob_diff={cfg.max_logprob_diff}: {server or 'the engine'} does not serve the weights that were sent "
            f"(or, in low precision, the gate is too tight: raise sync.max_logprob_diff)"
        )
