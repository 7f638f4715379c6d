"""Megatron's zigzag layout of packed tensors, for tests that compare with whole ones."""

from torch import Tensor

from tepo_megatron.ops.context_parallel import zigzag_rows


def shard_zigzag_packed(x_S: Tensor, cu_seqlens: Tensor, cp_size: int, cp_rank: int, dim: int) -> Tensor:
    """Return this rank's chunks of sequences packed along `dim`, packed again: [..., S, ...] -> [..., S / cp_size, ...].

    Raises:
        ValueError: With context parallelism, 2 cp_size does not divide the length of a sequence.
    """
    if cp_size == 1:
        return x_S
    return x_S.index_select(dim, zigzag_rows(cu_seqlens, cp_size, cp_rank).to(x_S.device))
