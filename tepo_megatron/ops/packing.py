"""From ragged sequences to packed microbatches: where the tokens lie. Who computes what is planned in `planning.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tepo_megatron.ops.alignment import Alignment
from tepo_megatron.ops.context_parallel import zigzag_rows
from tepo_megatron.ops.shared_prompts import Families, Piece, pieces_of
from tepo_megatron.types import NO_EXPERT, PackedMicrobatch


def pack(
    token_ids: Sequence[Tensor],
    response_masks: Sequence[Tensor],
    first_token: Sequence[int],
    indices: Sequence[int],
    alignment: Alignment,
    cp_rank: int,
    experts: Sequence[Tensor] | None = None,
    families: Families | None = None,
) -> PackedMicrobatch:
    """Pack the sequences `indices` one after another and take this context-parallel rank's part.

    token_ids, response_masks: of the whole batch, each [L]; first_token: place of each sequence's first response token in the
    flat _N tensors; experts: of the whole batch, each [L, K, T]; families: whose prompts are packed once, members of a family
    then lie side by side. Labels are those of the sequences, before anything is cut, so none is lost at a boundary. Without
    indices: one dummy token without response rows, so that an empty rank still joins every collective.
    """
    pieces = pieces_of(indices, [ids.numel() for ids in token_ids], families)
    packed = _Packed.of(pieces, alignment)
    token_ids_S = torch.zeros(packed.total, dtype=torch.int64)
    if pieces:
        token_ids_S[packed.is_token_S] = torch.cat([token_ids[p.sequence][p.start : p.stop] for p in pieces])
    rows = _rows(token_ids, response_masks, pieces, packed)
    mine = zigzag_rows(packed.cu_seqlens, alignment.cp, cp_rank)
    place_S = torch.full((packed.total,), -1)
    place_S[mine] = torch.arange(mine.numel())
    is_mine_N = place_S[rows.row_N] >= 0
    sequence_R, position_R = rows.sequence_N[is_mine_N], rows.position_N[is_mine_N]
    shares = any(p.start for p in pieces)
    return PackedMicrobatch(
        tokens_S=token_ids_S[mine].unsqueeze(0),
        cu_seqlens=packed.cu_seqlens.to(torch.int32),
        max_seqlen=int((packed.start_P + packed.cu_seqlens.diff()).max()),
        rows_R=place_S[rows.row_N[is_mine_N]],
        labels_R=rows.label_N[is_mine_N],
        sequence_R=sequence_R,
        token_R=torch.tensor([first_token[i] for i in rows.sequences], dtype=torch.int64)[sequence_R] + position_R,
        position_R=position_R,
        chunk_R=rows.chunk_N[is_mine_N],
        chunks=packed.chunks + (shares and packed.chunks > 1),
        lengths_G=torch.bincount(rows.sequence_N, minlength=len(rows.sequences)).clamp(min=1).float(),
        sequences_G=torch.tensor(rows.sequences, dtype=torch.int64),
        starts=tuple(p.start for p in pieces) if shares else None,
        experts_SKT=None if experts is None else _experts(experts, pieces, packed.is_token_S)[mine],
    )


@dataclass(frozen=True)
class _Packed:
    """Where the tokens of the pieces lie, over all context-parallel ranks. chunks: zigzag chunks of a piece."""

    cu_seqlens: Tensor
    start_P: Tensor
    chunks: int
    piece_S: Tensor
    offset_S: Tensor
    is_token_S: Tensor

    @property
    def total(self) -> int:
        """Tokens with all padding."""
        return self.piece_S.numel()

    @classmethod
    def of(cls, pieces: Sequence[Piece], alignment: Alignment) -> _Packed:
        sizes = [p.tokens for p in pieces] or [1]
        length_P = torch.tensor(alignment.padded(sizes))
        cu_seqlens = torch.cat((length_P.new_zeros(1), length_P.cumsum(0)))
        piece_S = torch.arange(len(sizes)).repeat_interleave(length_P)
        offset_S = torch.arange(piece_S.numel()) - cu_seqlens[piece_S]
        start_P = torch.tensor([p.start for p in pieces] or [0])
        is_token_S = offset_S < torch.tensor(sizes)[piece_S]
        return cls(cu_seqlens, start_P, alignment.sequence, piece_S, offset_S, is_token_S)


@dataclass(frozen=True)
class _Rows:
    """The rows of all response tokens, sequence after sequence. row_N: place among the packed tokens; sequence_N: in
    `sequences`.
    """

    sequences: list[int]
    row_N: Tensor
    label_N: Tensor
    sequence_N: Tensor
    position_N: Tensor
    chunk_N: Tensor


def _rows(token_ids: Sequence[Tensor], masks: Sequence[Tensor], pieces: Sequence[Piece], packed: _Packed) -> _Rows:
    """The row of a response token is the token before it in its sequence, which may be the last of a shared prompt."""
    last = [i for i, p in enumerate(pieces) if i + 1 == len(pieces) or not pieces[i + 1].start or p.start]
    sequences = [pieces[i].sequence for i in last]
    if not sequences:
        none = torch.zeros(0, dtype=torch.int64)
        return _Rows([], none, none, none, none, none)
    prompt_P = torch.tensor([i if not p.start else 0 for i, p in enumerate(pieces)]).cummax(0).values
    piece_G, length_G = torch.tensor(last), torch.tensor([token_ids[i].numel() for i in sequences])
    first_G = length_G.cumsum(0) - length_G
    mask = torch.cat([masks[i] for i in sequences])
    mask[first_G] = False  # nothing comes before it
    token_N = mask.nonzero().squeeze(1)
    sequence_N = torch.arange(len(sequences)).repeat_interleave(length_G)[token_N]
    piece_N = piece_G[sequence_N]
    before_N = token_N - first_G[sequence_N] - 1  # place of the row in its sequence
    in_prompt_N = before_N < packed.start_P[piece_N]
    behind_prompt_N = packed.start_P[piece_N] > 0
    piece_N = torch.where(in_prompt_N, prompt_P[piece_N], piece_N)
    row_N = packed.cu_seqlens[piece_N] + before_N - packed.start_P[piece_N]
    count_G = torch.bincount(sequence_N, minlength=len(sequences))
    return _Rows(
        sequences,
        row_N,
        torch.cat([token_ids[i] for i in sequences])[token_N],
        sequence_N,
        torch.arange(token_N.numel()) - (count_G.cumsum(0) - count_G)[sequence_N],
        _chunk(packed, row_N, piece_N, in_prompt_N, behind_prompt_N),
    )


def _chunk(packed: _Packed, row_N: Tensor, piece_N: Tensor, in_prompt_N: Tensor, behind_prompt_N: Tensor) -> Tensor:
    """The part of its sequence in which a row lies: the only row in a shared prompt comes before the chunks behind it."""
    if packed.chunks == 1:
        return torch.zeros_like(row_N)
    chunk_N = packed.offset_S[row_N] // (packed.cu_seqlens.diff() // packed.chunks)[piece_N]
    return torch.where(in_prompt_N, 0, chunk_N + behind_prompt_N)


def _experts(experts: Sequence[Tensor], pieces: Sequence[Piece], is_token_S: Tensor) -> Tensor:
    """[S, K, T]. A token whose experts are not known, padding or the last of its sequence, is no other token's context: any
    different experts do.
    """
    _, layers, chosen = experts[0].shape
    experts_SKT = torch.full((is_token_S.numel(), layers, chosen), NO_EXPERT, dtype=torch.int16)
    if pieces:
        experts_SKT[is_token_S] = torch.cat([experts[p.sequence][p.start : p.stop] for p in pieces])
    any_T = torch.arange(chosen, dtype=torch.int16)
    return torch.where(experts_SKT == NO_EXPERT, any_T, experts_SKT)
