"""From ragged sequences to packed microbatches: where the tokens lie. Who computes what is planned in `planning.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tepo_megatron.ops.context_parallel import shard_zigzag_packed
from tepo_megatron.types import NO_EXPERT, PackedMicrobatch


@dataclass(frozen=True)
class Alignment:
    """What the mesh asks of packed lengths.

    sequence: every sequence is padded to a multiple of it (2 cp: the zigzag halves); total: the tokens of a context-parallel
    rank are a multiple of it (tp under sequence parallelism, times 16 or 128 in FP8); fixed: tokens over all context-parallel
    ranks that a microbatch has at least, so that all have the same where none is planned with more; 0: as many as it needs.
    """

    cp: int = 1
    total: int = 1
    fixed: int = 0

    @property
    def sequence(self) -> int:
        """Padding of one sequence, in tokens over all context-parallel ranks."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def step(self) -> int:
        """What the tokens of a microbatch are a multiple of, over all context-parallel ranks."""
        return math.lcm(self.sequence, self.cp * self.total)

    def padded_one(self, length: int) -> int:
        """A sequence's tokens with its own padding."""
        return -(-length // self.sequence) * self.sequence

    def room(self, max_tokens: int) -> int:
        """Tokens of padded sequences that fit into a microbatch of `max_tokens`, whose total is padded too; at least 1."""
        return max(1, max_tokens // self.step * self.step)

    def padded(self, lengths: Sequence[int]) -> list[int]:
        """Padded lengths over all context-parallel ranks; the last sequence takes up what the total needs."""
        out = [self.padded_one(n) for n in lengths]
        out[-1] += -(-max(sum(out), self.fixed) // self.step) * self.step - sum(out)
        return out


def pack(
    token_ids: Sequence[Tensor],
    response_masks: Sequence[Tensor],
    first_token: Sequence[int],
    indices: Sequence[int],
    alignment: Alignment,
    cp_rank: int,
    experts: Sequence[Tensor] | None = None,
) -> PackedMicrobatch:
    """Pack the sequences `indices` one after another and take this context-parallel rank's part.

    token_ids, response_masks: of the whole batch, each [L]; first_token: place of each sequence's first response token in the
    flat _N tensors; experts: of the whole batch, each [L, K, T]. Labels are shifted per sequence before the context-parallel
    split, so no label is lost at a boundary. Without indices: one dummy token without response rows, so that an empty rank
    still joins every collective.
    """
    sizes = [token_ids[i].numel() for i in indices] or [1]
    lengths = alignment.padded(sizes)
    length_G, size_G, first_G = (torch.tensor(x) for x in (lengths, sizes, [first_token[i] for i in indices] or [0]))
    starts = torch.cat((length_G.new_zeros(1), length_G.cumsum(0)))
    total = int(starts[-1])
    sequence_S = torch.arange(len(lengths)).repeat_interleave(length_G)
    offset_S = torch.arange(total) - starts[sequence_S]
    tokens_S, is_response_S = torch.zeros(total, dtype=torch.int64), torch.zeros(total, dtype=torch.bool)
    is_token_S = offset_S < size_G[sequence_S]
    if indices:
        tokens_S[is_token_S] = torch.cat([token_ids[i] for i in indices])
        is_response_S[is_token_S] = torch.cat([response_masks[i] for i in indices])
    # the row before each response token of the same sequence
    is_row_S = (is_response_S & (offset_S > 0)).roll(-1)
    labels_S = tokens_S.roll(-1)
    seen_S = is_row_S.cumsum(0)
    position_S = seen_S - 1 - (seen_S - is_row_S.long())[starts[:-1]][sequence_S]
    rows_G = torch.bincount(sequence_S[is_row_S], minlength=len(lengths))
    experts_SKT = None if experts is None else _experts(experts, indices, is_token_S)
    chunk_S = offset_S // (length_G // alignment.sequence)[sequence_S]  # a multiple of its number of chunks

    def local(x: Tensor) -> Tensor:
        return shard_zigzag_packed(x, starts, alignment.cp, cp_rank, dim=0)

    rows_R = local(is_row_S).nonzero().squeeze(1)
    sequence_R, position_R = local(sequence_S)[rows_R], local(position_S)[rows_R]
    return PackedMicrobatch(
        tokens_S=local(tokens_S).unsqueeze(0),
        cu_seqlens=starts.to(torch.int32),
        max_seqlen=max(lengths),
        rows_R=rows_R,
        labels_R=local(labels_S)[rows_R],
        sequence_R=sequence_R,
        token_R=first_G[sequence_R] + position_R,
        position_R=position_R,
        chunk_R=local(chunk_S)[rows_R],
        lengths_G=rows_G[: len(indices)].clamp(min=1).float(),
        sequences_G=torch.tensor(list(indices), dtype=torch.int64),
        experts_SKT=None if experts_SKT is None else local(experts_SKT),
    )


def _experts(experts: Sequence[Tensor], indices: Sequence[int], is_token_S: Tensor) -> Tensor:
    """[S, K, T]. A token whose experts are not known, padding or the last of its sequence, is no other token's context: any
    different experts do.
    """
    _, layers, chosen = experts[0].shape
    experts_SKT = torch.full((is_token_S.numel(), layers, chosen), NO_EXPERT, dtype=torch.int16)
    if indices:
        experts_SKT[is_token_S] = torch.cat([experts[i] for i in indices])
    any_T = torch.arange(chosen, dtype=torch.int16)
    return torch.where(experts_SKT == NO_EXPERT, any_T, experts_SKT)
