"""Split the weights into size-limited buckets (the bucket plan) and keep the ranks in step while they are sent.

Every sender, a rank that owns a pipeline stage or some of its experts, splits its tensors into buckets. A round sends the next
bucket of every sender. The plan is the same for all transports; an error on any rank ends the delivery on all ranks. With
`sync.delta` only parameters that changed since the last push are sent (`Delta`).
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tepo_megatron.base.errors import ConversionError, TepoError
from tepo_megatron.config import SyncConfig
from tepo_megatron.dist.objects import all_gather_object
from tepo_megatron.dist.parallel import ParallelDims
from tepo_megatron.models import fp8
from tepo_megatron.models.gather import Binding, iterate_hf, sent_by
from tepo_megatron.models.ops import Architecture, Replicated
from tepo_megatron.wire.bucket_format import crc32

_LAYER = re.compile(r"decoder\.layers\.\d+\.")


@dataclass
class RankReplies:
    """The ranks' replies within `BucketPlan.raise_on_all_ranks`. `mine`: this rank's reply, set before the block ends."""

    mine: Any = None
    all: list[Any] = field(default_factory=list)


class BucketPlan:
    """The bucket plan of a model, the same in every delivery.

    Attributes:
        count: Number of rounds, the largest `mine` of any rank.
    """

    def __init__(self, cfg: SyncConfig, bindings: Sequence[Binding], arch: Architecture, groups: ParallelDims) -> None:
        self._arch, self._groups, self._in_fp8 = arch, groups, cfg.quantize == "fp8"
        self.sent = sent_by(bindings, groups)  # the parameters that leave through this rank's tensor-parallel group
        self.senders: list[int] = []
        self._buckets: list[list[Binding]] = []
        self.mine = self.count = self.largest = 0

    @classmethod
    def agree(cls, cfg: SyncConfig, bindings: Sequence[Binding], arch: Architecture, groups: ParallelDims) -> "BucketPlan":
        """Return the plan of all ranks. Collectives: two all-gathers over the host group."""
        plan = cls(cfg, bindings, arch, groups)
        sends = bool(plan.sent) and groups.tp.rank == 0
        plan.senders = [rank for rank, sending in enumerate(plan.from_all(sends)) if sending]
        limit = cfg.bucket_mib * 2**20 // len(plan.senders)
        plan._buckets = split_into_buckets(plan.sent, arch, plan._bytes, limit)
        plan.mine = len(plan._buckets) if sends else 0
        plan.sent = [b for bucket in plan._buckets for b in bucket]
        plan.count = max(plan.from_all(plan.mine))
        plan.largest = max((sum(map(plan._bytes, bucket)) for bucket in plan._buckets), default=0) * sends
        return plan

    def omitted_names(self, only: Sequence[Binding] | None) -> list[str]:
        """Return the Hugging Face names that this rank leaves out when it sends `only` these; [] for None, which sends all."""
        if only is None or not self.mine or self._groups.tp.rank:
            return []
        chosen = {b.name for b in only}
        kept = [b for b in self.sent if b.name not in chosen]
        if self._in_fp8:
            return [name for b in kept for name, _ in self._shapes(b)]
        return [name for b in kept for name in b.hf_names]

    def tensors(self, i: int, only: Sequence[Binding] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor) of this rank's bucket of round `i`, the widest dtypes first.

        Ranks that do not send yield nothing, but must iterate: the shards are gathered over tp (`iterate_hf`). With
        `sync.quantize` a linear layer is two tensors. It is quantized whole, because a block may span two tensor-parallel
        ranks. `only`: parameters to send; None: all of the bucket. Raises ConversionError if a tensor cannot be quantized. It
        is raised after all tensors have been gathered.
        """
        bucket = self._buckets[i] if i < len(self._buckets) else []
        if only is not None:
            names = {b.name for b in only}
            bucket = [b for b in bucket if b.name in names]
        widest_first = sorted(bucket, key=lambda b: -b.parameter.element_size())
        whole = iterate_hf(widest_first, self._arch, self._groups.tp)
        return _quantized(whole, bucket) if self._in_fp8 else whole

    def _bytes(self, binding: Binding) -> int:
        if self._in_fp8:
            return sum(t.nbytes + t.element_size() - 1 for _, t in self._shapes(binding))
        return whole_bytes(binding, self._groups.tp.size)

    def _whole(self, binding: Binding) -> list[tuple[str, Tensor]]:
        shards = [torch.empty_like(binding.parameter, device="meta")] * self._groups.tp.size
        return list(zip(binding.hf_names, binding.row.op.unshard(shards, self._arch), strict=True))

    def _shapes(self, binding: Binding) -> list[tuple[str, Tensor]]:
        """Return the tensors that are sent of a parameter in FP8, on the meta device."""
        return [part for name, tensor in self._whole(binding) for part in fp8.parts(binding.row.op, name, tensor)]

    @contextlib.contextmanager
    def raise_on_all_ranks(self) -> Iterator[RankReplies]:
        """Raise a TepoError of this block on all ranks: unchanged where it occurred, elsewhere prefixed with the rank's number.

        Collectives: one all-gather over the host group.
        """
        own_reply = RankReplies()
        mine: TepoError | None = None
        try:
            yield own_reply
        except TepoError as e:
            mine = e
        replies = self.from_all((own_reply.mine, mine))
        if mine is not None:
            raise mine
        for rank, (_, error) in enumerate(replies):
            if error is not None:
                raise type(error)(f"rank {rank}: {error}")
        own_reply.all = [value for value, _ in replies]

    def from_all(self, value: Any) -> list[Any]:
        """Return every rank's value, indexed by rank. Collectives: one all-gather over the host group."""
        return all_gather_object(value, self._groups.host)


