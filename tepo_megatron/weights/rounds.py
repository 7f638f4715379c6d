"""How the weights are cut for their delivery, whatever carries them, and how the ranks agree on its course.

Each owner of a pipeline stage, or of experts in it, cuts its tensors into buckets; a round is the next bucket of every owner.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from tepo_megatron.errors import TepoError
from tepo_megatron.parallel import Groups
from tepo_megatron.weights.gather import Binding, iterate_hf, sent_by
from tepo_megatron.weights.ops import Architecture, Replicated


class Verifier(Protocol):
    """The side of an engine that tells what it serves. See `rollout.engine.RolloutEngine`."""

    def verify(self, sent: Mapping[str, int]) -> None:
        """Whether it is what was sent: tensors with these CRC-32. Raises SyncError."""


class Rounds:
    """The same ones in every delivery. Collectives: two all-gathers over the host group.

    senders: the ranks with buckets to send; mine: how many this rank sends; count: of the rounds; largest: the bytes of this
    rank's largest bucket at most, 0 on ranks that send none; sent: the parameters that leave through this rank's tensor-
    parallel group.
    """

    def __init__(self, bucket_mib: int, bindings: Sequence[Binding], arch: Architecture, groups: Groups) -> None:
        self._arch, self._groups = arch, groups
        sent = sent_by(bindings, groups)
        sends = bool(sent) and groups.tp.rank == 0
        self.senders = [rank for rank, it_does in enumerate(self.from_all(sends)) if it_does]
        self._buckets = cut(sent, arch, groups.tp.size, limit=bucket_mib * 2**20 // len(self.senders))
        self.mine = len(self._buckets) if sends else 0
        self.sent = [b for bucket in self._buckets for b in bucket]
        self.count = max(self.from_all(self.mine))
        self.largest = max((sum(whole_bytes(b, groups.tp.size) for b in bucket) for bucket in self._buckets), default=0) * sends

    def mine_of(self, only: Sequence[Binding] | None) -> frozenset[int]:
        """The rounds in which this rank sends anything of these; None: of all."""
        if only is None or not self.mine:
            return frozenset(range(self.mine))
        names = {b.name for b in only}
        return frozenset(i for i, bucket in enumerate(self._buckets) if any(b.name in names for b in bucket))

    def tensors(self, i: int, only: Sequence[Binding] | None = None) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) of this rank's bucket of round `i`, the widest dtypes first; nothing on ranks that
        do not send. only: of no others, where it is given. See `iterate_hf`.
        """
        bucket = self._buckets[i] if i < len(self._buckets) else []
        if only is not None:
            names = {b.name for b in only}
            bucket = [b for b in bucket if b.name in names]
        widest_first = sorted(bucket, key=lambda b: -b.parameter.element_size())
        return iterate_hf(widest_first, self._arch, self._groups.tp)

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """What goes wrong within on any rank ends all: there as it is, elsewhere with the rank's number before it."""
        mine: TepoError | None = None
        try:
            yield
        except TepoError as e:
            mine = e
        errors: list[TepoError | None] = self.from_all(mine)
        if mine is not None:
            raise mine
        for rank, error in enumerate(errors):
            if error is not None:
                raise type(error)(f"rank {rank}: {error}")

    def verify(self, receiver: Verifier | None, mine: Mapping[str, int]) -> None:
        """Compare what is served with what was sent. mine: the CRC-32 of what this rank sent. Raises SyncError on all ranks.

        Collectives: two all-gathers over the host group.
        """
        told = self.from_all(mine)
        with self.agreed():
            if receiver is not None:
                receiver.verify({name: crc32 for them in told for name, crc32 in them.items()})

    def from_all(self, value: Any) -> list[Any]:
        """Every rank's value, by rank. Collectives: one all-gather over the host group."""
        values = [value] * self._groups.world_size
        dist.all_gather_object(values, value, group=self._groups.host)
        return values


def cut(bindings: Sequence[Binding], arch: Architecture, tp: int, limit: int) -> list[list[Binding]]:
    """Parameters in turn, in buckets whose Hugging Face tensors have at most `limit` bytes, or of one parameter.

    It is the same on all ranks of a tensor-parallel group, which gather a bucket together.
    """
    buckets: list[list[Binding]] = []
    room = 0
    for b in bindings:
        if b.name == "output_layer.weight" and arch.tied_embeddings:  # is not sent
            continue
        size = whole_bytes(b, tp)
        if not buckets or size > room:
            buckets.append([])
            room = limit
        buckets[-1].append(b)
        room -= size
    return buckets


def whole_bytes(binding: Binding, tp: int) -> int:
    """Of all its shards, the padding of the vocabulary included."""
    return int(binding.parameter.nbytes) * (1 if isinstance(binding.row.op, Replicated) else tp)
