"""Where the tokens of a packed microbatch lie while they are attended to.

Suffixes: _S packed tokens on this context-parallel (CP) rank, _T on all of them (T = cp S). Further dimensions: H heads, K
key-value heads, D channels; n sequences of one bucket, C tokens of their longest chunk.

Short sequences are many, and a call of SDPA costs more than attending to twenty tokens does. So sequences of similar length are
padded to the same length and attended to in one call. The padding lies at the end, where causal attention never looks: no key
mask is needed. Where each token goes is worked out once per microbatch and shared by all layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tepo_megatron.ops.context_parallel import concatenated_ranges, zigzag_chunks, zigzag_rows

# Sequences share a bucket when the longest has at most so many times the tokens of the shortest, or so many more: many short
# sequences then take far fewer calls, and long ones little padding.
_PADDING_RATIO = 1.1
_PADDING_TOKENS = 8


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, padded to the longest.

    chunk: C; pieces: the chunks that this rank's queries lie in; total: chunks of a sequence; masks: for each piece, which keys
    each query sees, bool [n or 1, 1, C, (piece + 1) C], or None where it is the plain causal triangle.
    """

    sequences: int
    chunk: int
    pieces: tuple[int, ...]
    total: int
    masks: tuple[Tensor | None, ...]

    @property
    def query_rows(self) -> int:
        """Queries of this rank, with padding."""
        return self.sequences * len(self.pieces) * self.chunk

    @property
    def key_rows(self) -> int:
        """Keys of all CP ranks, with padding."""
        return self.sequences * self.total * self.chunk

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> list[Tensor]:
        """[query_rows, H, D], [key_rows, K, D], [key_rows, K, D] -> for each piece [n C, H, D], together [query_rows, H, D]."""
        key, value = (x.unflatten(0, (self.sequences, -1)).transpose(1, 2) for x in (key, value))
        heads = query.size(1)
        outputs = []
        for i, (piece, mask) in enumerate(zip(self.pieces, self.masks, strict=True)):
            end = (piece + 1) * self.chunk
            k, v = key[:, :, :end], value[:, :, :end]
            if repeats_keys(query.device.type, query.dtype, mask is not None):
                k, v = repeat_heads(k, heads), repeat_heads(v, heads)
            output = F.scaled_dot_product_attention(
                query.unflatten(0, (len(self.pieces), self.sequences, self.chunk))[i].transpose(1, 2),
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=k.size(1) != heads,
            )
            outputs.append(output.transpose(1, 2).flatten(0, 1))
        return outputs


