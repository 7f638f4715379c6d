"""Datasheet values of GPUs. docs/plan.md names the sources."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

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
