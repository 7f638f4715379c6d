"""Pack ragged sequences into microbatches, in which sequences may share a prompt that is computed once.

`planning.py` decides which rank computes which sequences.

A prefix group (a "group" in the identifiers) is the set of sequences of a batch whose prompts are equal. The members of a group
in one microbatch share one copy of the prompt: the prompt is packed as a piece of its own, and the rest of each member follows
it as a piece of its own.

Suffixes: _S packed tokens over all context-parallel ranks, _N response tokens of the microbatch, _P pieces, _G sequences.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from tepo_megatron.base.types import PackedMicrobatch, no_expert
from tepo_megatron.ops.alignment import Alignment
from tepo_megatron.ops.context_parallel import zigzag_rows

Parts = list[list[int]]  # indices of the sequences of each part
LEAST_SAVED = 64  # tokens: a group that saves fewer is not worth one more attention call per part and layer
_HALVINGS = 5  # how often `split_into_parts` halves the size limit of a part


@dataclass(frozen=True)
class PrefixGroups:
    """The prefix groups of a batch."""

    group: tuple[int, ...]  # number of the prefix group of each sequence
    lengths: tuple[int, ...]  # prompt tokens of each sequence, equal within a group

    @classmethod
    def of(cls, prompt_ids: Sequence[int], lengths: Sequence[int], least_tokens: int, least_saved: int) -> Self | None:
        """Return the prefix groups of a batch; None if no prompt is shared. A sequence that shares nothing is its own group."""
        size = Counter(prompt_ids)
        shares = [
            size[i] > 1 and n >= least_tokens and (size[i] - 1) * n >= least_saved
            for i, n in zip(prompt_ids, lengths, strict=True)
        ]
        if not any(shares):
            return None
        alone = len(prompt_ids)  # numbers from here on name groups of one sequence
        group = (i if share else alone + at for at, (i, share) in enumerate(zip(prompt_ids, shares, strict=True)))
        return cls(tuple(group), tuple(lengths))

    def members(self, indices: Sequence[int]) -> list[list[int]]:
        """Return the sequences `indices` by prefix group. The groups are in the order of their first members."""
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for i in indices:
            groups[self.group[i]].append(i)
        return list(groups.values())


@dataclass(frozen=True)
class SequencePiece:
    """Tokens `start` to `stop` of a sequence, packed together.

    With `start` above 0, the tokens before them in the sequence are the closest earlier piece that starts at 0.
    """

    sequence: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """Return the number of tokens. It is 0 if a sequence ends with its shared prompt."""
        return self.stop - self.start


def pieces_of(indices: Sequence[int], lengths: Sequence[int], prefix_groups: PrefixGroups | None) -> list[SequencePiece]:
    """Return the pieces of a microbatch: whole sequences, shared prompts, and what follows these prompts.

    `prefix_groups`: prefix groups of the batch. None: no prompt is shared.
    """
    if prefix_groups is None:
        return [SequencePiece(i, 0, lengths[i]) for i in indices]
    out: list[SequencePiece] = []
    for members in prefix_groups.members(indices):
        prompt = 0
        if len(members) > 1:
            prompt = prefix_groups.lengths[members[0]]
            out.append(SequencePiece(members[0], 0, prompt))
        out += [SequencePiece(i, prompt, lengths[i]) for i in members]
    return out


def split_into_parts(prefix_groups: PrefixGroups, lengths: Sequence[int], alignment: Alignment, capacity: int) -> list[Parts]:
    """Return several ways to split a batch into parts of prefix groups, each part to be computed in one microbatch.

    The parts of the first way have at most `capacity` tokens, those of the next half as many, and so on. The shared prompt and
    all padding count; a part of a single sequence may exceed the limit. Returns [way][part], a list of sequence indices.
    """
    whole = prefix_groups.members(range(len(lengths)))
    ways: list[Parts] = []
    for halving in range(_HALVINGS):
        way = [part for members in whole for part in _parts(members, prefix_groups, lengths, alignment, capacity >> halving)]
        if way not in ways:
            ways.append(way)
    return ways


def _parts(members: list[int], prefix_groups: PrefixGroups, lengths: Sequence[int], alignment: Alignment, most: int) -> Parts:
    """Split a group into as few parts of at most `most` tokens as hold it: the longest first, each into the emptiest part."""
    prompt = prefix_groups.lengths[members[0]]
    behind = {i: alignment.padded_one(lengths[i] - prompt) for i in members}
    capacity = most - alignment.padded_one(prompt)
    least = -(-sum(behind.values()) // capacity) if capacity > 0 else len(members)
    for count in range(max(1, least), len(members)):
        parts: list[list[int]] = [[] for _ in range(count)]
        tokens = [0] * count
        for i in sorted(members, key=lambda i: (-behind[i], i)):
            at = tokens.index(min(tokens))
            parts[at].append(i)
            tokens[at] += behind[i]
        if all(n <= capacity or len(part) == 1 for n, part in zip(tokens, parts, strict=True)):
            return parts
    return [[i] for i in members]


def pack(
    token_ids: Sequence[Tensor],
    response_masks: Sequence[Tensor],
    first_token: Sequence[int],
    indices: Sequence[int],
    alignment: Alignment,
    cp_rank: int,
    experts: Sequence[Tensor] | None = None,
    prefix_groups: PrefixGroups | None = None,
) -> PackedMicrobatch:
    """Pack the sequences `indices` one after another and return this context-parallel rank's part.

    Labels are taken from the whole sequences, before they are split into chunks, so that none is lost at a boundary. Without
    indices the result is one dummy token without response rows, so that an empty rank still joins every collective.

    Args:
        token_ids: Token ids of each sequence of the batch, each int64 [L].
        response_masks: Response mask of each sequence of the batch, each bool [L].
        first_token: Index of each sequence's first response token in the batch's flat _N tensors.
        experts: Experts of each sequence of the batch, each uint8 or int16 [L, K, T]. None: the routers choose.
        prefix_groups: Prefix groups, whose prompts are packed once; the members of a group are then packed next to each other.
            None: no prompt is shared.
    """
    pieces = pieces_of(indices, [ids.numel() for ids in token_ids], prefix_groups)
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
    """The positions of the pieces' tokens, over all context-parallel ranks."""

    cu_seqlens: Tensor  # int64 [P + 1], padded starts of the pieces
    start_P: Tensor  # int64, index of the piece's first token in its sequence
    chunks: int  # zigzag chunks per piece
    piece_S: Tensor  # int64, the piece of each packed token
    offset_S: Tensor  # int64, index of the token in its piece
    is_token_S: Tensor  # bool, False on padding

    @property
    def total(self) -> int:
        return self.piece_S.numel()

    @classmethod
    def of(cls, pieces: Sequence[SequencePiece], alignment: Alignment) -> "_Packed":
        """Return the padded positions of the pieces, or of one dummy token if there are none."""
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
    """The rows of all response tokens of a microbatch, sequence after sequence."""

    sequences: list[int]  # index in the batch of each sequence, in the order in which they are packed
    row_N: Tensor  # int64, index among the packed tokens
    label_N: Tensor  # int64, the response token itself
    sequence_N: Tensor  # int64, index into `sequences`
    position_N: Tensor  # int64, index of the token in its response, from 0
    chunk_N: Tensor  # int64, chunk of the sequence that holds the row