def repeats_keys(device_type: str, dtype: torch.dtype, masked: bool) -> bool:
    """Return whether keys and values are repeated for all query heads, instead of `enable_gqa`.

    Of PyTorch's CUDA kernels (2.13, `sdp_utils.cpp`), flash attention takes grouped heads, but no mask and no fp32;
    memory-efficient attention takes masks and fp32, but no grouped heads. cuDNN's takes both in 16 bits, and is preferred on
    sm_90 and sm_100 only. What none takes goes to a kernel that stores all scores of all heads. A CPU's kernel takes all.

    Args:
        device_type: "cpu" or "cuda".
        dtype: Type of the queries.
        masked: Whether the call has a mask; without one it is causal.
    """
    return device_type == "cuda" and (masked or dtype not in (torch.bfloat16, torch.float16))


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[n, K, L, D] -> [n, heads, L, D], each of the K repeated heads / K times in a row. Backward sums, without atomics."""
    n, groups, length, channels = x.shape
    if groups == heads:
        return x
    repeated = x.unsqueeze(2).expand(n, groups, heads // groups, length, channels)
    return repeated.reshape(n, heads, length, channels)


@dataclass(frozen=True)
class SharedPrompt:
    """A prompt and the responses that see it. first_query, queries: the responses' local tokens, one after another; first_key,
    keys: the slots of the prompt's tokens, without padding.
    """

    first_query: int
    queries: int
    first_key: int
    keys: int


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a microbatch lie in the padded buckets, one bucket after another.

    query_slot_S: int64, the row of each local query, in a bucket [piece, n, C]; key_slot_T: int64, the row of each gathered
    key, in a bucket [n, chunk of the sequence, C]; prompts: those that are shared.
    """

    buckets: tuple[Bucket, ...]
    query_slot_S: Tensor
    key_slot_T: Tensor
    prompts: tuple[SharedPrompt, ...]

    @property
    def query_rows(self) -> int:
        """Rows of all buckets."""
        return sum(b.query_rows for b in self.buckets)

    @property
    def key_rows(self) -> int:
        """Rows of all buckets."""
        return sum(b.key_rows for b in self.buckets)

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        cp_group: torch.distributed.ProcessGroup,
        device: torch.device,
        starts: Sequence[int] | None = None,
    ) -> Layout:
        """For sequences of these lengths over all CP ranks, as this rank sees them. starts: of a PackedMicrobatch."""
        cp_size, cp_rank = cp_group.size(), cp_group.rank()
        pieces, total = zigzag_chunks(cp_size, cp_rank), 1 if cp_size == 1 else 2 * cp_size
        lengths_G = torch.tensor(lengths)
        chunk_G = lengths_G // total
        cu_seqlens = torch.cat((lengths_G.new_zeros(1), lengths_G.cumsum(0)))
        gathered_T = torch.cat([zigzag_rows(cu_seqlens, cp_size, rank) for rank in range(cp_size)])
        query_first = torch.zeros(len(lengths), len(pieces), dtype=torch.int64)  # row of each chunk's first token
        key_first = torch.zeros(len(lengths), dtype=torch.int64)  # row of each sequence's first token
        buckets: list[Bucket] = []
        query_rows = key_rows = 0
        for members in _similar(lengths):
            chunk = lengths[members[0]] // total
            masks = tuple(_mask(piece, chunk_G[members], chunk, device) for piece in pieces)
            bucket = Bucket(len(members), chunk, pieces, total, masks)
            chunk_rows = torch.arange(query_rows, query_rows + bucket.query_rows, chunk)
            query_first[members] = chunk_rows.view(len(pieces), len(members)).T
            key_first[members] = torch.arange(key_rows, key_rows + bucket.key_rows, total * chunk)
            query_rows, key_rows = query_rows + bucket.query_rows, key_rows + bucket.key_rows
            buckets.append(bucket)
        query_slot_S = concatenated_ranges(query_first.flatten(), chunk_G.repeat_interleave(len(pieces)))
        key_slot_T = concatenated_ranges(key_first, lengths_G)[gathered_T]
        prompts = () if starts is None else _shared_prompts(starts, (cu_seqlens // cp_size).tolist(), key_first.tolist())
        return cls(tuple(buckets), query_slot_S.to(device), key_slot_T.to(device), prompts)


def _shared_prompts(starts: Sequence[int], first_query: Sequence[int], first_key: Sequence[int]) -> tuple[SharedPrompt, ...]:
    """first_query: of each piece, its first local token; first_key: the slot of its first key."""
    whole = [i for i, start in enumerate(starts) if not start]
    found = []
    for prompt, end in itertools.pairwise([*whole, len(starts)]):
        at, queries = first_query[prompt + 1], first_query[end] - first_query[prompt + 1]
        if queries:
            found.append(SharedPrompt(at, queries, first_key[prompt], starts[prompt + 1]))
    return tuple(found)


def _similar(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of `lengths` in buckets of similar length, the longest first."""
    buckets: list[list[int]] = []
    longest = 0
    for i in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i]):
        if not buckets or longest > max(lengths[i] * _PADDING_RATIO, lengths[i] + _PADDING_TOKENS):
            buckets.append([])
            longest = lengths[i]
        buckets[-1].append(i)
    return buckets


def _mask(piece: int, chunk_n: Tensor, chunk: int, device: torch.device) -> Tensor | None:
    """Query j of a chunk is token piece * (its sequence's chunk length) + j and sees all up to itself."""
    if piece == 0:
        return None
    if bool((chunk_n == chunk).all()):
        chunk_n = chunk_n[:1]
    position = piece * chunk_n.to(device)[:, None] + torch.arange(chunk, device=device)
    return (torch.arange((piece + 1) * chunk, device=device) <= position[:, :, None]).unsqueeze(1)


def spread(x: Tensor, slot: Tensor, rows: int) -> Tensor:
    """x[i] at row slot[i], zeros elsewhere. Backward is a gather, without atomics."""
    return x.new_zeros(rows, *x.shape[1:]).index_copy(0, slot, x)
