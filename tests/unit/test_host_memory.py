"""Host memory for copies of a GPU's: where pieces lie, what is used again, and how much is allocated. Here on plain memory."""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.platform.host_memory import HostArena, HostPiece, HostStacks
from tepo_megatron.utils.host_sizes import ALIGNMENT, arena_bytes, starts

CPU = torch.device("cpu")
PAGE, MIB = os.sysconf("SC_PAGESIZE"), 2**20


def filled(pieces: list[torch.Tensor]) -> list[torch.Tensor]:
    """Write something else into each piece, and return copies."""
    for i, piece in enumerate(pieces):
        piece.copy_(torch.arange(piece.numel()) * (2 * i + 3) % 251)
    return [piece.clone() for piece in pieces]


@given(st.lists(st.integers(0, 9000), min_size=1, max_size=12))
def test_pieces_lie_one_after_the_other(sizes: list[int]) -> None:
    arena = HostArena(CPU)
    pieces = arena.pieces(sizes)
    kept = filled(pieces)
    assert all(torch.equal(piece, copy) for piece, copy in zip(pieces, kept, strict=True)), "pieces overlap"
    assert [piece.untyped_storage().nbytes() for piece in pieces] == sizes, "torch.save writes whole storages"
    places = [piece.data_ptr() for piece in pieces if piece.numel()]
    assert all(place % ALIGNMENT == 0 for place in places)
    assert arena.allocated == arena_bytes(sizes) < sum(sizes) + ALIGNMENT * len(sizes) + PAGE
    assert arena.allocated % PAGE == 0 and starts(sizes)[-1] <= arena.allocated


def test_an_arena_is_used_again_and_grows() -> None:
    arena = HostArena(CPU)
    (first,) = arena.pieces([3 * PAGE])
    place = first.data_ptr()
    smaller = arena.pieces([PAGE, 8])
    assert smaller[0].data_ptr() == place and arena.allocated == 3 * PAGE
    kept = filled(smaller)
    larger = arena.pieces([5 * PAGE])
    assert arena.allocated == 5 * PAGE
    larger[0].fill_(9)
    assert all(torch.equal(a, b) for a, b in zip(smaller, kept, strict=True)), "whoever has a piece of it keeps its memory"


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def test_memory_is_given_back_with_the_last_piece() -> None:
    before = resident()
    arena = HostArena(CPU)
    (piece,) = arena.pieces([64 * MIB])
    piece.fill_(1)
    assert resident() - before > 60 * MIB
    del arena
    assert resident() - before > 60 * MIB and piece[-1] == 1
    del piece
    gc.collect()
    assert resident() - before < 8 * MIB


def test_a_forked_child_gets_no_copy() -> None:
    """A forked child may drop its references without harm to memory that it took meanwhile."""
    arena = HostArena(CPU)
    (piece,) = arena.pieces([PAGE])
    piece.fill_(7)
    child = os.fork()
    if child == 0:
        empty = int(piece.max()) == 0
        del piece, arena
        os._exit(0 if empty else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert piece.tolist() == [7] * PAGE


@pytest.mark.parametrize("order", ["backward", "oldest first"])
def test_stacks_take_what_the_largest_microbatch_needs(order: str) -> None:
    """Updates of some microbatches of all lengths, two under way at once: their bytes stay as they are, the total is exact."""
    choose, memory = random.Random(0), HostStacks(CPU)
    widths = [512, 1740, 3481, 512] * 4  # bytes of a token, of what each layer saves
    shortest, longest = 15, 60

    def finish(pieces: list[tuple[HostPiece, torch.Tensor]]) -> None:
        while pieces:
            piece, copy = pieces.pop()
            assert torch.equal(piece.data, copy)

    for update in range(8):
        memory.settle()
        under_way: list[list[tuple[HostPiece, torch.Tensor]]] = []
        for number in range(5):
            tokens = longest if (update, number) == (3, 1) else choose.randint(shortest, longest)
            memory.begin()
            pieces = [memory.take(tokens * width) for width in widths]
            under_way.append(list(zip(pieces, filled([piece.data for piece in pieces]), strict=True)))
            del pieces
            if len(under_way) == 2:
                finish(under_way.pop(-1 if order == "backward" else 0))
        finish(under_way.pop())
        if update > 3:
            assert memory.allocated == 2 * arena_bytes([longest * width for width in widths])


def test_stacks_unlock_nothing_amid_an_update() -> None:
    memory = HostStacks(CPU)
    memory.settle()
    places = set()
    for size in (3, 5, 4):
        memory.begin()
        piece = memory.take(size * PAGE)
        places.add(piece.data.data_ptr())
        del piece
    assert memory.allocated == (3 + 5) * PAGE and len(places) == 2, "the third piece lies where the second was"
    memory.settle()
    assert memory.allocated == 5 * PAGE


class Registry:
    """A replacement of CUDA's runtime, which this machine does not have: the locked memory, by address."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.synchronized = False
        self.status = 0

    def synchronize(self) -> None:
        self.synchronized = True

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert address % PAGE == size % PAGE == 0 and flags == 1
        if not self.status:
            self.locked[address] = size
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        assert self.synchronized, "copies may be under way"
        assert mapped(address)
        del self.locked[address]
        return 0


def mapped(address: int) -> bool:
    """Return whether this process has memory at an address."""
    bounds = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(low, 16) <= address < int(high, 16) for low, high in bounds)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    found = Registry()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "synchronize", found.synchronize)
    return found


def test_memory_is_locked_to_the_page_and_unlocked_before_it_is_unmapped(registry: Registry) -> None:
    arena = HostArena(torch.device("cuda"))
    (piece,) = arena.pieces([3 * PAGE + 1])
    assert registry.locked == {piece.data_ptr(): 4 * PAGE}
    (larger,) = arena.pieces([5 * PAGE])
    assert registry.locked == {piece.data_ptr(): 4 * PAGE, larger.data_ptr(): 5 * PAGE}, "somebody has the first piece"
    del piece
    assert registry.locked == {larger.data_ptr(): 5 * PAGE}
    del arena, larger
    assert registry.locked == {}


def test_memory_that_cannot_be_locked_is_refused(registry: Registry) -> None:
    registry.status = 2
    with pytest.raises(RuntimeError, match=r"CUDA error 2: cudaHostRegister could not lock 0\.12 GiB of host memory; compare"):
        HostArena(torch.device("cuda")).pieces([2**27])
    gc.collect()
    assert registry.locked == {}