def _rows(token_ids: Sequence[Tensor], masks: Sequence[Tensor], pieces: Sequence[SequencePiece], packed: _Packed) -> _Rows:
    """Return the rows of the response tokens. The row of a token is the token before it in its sequence: the position whose
    logits predict it. That may be the last token of a shared prompt.
    """
    last = [i for i, p in enumerate(pieces) if i + 1 == len(pieces) or not pieces[i + 1].start or p.start]
    if not (sequences := [pieces[i].sequence for i in last]):
        none = torch.zeros(0, dtype=torch.int64)
        return _Rows([], none, none, none, none, none)
    prompt_P = torch.tensor([i if not p.start else 0 for i, p in enumerate(pieces)]).cummax(0).values
    piece_G, length_G = torch.tensor(last), torch.tensor([token_ids[i].numel() for i in sequences])
    first_G = length_G.cumsum(0) - length_G
    mask = torch.cat([masks[i] for i in sequences])
    mask[first_G] = False  # no token comes before it, so no row predicts it
    token_N = mask.nonzero().squeeze(1)
    sequence_N = torch.arange(len(sequences)).repeat_interleave(length_G)[token_N]
    piece_N = piece_G[sequence_N]
    before_N = token_N - first_G[sequence_N] - 1  # place of the row in its sequence
    in_prompt_N = before_N < packed.start_P[piece_N]
    behind_prompt_N = packed.start_P[piece_N] > 0
    piece_N = torch.where(in_prompt_N, prompt_P[piece_N], piece_N)
    row_N = packed.cu_seqlens[piece_N] + before_N - packed.start_P[piece_N]
    count_G = torch.bincount(sequence_N, minlength=len(sequences))
    label_N = torch.cat([token_ids[i] for i in sequences])[token_N]
    position_N = torch.arange(token_N.numel()) - (count_G.cumsum(0) - count_G)[sequence_N]
    chunk_N = _chunk(packed, row_N, piece_N, in_prompt_N, behind_prompt_N)
    return _Rows(sequences, row_N, label_N, sequence_N, position_N, chunk_N)


def _chunk(packed: _Packed, row_N: Tensor, piece_N: Tensor, in_prompt_N: Tensor, behind_prompt_N: Tensor) -> Tensor:
    """Return the chunk of its sequence that holds each row.

    A sequence has a single row in its shared prompt, the last token. That row is in chunk 0, and the response's chunks follow.
    """
    if packed.chunks == 1:
        return torch.zeros_like(row_N)
    chunk_N = packed.offset_S[row_N] // (packed.cu_seqlens.diff() // packed.chunks)[piece_N]
    return torch.where(in_prompt_N, 0, chunk_N + behind_prompt_N)


def _experts(experts: Sequence[Tensor], pieces: Sequence[SequencePiece], is_token_S: Tensor) -> Tensor:
    """Return the experts of the packed tokens, [S, K, T].

    Padding and the last token of a sequence have no known experts. No other token attends to them, so any distinct experts do.
    """
    (_, layers, chosen), dtype = experts[0].shape, experts[0].dtype
    experts_SKT = torch.full((is_token_S.numel(), layers, chosen), no_expert(dtype), dtype=dtype)
    if pieces:
        experts_SKT[is_token_S] = torch.cat([experts[p.sequence][p.start : p.stop] for p in pieces])
    any_T = torch.arange(chosen, dtype=dtype)
    return torch.where(experts_SKT == no_expert(dtype), any_T, experts_SKT)
