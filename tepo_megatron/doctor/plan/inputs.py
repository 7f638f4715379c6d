"""Data objects and assumptions of a prediction: the model, the GPUs of trainer and engine, a step, and the memory of a state.

Assumed are the share of the GPUs' datasheet values that is reached, and the lengths of a step's sequences, which no config
determines. This project measured none of these numbers. docs/plan.md names the sources, and reports how far predictions with
these numbers are from what others measured. Where the GPUs are: `docs/launch.md`, "Where ranks and servers are".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist
from typing import Literal

from tepo_megatron.config import DYNAMIC_SAMPLING_ROUNDS, Config, ObjectiveConfig, RolloutConfig
from tepo_megatron.doctor.plan.activations import PlannedKernels, Recompute
from tepo_megatron.models.families import Family
from tepo_megatron.models.ops import Architecture

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


ELEMENT: Mapping[str, int] = {"fp32": 4, "bf16": 2}  # bytes


@dataclass(frozen=True)
class PlannedModel:
    """The trained model and its way of computing."""

    family: Family
    arch: Architecture
    element: int = 2  # bytes of a weight and of an activation
    recompute: Recompute = "none"  # `training.recompute`
    kernels: PlannedKernels = field(default_factory=PlannedKernels)


@dataclass(frozen=True)
class MemoryState:
    """Memory of one GPU at the fullest moment of a state."""

    name: str  # train, sync or generate
    parts: Mapping[str, float]  # component -> bytes

    @property
    def total(self) -> float:
        """Return the bytes of all components."""
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        """Return the component with the most bytes."""
        return max(self.parts, key=lambda part: self.parts[part])


Kind = Literal["colocated", "disaggregated"]


@dataclass(frozen=True)
class Placement:
    """The GPUs of trainer and engine."""

    kind: Kind  # "colocated" (rollout.colocate), or "disaggregated": the engine has GPUs of its own.
    trainer: int
    engine: int
    here: bool  # true if the run's first rank starts the servers

    @property
    def gpus(self) -> int:
        """Return the GPUs of both together."""
        return self.trainer + self.engine if self.kind == "disaggregated" else max(self.trainer, self.engine)

    @property
    def machines(self) -> int:
        """Return the number of machines, with eight GPUs each."""
        return -(-self.gpus // GPUS_PER_NODE)

    @property
    def fault(self) -> str:
        """Return why the servers cannot be placed as configured; empty if they can."""
        if self.here and self.trainer > GPUS_PER_NODE:
            return (
                f"the run starts its servers on the first of {-(-self.trainer // GPUS_PER_NODE)} machines of ranks; set "
                "rollout.server.rendezvous, with which they are on each of them (rollout.colocate=true), or with "
                "sync.transport.folder on machines of their own (false)"
            )
        if self.here and self.gpus > GPUS_PER_NODE:
            return (
                f"{self.gpus} GPUs of ranks and servers do not fit one machine; lower rollout.servers or rollout.server.tp, or "
                "set rollout.server.rendezvous, which gives servers machines of their own"
            )
        return ""


def placement_of(ranks: int, rollout: RolloutConfig) -> Placement:
    """Return the placement of a run."""
    server = rollout.server
    engine = 0 if rollout.replay is not None else rollout.servers * server.tp
    kind: Kind = "colocated" if rollout.colocate else "disaggregated"
    return Placement(kind, ranks, engine, here=engine > 0 and not server.others)


_SIGMA = 0.7  # standard deviation of the logarithm of a response's length
_PROMPT_SHARE, _RESPONSE_SHARE = 1 / 8, 1 / 4  # share of the maximum that the config allows


@dataclass(frozen=True)
class Workload:
    """Lengths of a step's prompts and responses."""

    prompt: int
    response: int
    longest: int  # maximum tokens of a response; truncated responses have this length
    dropped: float = 0.0  # share of the groups that are entirely right or entirely wrong, which are not learned from

    @classmethod
    def of(cls, cfg: Config, prompt: int | None = None, response: int | None = None, dropped: float | None = None) -> Workload:
        """Return the workload of a config.

        Args:
            prompt: Tokens of every prompt. None: an eighth of data.max_prompt_tokens.
            response: Mean tokens of a response. None: a quarter of the longest response.
            dropped: Share of dropped groups, if `rollout.filter_uniform_groups` drops any. None: `Assumptions.uniform_groups`.
        """
        longest = min(cfg.sequence_tokens - (prompt or 0), cfg.rollout.max_response_tokens)
        prompt = prompt or max(1, round(cfg.data.max_prompt_tokens * _PROMPT_SHARE))
        response = response or max(1, round(longest * _RESPONSE_SHARE))
        dropped = ASSUMED.uniform_groups if dropped is None else dropped
        share = dropped if cfg.rollout.filter_uniform_groups else 0.0
        return cls(min(prompt, cfg.data.max_prompt_tokens), min(response, longest), longest, share)

    def rounds(self, rollout: RolloutConfig, objective: ObjectiveConfig) -> tuple[list[int], int]:
        """Return the number of prompts in each sampling round of a step, and the number of groups that are learned from.

        Each round samples for the missing groups, and `rollout.max_generation_rounds` limits the rounds.
        """
        wanted = rollout.prompts_per_step
        asked: list[int] = []
        kept = 0
        while kept < wanted and len(asked) < max_generation_rounds(rollout, objective):
            asked.append(math.ceil((wanted - kept) * rollout.oversample))
            kept = min(wanted, kept + max(1, round(asked[-1] * (1 - self.dropped))))
        return asked, kept

    def responses(self, count: int) -> tuple[int, ...]:
        """Return the lengths of `count` responses: quantiles of a lognormal distribution truncated at `longest`."""
        return _quantiles(self.response, self.longest, count)

    def sequences(self, count: int) -> list[int]:
        """Return the lengths of `count` sequences with their prompts, in an order that mixes long and short ones."""
        lengths = self.responses(count)
        step = next(n for n in range(max(1, int(count * 0.618)), count + 1) if math.gcd(n, count) == 1)
        return [self.prompt + lengths[i * step % count] for i in range(count)]


def max_generation_rounds(rollout: RolloutConfig, objective: ObjectiveConfig) -> int:
    """Return `rollout.max_generation_rounds`, resolved like in `method.resolve`, which needs torch."""
    if rollout.max_generation_rounds is not None:
        return rollout.max_generation_rounds
    return DYNAMIC_SAMPLING_ROUNDS if objective.name == "dapo" else 1


@lru_cache(maxsize=64)
def _quantiles(mean: int, longest: int, count: int) -> tuple[int, ...]:
    normal = NormalDist()
    shape = [math.exp(_SIGMA * normal.inv_cdf((i + 0.5) / count)) for i in range(count)]
    low, high = 0.0, longest / min(shape)
    for _ in range(50):  # bisection for the scale at which the truncated lengths have this mean
        scale = (low + high) / 2
        if sum(min(longest, scale * x) for x in shape) / count < mean:
            low = scale
        else:
            high = scale
    return tuple(max(1, round(min(longest, high * x))) for x in shape)
