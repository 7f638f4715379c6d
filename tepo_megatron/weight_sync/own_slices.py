"""Slices that each trainer rank sends from its own shards, where the ranks of trainer and servers hold the same parts.

That is so if both have as many tensor-parallel ranks. Then tensor-parallel rank j sends slice j (`slices.py`), and nothing is
gathered over tp. The exceptions are parameters of which a server's ranks hold other parts: keys and values of fewer heads than
ranks, and vocabularies that the trainer or the engines pad. They are gathered on all ranks, and each sends what its lane needs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.distributed.parallel import Axis
from tepo_megatron.weight_sync.slices import TensorSlice, sliced
from tepo_megatron.weights.gather import Binding
from tepo_megatron.weights.ops import Architecture, Replicated, Vocabulary, padded_vocab_size

SliceDims = Callable[[Binding], Mapping[str, int | None]]


def iterate_own(bindings: Iterable[Binding], arch: Architecture, tp: Axis, dims_of: SliceDims) -> Iterator[tuple[str, Tensor]]:
    """Yield (name on the wire, part) of these parameters for the lane of this rank.

    All ranks of a tensor-parallel group must iterate to the end. Collectives: one all-gather over tp for each parameter that
    `is_own_slice` does not accept; none otherwise.
    """
    for b in bindings:
        dims = dims_of(b)
        if is_own_slice(b, arch, tp.size, dims):
            parts = b.row.op.unshard([b.parameter.detach()], _arch_of_rank(arch, tp.size))
            for name, part in zip(b.hf_names, parts, strict=True):
                yield TensorSlice(name, tp.rank, tp.size, dims[name]).key, part
            continue
        shard = b.parameter.detach().contiguous()
        shards = [torch.empty_like(shard) for _ in range(tp.size)]
        dist.all_gather(shards, shard, group=tp.group)
        for name, whole in zip(b.hf_names, b.row.op.unshard(shards, arch), strict=True):
            yield list(sliced(name, whole, tp.size, dims[name]))[tp.rank]


def is_own_slice(binding: Binding, arch: Architecture, tp: int, dims: Mapping[str, int | None]) -> bool:
    """Return whether a rank's shard of a parameter is what the rank of a server with the same number holds.

    Args:
        dims: Dimension along which each of its tensors is cut, by name; None: each rank of a server holds all of it.
    """
    if isinstance(binding.row.op, Replicated):
        return True
    if isinstance(binding.row.op, Vocabulary) and padded_vocab_size(arch.vocab_size, tp) != arch.vocab_size:
        return False
    return all(dim is not None for dim in dims.values())


def _arch_of_rank(arch: Architecture, tp: int) -> Architecture:
    """Return the sizes of one rank's shards, with which an operation converts a shard alone."""
    heads, groups = max(1, arch.num_heads // tp), max(1, arch.num_query_groups // tp)
    return replace(arch, num_heads=heads, num_query_groups=groups, vocab_size=max(1, arch.vocab_size // tp))
