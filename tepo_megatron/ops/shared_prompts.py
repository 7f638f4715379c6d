"""Shared prompts: compute a prompt once for all sequences of a microbatch that begin with it.

A prefix group (a "group" in the identifiers) is the set of sequences of a batch whose prompts are equal. The members of a
group in one microbatch share one copy of the prompt: the prompt is packed as a piece of its own, and the rest of each member
follows it as a piece of its own.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from tepo_megatron.ops.alignment import Alignment

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
