"""The share of GPUs' datasheet values that the plan assumes to be reached.

This project measured none of these numbers. docs/plan.md names the sources, and reports how far predictions with these numbers
are from what others measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass

GIB = 2**30
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Assumptions:
    """Assumed efficiencies, one set for all GPUs, models and layouts. Times are host time."""

    matmul: Mapping[int, float]  # element size in bytes -> share of the peak in matrix products
    attention: float = 0.5  # share of the bf16 peak
    elementwise: float = 0.8
    links: float = 0.8
    layer_seconds: float = 200e-6  # time to launch one layer's forward pass
    experts: float = 0.14  # share of the bf16 peak in the experts' small products, for any element type
    decode_seconds: float = 4e-3  # engine's host time per decoding step
    decode_collective_seconds: float = 12e-6  # a small all-reduce
    beyond: float = 0.55  # extra share: NeMo-RL's published steps take this beyond the phases (grading, stragglers, restarts)
    host_copy: float = 5e9  # bytes per second of a process that writes or reads shared memory
    host_adam: float = 20e9  # bytes per second of one rank's Adam in host memory
    reserved: int = 3 * GIB  # bytes of the CUDA context, NCCL's buffers and the libraries' workspaces
    fragmentation: float = 0.05  # memory lost to fragmentation, as a share of the memory that every pass allocates again
    engine_share: float = 0.92  # vLLM's default of --gpu-memory-utilization
    engine_sequences: int = 1024  # vLLM's default limit on a GPU of 80 GB
    engine_other: int = 4 * GIB  # activations and graphs of the engine, per GPU
    asleep: int = 4 * GIB  # bytes that a sleeping engine keeps on each GPU: context, libraries, CUDA graphs, NCCL
    graphs: int = 3 * GIB // 2  # part of `asleep` that vLLM's --sleep-mode-offload-cudagraph frees
    nccl: int = 1 * GIB  # part of `asleep` that vLLM's --enable-nccl-comm-suspend frees, with tp > 1
    uniform_groups: float = 0.4  # share of the groups that are entirely right or entirely wrong, which are dropped


ASSUMED = Assumptions(matmul={1: 0.64, 2: 0.72, 4: 0.72})
