"""What a GPU can do by its datasheet, and which share of that the plan counts on.

Nothing here was measured by this project. docs/plan.md names the sources, and says how far predictions made with these numbers
lie from what others measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GIB = 2**30
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Gpu:
    """memory: bytes; bandwidths: bytes per second, of links in one direction; peak: operations per second without sparsity, by
    the bytes of an element of the matrices.
    """

    name: str
    memory: int
    memory_bandwidth: float
    peak: Mapping[int, float]
    nvlink: float
    network: float = 50e9  # a 400 Gb/s adapter for each GPU
    host: float = 64e9  # PCIe 5.0 x16


# SXM boards. Memory: the GB of the datasheets; drivers show somewhat more or less
GPUS: Mapping[str, Gpu] = {
    "H100": Gpu("H100", 80 * 10**9, 3.35e12, {1: 1979e12, 2: 989e12, 4: 67e12}, 450e9),
    "H200": Gpu("H200", 141 * 10**9, 4.8e12, {1: 1979e12, 2: 989e12, 4: 67e12}, 450e9),
    "B200": Gpu("B200", 180 * 10**9, 8e12, {1: 4500e12, 2: 2250e12, 4: 75e12}, 900e9),
}


@dataclass(frozen=True)
class Assumptions:
    """One set for all GPUs, models and layouts. matmul: share of the peak in matrix products, by the bytes of an element;
    attention: share of the peak of bf16; elementwise, links: of memory's and of the links' bandwidth; seconds are host time.

    reserved: bytes of the CUDA context, NCCL's buffers and the libraries' workspaces; fragmentation: of what is allocated anew
    in every pass.

    asleep: bytes that a sleeping engine keeps on each GPU: context, libraries, CUDA graphs, NCCL. graphs, nccl: the part of it
    that vLLM's --sleep-mode-offload-cudagraph and, with tp > 1, --enable-nccl-comm-suspend give back.

    uniform_groups: share of the groups whose samples are all right or all wrong, which are dropped. held_out: problems of a
    `data.eval` whose size the config does not say. disk: bytes per second that a rank writes to the file system of its
    checkpoints. error: how far a predicted time may be from the real one, as a share of the real one.
    """

    matmul: Mapping[int, float]
    attention: float = 0.5
    elementwise: float = 0.8
    links: float = 0.8
    layer_seconds: float = 200e-6  # to launch one layer's forward pass
    experts: float = 0.14  # share of the peak of bf16 in the small products of experts, of whatever type
    decode_seconds: float = 4e-3  # of the engine, for each token of all its sequences
    decode_collective_seconds: float = 12e-6  # a small all-reduce
    beyond: float = 0.55  # of a step's phases: what NeMo-RL's published steps take beyond them (grading, stragglers, restarts)
    host_copy: float = 5e9  # bytes per second of a process that writes to shared memory or reads from it
    host_adam: float = 20e9  # bytes per second of one rank's Adam in host memory
    reserved: int = 3 * GIB
    fragmentation: float = 0.05
    engine_share: float = 0.92  # vLLM's default of --gpu-memory-utilization
    engine_sequences: int = 1024  # vLLM's default limit on a GPU of 80 GB
    engine_other: int = 4 * GIB  # activations and graphs of the engine, per GPU
    asleep: int = 4 * GIB
    graphs: int = 3 * GIB // 2
    nccl: int = 1 * GIB
    uniform_groups: float = 0.4
    held_out: int = 1000
    disk: float = 1e9
    error: float = 0.3


ASSUMED = Assumptions(matmul={1: 0.64, 2: 0.72, 4: 0.72})
