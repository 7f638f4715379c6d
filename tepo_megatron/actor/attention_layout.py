"""Layout of a packed microbatch for SDPA: sequences of similar length are padded into a bucket and computed together.

Suffixes: _S packed tokens on this context-parallel (CP) rank, _T packed tokens on all CP ranks (T = cp S), _G sequences. Other
dimensions: H heads, K key-value heads, D channels; n sequences of one bucket, C tokens of their longest chunk. A shared prompt,
and what follows it in a response, count as sequences here. A "piece" is a zigzag chunk that this rank holds.

There are many short sequences, and one SDPA call costs more than attending to twenty tokens. Sequences of similar length are
therefore padded to the same length and computed in one call. The padding is at the end, which causal attention never attends
to, so no key mask is needed. The positions are computed once per microbatch and shared by all layers.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tepo_megatron.ops.context_parallel import concatenated_ranges, zigzag_chunks, zigzag_rows

# Sequences share a bucket if the longest has at most _PADDING_RATIO times the tokens of the shortest, or _PADDING_TOKENS more.
# Many short sequences then take far fewer calls, and long ones get little padding.
_PADDING_RATIO = 1.1
_PADDING_TOKENS = 8


@dataclass(frozen=True)
class AttentionBucket:
    """Sequences of similar length, padded to the longest."""

    sequences: int
    chunk: int  # C, tokens of the longest sequence's chunk
    pieces: tuple[int, ...]  # chunks that hold this rank's queries
    total: int  # chunks per sequence
    # For each of `pieces`, the keys that each query attends to, bool [n or 1, 1, C, (piece + 1) C]. None: causal.
    masks: tuple[Tensor | None, ...]

    @classmethod
    def of(cls, chunk_n: Tensor, pieces: tuple[int, ...], total: int, device: torch.device) -> "AttentionBucket":
        """Return the bucket of these sequences, with its masks.

        `chunk_n`: int64 on the host, tokens of each sequence's chunk.
        """
        chunk = int(chunk_n.max())
        masks = tuple(_mask(piece, chunk_n, chunk, device) for piece in pieces)
        return cls(chunk_n.numel(), chunk, pieces, total, masks)

    @property
    def query_rows(self) -> int:
        """Return the number of this rank's queries, padding included."""
        return self.sequences * len(self.pieces) * self.chunk

    @property
    def key_rows(self) -> int:
        """Return the number of keys of all CP ranks, padding included."""
        return self.sequences * self.total * self.chunk

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> list[Tensor]:
        """Return the attention output of the bucket: for each of `pieces` [n C, H, D], together [query_rows, H, D].

        `scale`: factor of the scores. None: 1 / sqrt(D).
        """
        key, value = (x.unflatten(0, (self.sequences, -1)).transpose(1, 2) for x in (key, value))
        heads = query.size(1)
        outputs = []
        for i, (piece, mask) in enumerate(zip(self.pieces, self.masks, strict=True)):
            end = (piece + 1) * self.chunk
            k, v = key[:, :, :end], value[:, :, :end]
            if repeats_keys(query.device.type):
                k, v = repeat_heads(k, heads), repeat_heads(v, heads)
            q = query.unflatten(0, (len(self.pieces), self.sequences, self.chunk))[i].transpose(1, 2)
            output = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=k.size(1) != heads
            )
            outputs.append(output.transpose(1, 2).flatten(0, 1))
        return outputs