class Delta:
    """Finds what changed, from the CRC-32, at the last push, of this rank's part of each parameter in `BucketPlan.sent`.

    A decoder layer is sent whole or not at all, and so is each parameter outside the layers. Anything smaller fails: vLLM loads
    a module once all of its tensors are there, and a module that gets only some of them (`q_proj` without `k_proj`) has garbage
    in the rest.
    """

    def __init__(self, plan: BucketPlan) -> None:
        self._plan = plan
        self._known: dict[str, int] = {}
        self._version: int | None = None

    def changed(self, version: int, base: int | None) -> list[Binding] | None:
        """Return the parameters that a push must send; None: all of them, because `base` is not the version of the last push.

        Every rank reads its own part of the model. Collectives: one all-gather over the host group. `base`: the version that
        all servers in the update have; None: there is no such version.
        """
        now = {b.name: crc32(b.parameter) for b in self._plan.sent}
        mine = {_unit(name) for name, checksum in now.items() if self._known.get(name) != checksum}
        units: Set[str] = set().union(*self._plan.from_all(mine))
        known = base is not None and base == self._version
        self._known, self._version = now, version
        return [b for b in self._plan.sent if _unit(b.name) in units] if known else None


def is_check_due(version: int, before: int | None, every: int) -> bool:
    """Return whether the delivery of `version` is checked at both ends (`sync.verify_every`).

    If rollouts are sampled ahead, some versions are never delivered. A check that was due at such a version is made at the next
    delivery.
    """
    return every != 0 and (version % every == 0 or (before is not None and version // every > before // every))


def _quantized(whole: Iterator[tuple[str, Tensor]], bucket: Sequence[Binding]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors quantized; raise the first ConversionError only after the last tensor."""
    ops = {name: b.row.op for b in bucket for name in b.hf_names}
    refused: ConversionError | None = None
    for name, tensor in whole:  # iterate to the end even after an error: other ranks gather together with this one
        if refused is None:
            try:
                parts = fp8.parts(ops[name], name, tensor)
            except ConversionError as e:
                refused = ConversionError(f"{name}: {e}")
            else:
                yield from parts
    if refused is not None:
        raise refused


def split_into_buckets(
    bindings: Sequence[Binding], arch: Architecture, size_of: Callable[[Binding], int], limit: int
) -> list[list[Binding]]:
    """Split the parameters into buckets, in order, the same on all ranks of a tensor-parallel group."""
    buckets: list[list[Binding]] = []
    free_bytes = 0
    for b in bindings:
        if b.name == "output_layer.weight" and arch.tied_embeddings:  # tied: the tensor is sent as the embedding
            continue
        size = size_of(b)
        if not buckets or size > free_bytes:
            buckets.append([])
            free_bytes = limit
        buckets[-1].append(b)
        free_bytes -= size
    return buckets


def whole_bytes(binding: Binding, tp: int) -> int:
    """Return the bytes of all `tp` shards of a parameter, including the padding of the vocabulary."""
    return int(binding.parameter.nbytes) * (1 if isinstance(binding.row.op, Replicated) else tp)


def _unit(name: str) -> str:
    """Return the name of the unit that is sent whole or not at all: the layer of a parameter, or the parameter itself."""
    match = _LAYER.match(name)
    return match.group() if match else name
