"""Deliver the actor's weights to the inference engine after every step. One push works with every transport.

The path of a weight from a Megatron shard to the engine:
    models/gather.py               gathers the shards of a parameter over tp
    models/ops.py                  puts them together as Hugging Face tensors
    sync/buckets.py                cuts the tensors into buckets, one per sender and round; leaves out what did not change
    sync/push.py                   stages, starts and completes the rounds (this module)
    sync/stores.py                 carries a round (`shm`, `ipc`); or relay.py (`shm`, several machines), broadcast.py (`group`)
    wire/receiver/receiver.py      takes the round, in the server's processes
    wire/receiver/receiver.py  checks that the tensors are the model's, and reads files
    wire/receiver/vllm_plugin.py   loads them into the engine's model; or sglang_loader.py
The request that names the sources of a round goes through engines/servers/fleet.py, endpoint.py and the engine's client.

All transports implement `WeightTransport` (`wire/transport.py`). While the engine loads a round, the next one is staged. So two
rounds are held at most, each of `sync.bucket_mib` (or, if that is larger, of one parameter from each sender). With `sync.delta`
parameters that did not change since the last push are left out.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from tepo_megatron.base.errors import ConfigError, TepoError
from tepo_megatron.config import SyncConfig
from tepo_megatron.dist.parallel import ParallelDims
from tepo_megatron.models.gather import Binding
from tepo_megatron.models.ops import Architecture
from tepo_megatron.monitor.tracer import tracer
from tepo_megatron.sync.broadcast import GroupTransport
from tepo_megatron.sync.buckets import BucketPlan, Delta, is_check_due
from tepo_megatron.sync.relay import RelayTransport
from tepo_megatron.sync.stores import FileTransport, IpcTransport
from tepo_megatron.wire.transport import StagedBucket, WeightReceiver, WeightTransport


@dataclass(frozen=True)
class PushedBytes:
    """The bytes of one push, from all ranks together; each byte counts once, whatever the number of servers."""

    sent: int = 0
    full: int = 0


class WeightSync:
    """Pushes the weights to the engine. Make one with `make_weight_sync`.

    Collectives: in a push, one gather over tp for each split parameter that is sent; over the host group one all-gather for
    each round and two at the end, with `sync.delta` four more, and two more if the delivery is checked; those of
    the transport.
    """

    def __init__(self, cfg: SyncConfig, plan: BucketPlan, transport: WeightTransport, receiver: WeightReceiver | None) -> None:
        self.transport, self.rounds = transport, plan.count
        self._plan, self._receiver, self._verify_every = plan, receiver, cfg.verify_every
        self._delta = Delta(plan) if cfg.delta != "none" else None
        self.pushed = PushedBytes()
        self._sent: dict[str, int] = {}  # CRC-32 of each tensor that this rank sent, as of its last check
        self._delivered: int | None = None  # version of the last delivery

    def push(self, version: int) -> None:
        """Deliver the weights as `version`. All ranks call it.

        When it returns, the engine serves `version`, and no bucket of this rank is left. After an error the engine can only be
        closed.
        """
        checked = is_check_due(version, self._delivered, self._verify_every)
        try:
            whole = self._send(version, checked)
            with self._plan.raise_on_all_ranks() as replies:
                replies.mine = self.pushed.sent
                if self._receiver is not None:
                    self._receiver.finish_update()
            sent = sum(replies.all)
            self.pushed = replace(self.pushed, sent=sent, full=sent if whole else self.pushed.full)
            if checked:
                self._verify()
            self._delivered = version
        except BaseException:
            self.transport.abort()
            raise
        self.transport.finish()

    def _send(self, version: int, checked: bool) -> bool:
        """Send all rounds: stage each while the one before is loaded. Return whether all weights were sent whole."""
        only = self._begin(version) if self._delta is not None else None
        self.pushed = replace(self.pushed, sent=0)
        number = 0  # of the next round, counting only those in which any rank has something to send
        for i in range(self.rounds):
            with self._plan.raise_on_all_ranks() as replies:
                replies.mine = self._stage(version, i, number, only, checked), self.transport.wait()
                if i == 0 and self._delta is None and self._receiver is not None:
                    self._receiver.begin_update(version)
            self.transport.complete([report for _, report in replies.all])
            if sources := [staged.source for staged, _ in replies.all if staged is not None]:
                self.transport.start(sources)
                number += 1
        with self._plan.raise_on_all_ranks() as replies:
            replies.mine = self.transport.wait()
        self.transport.complete(replies.all)
        return only is None

    def _stage(self, version: int, i: int, number: int, only: Sequence[Binding] | None, checked: bool) -> StagedBucket | None:
        try:
            with tracer.span("stage weights", round=number):
                staged = self.transport.stage(version, number, self._plan.tensors(i, only), checked)
        except TepoError:
            self.transport.wait()  # the push is aborted, and the round before is not to be in flight then
            raise

        if staged is not None:
            self._sent |= staged.checksums
            self.pushed = replace(self.pushed, sent=self.pushed.sent + staged.nbytes)
        return staged

    def _begin(self, version: int) -> list[Binding] | None:
        """Begin a delta update; return the parameters to send of those that leave through this rank, None for all of them."""
        assert self._delta is not None
        with self._plan.raise_on_all_ranks() as replies:
            if self._receiver is not None:
                self._receiver.begin_update(version)
                replies.mine = self._receiver.base
        only = self._delta.changed(version, replies.all[0])
        gathered = self._plan.from_all(self._plan.omitted_names(only))
        with self._plan.raise_on_all_ranks():
            if self._receiver is not None:
                self._receiver.keep_unchanged([name for names in gathered for name in names])
        return only

    def _verify(self) -> None:
        gathered = self._plan.from_all(self._sent)
        with self._plan.raise_on_all_ranks():
            if self._receiver is not None:
                self._receiver.verify({name: crc32 for sent in gathered for name, crc32 in sent.items()})

    def metrics(self) -> dict[str, float]:
        """Return what the last push sent, for the record of a step; nothing without `sync.delta`."""
        if self._delta is None:
            return {}
        return {"sync/bytes_sent": self.pushed.sent, "sync/bytes_full": self.pushed.full}

    def close(self) -> None:
        self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class NoSync:
    """Replacement for `WeightSync` when no engine serves the weights."""

    def push(self, version: int) -> None:
        """Do nothing."""

    def metrics(self) -> dict[str, float]:
        """Return no metrics."""
        return {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None: ...


# opens a transport; the parameters are those of `FileTransport.open`
MakeTransport = Callable[[SyncConfig, BucketPlan, ParallelDims, WeightReceiver | None], WeightTransport]


def _shm_transport(cfg: SyncConfig, plan: BucketPlan, groups: ParallelDims, receiver: WeightReceiver | None) -> WeightTransport:
    """Return `RelayTransport` if ranks are on several machines that share no `folder`, else `FileTransport`."""
    here, everywhere = _ranks()
    kind = FileTransport if cfg.shared_folder is not None or here == everywhere else RelayTransport
    return kind.open(cfg, plan, groups, receiver)


@dataclass(frozen=True)
class TransportEntry:
    """One transport and its limits."""

    make: MakeTransport
    # (config, whether the servers are next to the ranks) -> whether it carries weights of ranks on several machines
    spans_machines: Callable[[SyncConfig, bool], bool]
    fix: str = ""  # what to set if it does not


TRANSPORTS: Mapping[str, TransportEntry] = {
    "shm": TransportEntry(
        _shm_transport,
        spans_machines=lambda cfg, local: cfg.shared_folder is not None or local,
        fix="set sync.transport.folder to a folder that all machines share, or ",
    ),
    "ipc": TransportEntry(IpcTransport, spans_machines=lambda cfg, local: False),
    "group": TransportEntry(GroupTransport, spans_machines=lambda cfg, local: True),
}


def make_weight_sync(
    cfg: SyncConfig,
    bindings: Sequence[Binding],
    arch: Architecture,
    groups: ParallelDims,
    receiver: WeightReceiver | None,
) -> WeightSync:
    """Plan the buckets and make the transport that `cfg.transport` names.

    Collectives: two all-gathers over the host group, and those of the transport's construction.
    """
    plan = BucketPlan.agree(cfg, bindings, arch, groups)
    return WeightSync(cfg, plan, TRANSPORTS[cfg.transport.type].make(cfg, plan, groups, receiver), receiver)


def _ranks() -> tuple[int, int]:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("WORLD_SIZE", "1"))


def check_one_host(cfg: SyncConfig, servers_with_ranks: bool) -> None:
    """Raise ConfigError if ranks are on several machines and the transport would not reach the servers."""
    (here, everywhere), row = _ranks(), TRANSPORTS[cfg.transport.type]
    if here == everywhere or row.spans_machines(cfg, servers_with_ranks):
        return
    raise ConfigError(
        f"sync.transport={cfg.transport.type} needs all ranks on one machine, but only {here} of {everywhere} are here; "
        f"{row.fix}use sync.transport=group"
    )
