"""Datasheet values of GPUs, and sizes of page-locked host memory, for the ranks and for `tepo plan`. No torch.

docs/plan.md names the sources of the datasheet values. The code that allocates host memory and `tepo plan` share the sizes, so
both count the same bytes.
"""

import mmap
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

NOT_SXM = {"PCIe", "NVL"}  # boards with other datasheet values than those of the table


@dataclass(frozen=True)
class Gpu:
    """Datasheet values of a GPU.

    Attributes:
        network: Bytes per second of the network adapter in one direction.
        host: Bytes per second to the host in one direction.
    """

    name: str
    memory: int
    memory_bandwidth: float  # bytes per second
    peak: Mapping[int, float]  # element size in bytes -> dense operations per second (without sparsity)
    nvlink: float  # bytes per second in one direction
    network: float = 50e9  # one 400 Gb/s adapter per GPU
    host: float = 64e9  # PCIe 5.0 x16


# SXM boards. Memory is in datasheet GB; drivers report somewhat more or less.
GPUS: Mapping[str, Gpu] = {
    "H100": Gpu("H100", 80 * 10**9, 3.35e12, {1: 1979e12, 2: 989e12, 4: 67e12}, 450e9),
    "H200": Gpu("H200", 141 * 10**9, 4.8e12, {1: 1979e12, 2: 989e12, 4: 67e12}, 450e9),
    "B200": Gpu("B200", 180 * 10**9, 8e12, {1: 4500e12, 2: 2250e12, 4: 75e12}, 900e9),
}


def card_of(device: str) -> str | None:
    """Return the GPU of the table that a device is, by the name that its driver gives; None for another device."""
    words = set(re.findall(r"\w+", device))
    return None if words & NOT_SXM else next((name for name in GPUS if name in words), None)


ALIGNMENT = 64  # bytes; alignment of the pieces of an arena, enough for any dtype
LEAST_OFFLOADED = 2**20  # bytes; smaller activations stay on the device, because moving them costs more than it frees


def starts(sizes: Sequence[int]) -> list[int]:
    """Return the start of each piece of an arena, in bytes, and the end of the last piece as the last number."""
    return list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))


def block_bytes(size: int) -> int:
    """Return the bytes allocated for `size` bytes, in whole pages."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def arena_bytes(sizes: Sequence[int]) -> int:
    """Return the bytes that an arena allocates for pieces of these sizes (bytes)."""
    return block_bytes(starts(sizes)[-1])
