"""Which tokens of a microbatch are computed once for several sequences.

A family is the sequences of a batch whose prompts are equal. Those of one microbatch share one copy of the prompt: it is packed
as a piece of its own, and behind it, as a piece each, what the sequences have after it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tepo_megatron.ops.alignment import Alignment

LEAST_SAVED = 64  # tokens: a family that saves fewer is not worth a call of attention for each of its parts and layers
_HALVINGS = 5  # of a microbatch, to find how finely to cut families


@dataclass(frozen=True)
class Families:
    """family: of each sequence of a batch, a number; lengths: tokens of each sequence's prompt, equal within a family."""

    family: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, prompt_ids: Sequence[int], lengths: Sequence[int], least_tokens: int, least_saved: int) -> Families | None:
        """The families of a batch (`TrainBatch.prompt_ids`, `.prompt_lengths`); None where no prompt is shared.

        Sequences stay alone whose prompts have fewer than `least_tokens` tokens, or whose sharing saves fewer than
        `least_saved` in all.
        """
        size = Counter(prompt_ids)
        shares = [
            size[i] > 1 and n >= least_tokens and (size[i] - 1) * n >= least_saved
            for i, n in zip(prompt_ids, lengths, strict=True)
        ]
        if not any(shares):
            return None
        alone = len(prompt_ids)  # numbers from here on are of one sequence each
        family = (i if share else alone + at for at, (i, share) in enumerate(zip(prompt_ids, shares, strict=True)))
        return cls(tuple(family), tuple(lengths))

    def members(self, indices: Sequence[int]) -> list[list[int]]:
        """The sequences `indices` by family, each where its first member is."""
        found: defaultdict[int, list[int]] = defaultdict(list)
        for i in indices:
            found[self.family[i]].append(i)
        return list(found.values())


@dataclass(frozen=True)
class Piece:
    """Tokens `start` to `stop` of a sequence, packed together.

    start above 0: what comes before them in the sequence is the last piece before this one that starts at 0.
    """

    sequence: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """How many; 0 where a sequence has nothing behind a shared prompt."""
        return self.stop - self.start


def pieces_of(indices: Sequence[int], lengths: Sequence[int], families: Families | None) -> list[Piece]:
    """Of the sequences `indices` of a batch, in a microbatch. lengths: of all sequences of the batch; families: None: no
    prompt is shared.
    """
    if families is None:
        return [Piece(i, 0, lengths[i]) for i in indices]
    out: list[Piece] = []
    for members in families.members(indices):
        prompt = 0
        if len(members) > 1:
            prompt = families.lengths[members[0]]
            out.append(Piece(members[0], 0, prompt))
        out += [Piece(i, prompt, lengths[i]) for i in members]
    return out


def cut(families: Families, lengths: Sequence[int], alignment: Alignment, room: int) -> list[list[list[int]]]:
    """Ways to cut a batch into groups that are to be computed together: parts of families of at most `room` tokens, of half of
    it, ... Each but those of one sequence has its prompt and all padding within that.
    """
    whole = families.members(range(len(lengths)))
    ways: list[list[list[int]]] = []
    for halving in range(_HALVINGS):
        way = [part for members in whole for part in _parts(members, families, lengths, alignment, room >> halving)]
        if way not in ways:
            ways.append(way)
    return ways


def _parts(members: list[int], families: Families, lengths: Sequence[int], alignment: Alignment, most: int) -> list[list[int]]:
    """As few as hold the members; each member, the longest first, in the part that has the fewest tokens so far."""
    prompt = families.lengths[members[0]]
    behind = {i: alignment.padded_one(lengths[i] - prompt) for i in members}
    room = most - alignment.padded_one(prompt)
    least = -(-sum(behind.values()) // room) if room > 0 else len(members)
    for count in range(max(1, least), len(members)):
        parts: list[list[int]] = [[] for _ in range(count)]
        tokens = [0] * count
        for i in sorted(members, key=lambda i: (-behind[i], i)):
            at = tokens.index(min(tokens))
            parts[at].append(i)
            tokens[at] += behind[i]
        if all(n <= room or len(part) == 1 for n, part in zip(tokens, parts, strict=True)):
            return parts
    return [[i] for i in members]