def repeats_keys(device_type: str) -> bool:
    """Return whether to repeat keys and values for all query heads, instead of setting `enable_gqa`.

    On CUDA only what `packed_flash_of` has no kernel for comes here, such as fp32. Of PyTorch's CUDA kernels (2.13,
    `sdp_utils.cpp`) memory-efficient attention takes it, without grouped heads; a call that none takes falls back to one that
    stores all scores of all heads. The CPU kernel takes all calls.
    """
    return device_type == "cuda"


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Return x with each head repeated: [n, K, L, D] -> [n, heads, L, D]. Backward sums the repeats, without atomics."""
    n, groups, length, channels = x.shape
    if groups == heads:
        return x
    return x.unsqueeze(2).expand(n, groups, heads // groups, length, channels).reshape(n, heads, length, channels)


@dataclass(frozen=True)
class SharedPrompt:
    """A shared prompt and the responses that attend to it."""

    first_query: int  # index of the responses' first local token. Their tokens are contiguous.
    queries: int
    first_key: int  # slot of the prompt's first token
    keys: int  # number of the prompt's tokens, without padding


@dataclass(frozen=True)
class AttentionLayout:
    """The positions (slots) of a microbatch's tokens in the padded buckets, one bucket after another."""

    buckets: tuple[AttentionBucket, ...]
    query_slot_S: Tensor  # int64, row of each local query. A bucket's rows are [piece, n, C].
    key_slot_T: Tensor  # int64, row of each gathered key. A bucket's rows are [n, chunk of the sequence, C].
    prompts: tuple[SharedPrompt, ...]

    @property
    def query_rows(self) -> int:
        """Return the number of query rows of all buckets."""
        return sum(b.query_rows for b in self.buckets)

    @property
    def key_rows(self) -> int:
        """Return the number of key rows of all buckets."""
        return sum(b.key_rows for b in self.buckets)

    def in_slots(self, query_S: Tensor, key_T: Tensor, value_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values in their slots of the buckets; see `spread`."""
        queries = spread(query_S, self.query_slot_S, self.query_rows)
        keys, values = (spread(x, self.key_slot_T, self.key_rows) for x in (key_T, value_T))
        return queries, keys, values

    @classmethod
    def of(
        cls, lengths: Sequence[int], cp_group: dist.ProcessGroup, device: torch.device, starts: Sequence[int] | None = None
    ) -> "AttentionLayout":
        """Return this rank's layout of a packed microbatch. `starts`: `PackedMicrobatch.starts`. None: no prompt is shared."""
        cp_size, cp_rank = cp_group.size(), cp_group.rank()
        pieces, total = zigzag_chunks(cp_size, cp_rank), 1 if cp_size == 1 else 2 * cp_size
        lengths_G = torch.tensor(lengths)
        chunk_G = lengths_G // total
        cu_seqlens = torch.cat((lengths_G.new_zeros(1), lengths_G.cumsum(0)))
        gathered_T = torch.cat([zigzag_rows(cu_seqlens, cp_size, rank) for rank in range(cp_size)])
        query_first = torch.zeros(len(lengths), len(pieces), dtype=torch.int64)  # row of each chunk's first token
        key_first = torch.zeros(len(lengths), dtype=torch.int64)  # row of each sequence's first token
        buckets: list[AttentionBucket] = []
        query_rows = key_rows = 0
        for members in _similar(lengths):
            bucket = AttentionBucket.of(chunk_G[members], pieces, total, device)
            chunk_rows = torch.arange(query_rows, query_rows + bucket.query_rows, bucket.chunk)
            query_first[members] = chunk_rows.view(len(pieces), len(members)).T
            key_first[members] = torch.arange(key_rows, key_rows + bucket.key_rows, total * bucket.chunk)
            query_rows, key_rows = query_rows + bucket.query_rows, key_rows + bucket.key_rows
            buckets.append(bucket)
        query_slot_S = concatenated_ranges(query_first.flatten(), chunk_G.repeat_interleave(len(pieces)))
        key_slot_T = concatenated_ranges(key_first, lengths_G)[gathered_T]
        prompts = () if starts is None else shared_prompts(starts, (cu_seqlens // cp_size).tolist(), key_first.tolist())
        return cls(tuple(buckets), query_slot_S.to(device), key_slot_T.to(device), prompts)


def shared_prompts(starts: Sequence[int], first_query: Sequence[int], first_key: Sequence[int]) -> tuple[SharedPrompt, ...]:
    """Return the shared prompts with local responses."""
    whole = [i for i, start in enumerate(starts) if not start]
    prompts = []
    for prompt, end in itertools.pairwise([*whole, len(starts)]):
        at, queries = first_query[prompt + 1], first_query[end] - first_query[prompt + 1]
        if queries:
            prompts.append(SharedPrompt(at, queries, first_key[prompt], starts[prompt + 1]))
    return tuple(prompts)


def _similar(lengths: Sequence[int]) -> list[list[int]]:
    """Return the indices of `lengths` in buckets of similar length, the longest first. Empty sequences are left out."""
    buckets: list[list[int]] = []
    longest = 0
    for i in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i]):
        if not buckets or longest > max(lengths[i] * _PADDING_RATIO, lengths[i] + _PADDING_TOKENS):
            buckets.append([])
            longest = lengths[i]
        buckets[-1].append(i)
    return buckets


def _mask(piece: int, chunk_n: Tensor, chunk: int, device: torch.device) -> Tensor | None:
    """Return the mask of a piece; None for the plain causal one.

    Query j of a sequence is its token piece * (the sequence's chunk length) + j, and attends to all tokens up to itself.
    """
    if piece == 0:
        return None
    if bool((chunk_n == chunk).all()):
        chunk_n = chunk_n[:1]
    position = piece * chunk_n.to(device)[:, None] + torch.arange(chunk, device=device)
    return (torch.arange((piece + 1) * chunk, device=device) <= position[:, :, None]).unsqueeze(1)


def spread(x: Tensor, slot: Tensor, rows: int) -> Tensor:
    """Return a tensor with x[i] at row slot[i] and zeros elsewhere. Backward is a gather, without atomics.

    `slot`: int64, the row of each value. No two are equal.
    """
    return x.new_zeros(rows, *x.shape[1:]).index_copy(0, slot, x)
