"""From ragged sequences to packed microbatches: where the tokens lie. Who computes what is planned in `planning.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tepo_megatron.ops.context_parallel import shard_zigzag_packed
from tepo_megatron.types import PackedMicrobatch


@dataclass(frozen=True)
class Alignment:
    """What the mesh asks of packed lengths.

    sequence: every sequence is padded to a multiple of it (2 cp: the zigzag halves); total: the tokens of a context-parallel
    rank are a multiple of it (tp under sequence parallelism).
    """

    cp: int = 1
    total: int = 1

    @property
    def sequence(self) -> int:
        """Padding of one sequence, in tokens over all context-parallel ranks."""
        return 2 * self.cp if self.cp > 1 else 1

    def padded_one(self, length: int) -> int:
        """A sequence's tokens with its own padding."""
        return -(-length // self.sequence) * self.sequence

    def room(self, max_tokens: int) -> int:
        """Tokens of padded sequences that fit into a microbatch of `max_tokens`, whose total is padded too; at least 1."""
        step = math.lcm(self.sequence, self.cp * self.total)
        return max(1, max_tokens // step * step)

    def padded(self, lengths: Sequence[int]) -> list[int]:
        """Padded lengths over all context-parallel ranks; the last sequence takes up what the total needs."""
        out = [self.padded_one(n) for n in lengths]
        while (sum(out) // self.cp) % self.total:
            out[-1] += self.sequence
        return out


def pack(
    token_ids: Sequence[Tensor],
    response_masks: Sequence[Tensor],
    first_token: Sequence[int],
    indices: Sequence[int],
    alignment: Alignment,
    cp_rank: int,
) -> PackedMicrobatch:
    """Pack the sequences `indices` one after another and take this context-parallel rank's part.

    token_ids, response_masks: of the whole batch, each [L]; first_token: place of each sequence's first response token in the
    flat _N tensors. Labels are shifted per sequence before the context-parallel split, so no label is lost at a boundary.
    Without indices: one dummy token without response rows, so that an empty rank still joins every collective.
    """
    lengths = alignment.padded([token_ids[i].numel() for i in indices] or [1])
    starts = torch.tensor([0, *lengths]).cumsum(0)
    total = int(starts[-1])
    tokens_S, labels_S = torch.zeros(total, dtype=torch.int64), torch.zeros(total, dtype=torch.int64)
    is_row_S = torch.zeros(total, dtype=torch.bool)
    sequence_S, place_S = torch.zeros(total, dtype=torch.int64), torch.zeros(total, dtype=torch.int64)
    position_S, chunk_S = torch.zeros(total, dtype=torch.int64), torch.zeros(total, dtype=torch.int64)
    for g, i in enumerate(indices):
        ids, mask, at = token_ids[i], response_masks[i], int(starts[g])
        n = ids.numel()
        tokens_S[at : at + n] = ids
        labels_S[at : at + n - 1] = ids[1:]
        is_row_S[at : at + n - 1] = mask[1:]
        sequence_S[at : at + n] = g
        position_S[at : at + n - 1] = mask[1:].cumsum(0) - 1
        place_S[at : at + n] = first_token[i] + position_S[at : at + n]
        chunk_S[at : at + n] = torch.arange(n) // (lengths[g] // alignment.sequence)  # a multiple of its number of chunks

    def local(x: Tensor) -> Tensor:
        return shard_zigzag_packed(x, starts, alignment.cp, cp_rank, dim=0)

    rows_R = local(is_row_S).nonzero().squeeze(1)
    return PackedMicrobatch(
        tokens_S=local(tokens_S).unsqueeze(0),
        cu_seqlens=starts.to(torch.int32),
        max_seqlen=max(lengths),
        rows_R=rows_R,
        labels_R=local(labels_S)[rows_R],
        sequence_R=local(sequence_S)[rows_R],
        token_R=local(place_S)[rows_R],
        position_R=local(position_S)[rows_R],
        chunk_R=local(chunk_S)[rows_R],
        lengths_G=torch.tensor([max(1, int(response_masks[i].sum())) for i in indices], dtype=torch.float32),
        sequences_G=torch.tensor(list(indices), dtype=torch.int64),
    )
