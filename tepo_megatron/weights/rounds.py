"""How the weights are cut for their delivery, whatever carries them, and how the ranks agree on its course.

Each owner of a pipeline stage, or of experts in it, cuts its tensors into buckets; a round is the next bucket of every owner.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.config import SyncConfig
from tepo_megatron.errors import ConversionError, TepoError
from tepo_megatron.parallel import Groups
from tepo_megatron.weights import fp8
from tepo_megatron.weights.gather import Binding, iterate_hf, sent_by
from tepo_megatron.weights.ops import Architecture, Replicated


class Verifier(Protocol):
    """The side of an engine that tells what it serves. See `rollout.engine.RolloutEngine`."""

    def verify(self, sent: Mapping[str, int]) -> None:
        """Whether it is what was sent: tensors with these CRC-32. Raises SyncError."""


@dataclass
class Said:
    """What the ranks tell each other of what they did: `mine` before its end, `all`, by rank, after it."""

    mine: Any = None
    all: list[Any] = field(default_factory=list)


class Rounds:
    """The same ones in every delivery. Collectives: two all-gathers over the host group.

    senders: the ranks with buckets to send; mine: how many this rank sends; count: of the rounds; largest: the bytes of this
    rank's largest bucket at most, 0 on ranks that send none; sent: the parameters that leave through this rank's tensor-
    parallel group.
    """

    def __init__(self, cfg: SyncConfig, bindings: Sequence[Binding], arch: Architecture, groups: Groups) -> None:
        self._arch, self._groups, self._in_fp8 = arch, groups, cfg.quantize == "fp8"
        sent = sent_by(bindings, groups)
        sends = bool(sent) and groups.tp.rank == 0
        self.senders = [rank for rank, it_does in enumerate(self.from_all(sends)) if it_does]
        self._buckets = cut(sent, arch, self._bytes, limit=cfg.bucket_mib * 2**20 // len(self.senders))
        self.mine = len(self._buckets) if sends else 0
        self.sent = [b for bucket in self._buckets for b in bucket]
        self.count = max(self.from_all(self.mine))
        self.largest = max((sum(map(self._bytes, bucket)) for bucket in self._buckets), default=0) * sends

    def names_without(self, only: Sequence[Binding] | None) -> list[str]:
        """Hugging Face names of what this rank would send, were it not for `only` these; None: of nothing."""
        if only is None or not self.mine:
            return []
        there = {b.name for b in only}
        kept = [b for b in self.sent if b.name not in there]
        if self._in_fp8:
            return [name for b in kept for name, _ in self._shapes(b)]
        return [name for b in kept for name in b.hf_names]

    def tensors(self, i: int, only: Sequence[Binding] | None = None) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) of this rank's bucket of round `i`, the widest dtypes first; nothing on ranks that
        do not send. only: of no others, where it is given. See `iterate_hf`.

        With `sync.quantize` linear layers are two tensors each, quantized whole, since a block may lie on two tensor-parallel
        ranks. Raises ConversionError for one that cannot be, once all are gathered.
        """
        bucket = self._buckets[i] if i < len(self._buckets) else []
        if only is not None:
            names = {b.name for b in only}
            bucket = [b for b in bucket if b.name in names]
        widest_first = sorted(bucket, key=lambda b: -b.parameter.element_size())
        whole = iterate_hf(widest_first, self._arch, self._groups.tp)
        return _quantized(whole, bucket) if self._in_fp8 else whole

    def _bytes(self, binding: Binding) -> int:
        """Of a parameter on its way, at most."""
        if self._in_fp8:
            return sum(t.nbytes + t.element_size() - 1 for _, t in self._shapes(binding))
        return whole_bytes(binding, self._groups.tp.size)

    def _shapes(self, binding: Binding) -> list[tuple[str, Tensor]]:
        """What is sent of a parameter in FP8, on the meta device."""
        shards = [torch.empty_like(binding.parameter, device="meta")] * self._groups.tp.size
        whole = zip(binding.hf_names, binding.row.op.unshard(shards, self._arch), strict=True)
        return [part for name, tensor in whole for part in fp8.parts(binding.row.op, name, tensor)]

    @contextlib.contextmanager
    def agreed(self) -> Iterator[Said]:
        """What goes wrong within on any rank ends all: there as it is, elsewhere with the rank's number before it.

        Collectives: one all-gather over the host group.
        """
        said = Said()
        mine: TepoError | None = None
        try:
            yield said
        except TepoError as e:
            mine = e
        told = self.from_all((said.mine, mine))
        if mine is not None:
            raise mine
        for rank, (_, error) in enumerate(told):
            if error is not None:
                raise type(error)(f"rank {rank}: {error}")
        said.all = [value for value, _ in told]

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


def is_check_due(version: int, before: int | None, every: int) -> bool:
    """Return whether the delivery of `version` is checked at both ends (`sync.verify_every`).

    Where rollouts are sampled ahead, versions are passed over: one that was due is made up for at the next delivery.

    Args:
        version: of the weights.
        before: the version of the last delivery; None: there was none.
        every: steps between checks; 0: none is made.
    """
    if every == 0:
        return False
    return version % every == 0 or (before is not None and version // every > before // every)


def _quantized(whole: Iterator[tuple[str, Tensor]], bucket: Sequence[Binding]) -> Iterator[tuple[str, Tensor]]:
    ops = {name: b.row.op for b in bucket for name in b.hf_names}
    refused: ConversionError | None = None
    for name, tensor in whole:  # to the end: others gather with this rank
        if refused is None:
            try:
                parts = fp8.parts(ops[name], name, tensor)
            except ConversionError as e:
                refused = ConversionError(f"{name}: {e}")
            else:
                yield from parts
    if refused is not None:
        raise refused


def cut(bindings: Sequence[Binding], arch: Architecture, size_of: Callable[[Binding], int], limit: int) -> list[list[Binding]]:
    """Parameters in turn, in buckets whose Hugging Face tensors have at most `limit` bytes, or of one parameter.

    It is the same on all ranks of a tensor-parallel group, which gather a bucket together.
    """
    buckets: list[list[Binding]] = []
    room = 0
    for b in bindings:
        if b.name == "output_layer.weight" and arch.tied_embeddings:  # is not sent
            continue
        size = size_of(b)
        if not buckets or size > room:
            buckets.append([])
            room = limit
        buckets[-1].append(b)
        room -= size
    return buckets


def whole_bytes(binding: Binding, tp: int) -> int:
    """Of all its shards, the padding of the vocabulary included."""
    return int(binding.parameter.nbytes) * (1 if isinstance(binding.row.op, Replicated) else tp)
