"""Bytes on a GPU by component, for every pipeline stage, in each state of trainer and engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tepo_megatron.config import Config, OptimizerConfig, ParallelConfig
from tepo_megatron.errors import ConfigError
from tepo_megatron.plan import activations, parameters
from tepo_megatron.plan.activations import Kept, Kernels, Recompute
from tepo_megatron.plan.gpus import ASSUMED, GIB, Assumptions, Gpu
from tepo_megatron.plan.parameters import Held
from tepo_megatron.plan.placement import placement_of
from tepo_megatron.weights.families import Family
from tepo_megatron.weights.ops import Architecture

ELEMENT: Mapping[str, int] = {"fp32": 4, "bf16": 2}
MOMENT: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp8": 1}
HOST_OPTIMIZER = 16  # of an element that Megatron's hybrid optimizer steps there: master, gradient and two moments in fp32
MIB = 2**20
_OPTIMIZER = OptimizerConfig()


@dataclass(frozen=True)
class Model:
    """What is trained, and how it computes. element: bytes of a weight and of an activation."""

    family: Family
    arch: Architecture
    element: int = 2
    recompute: Recompute = "none"
    kernels: Kernels = field(default_factory=Kernels)


@dataclass(frozen=True)
class State:
    """What one GPU holds at the fullest moment of a state. name: train, sync or generate; parts: component -> bytes."""

    name: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        """The component with most bytes."""
        return max(self.parts, key=lambda part: self.parts[part])


def state_bytes(held: Held, precision: str, optimizer: OptimizerConfig = _OPTIMIZER) -> dict[str, float]:
    """Weights, gradients (fp32) and the optimizer's state of one rank, on its device.

    bf16: a master and two moments in fp32 of what the rank owns. fp32: the masters are the weights themselves. With smaller
    moments FusedAdam keeps the masters: of bf16 weights the 16 bits that these lack, of fp32 ones a copy.
    """
    element, moments = ELEMENT[precision], 2 * MOMENT[optimizer.moments]
    master = 4 if element < 4 else 0
    if optimizer.moments != "fp32":
        master = 4 if element == 4 else 2
    return {
        "weights": held.buffer * element,
        "gradients": held.buffer * 4,
        "optimizer": held.owned * (master + moments) * (1 - optimizer.offload),
    }


def training(cfg: Config, model: Model, parallel: ParallelConfig, assumed: Assumptions = ASSUMED) -> State:
    """Of the pipeline stage that needs most, in the backward pass of an update with full microbatches."""
    found = [_stage(cfg, model, parallel, rank, assumed) for rank in range(parallel.pp)]
    return State("train", max(found, key=lambda parts: sum(parts.values())))


def _stage(cfg: Config, model: Model, parallel: ParallelConfig, rank: int, assumed: Assumptions) -> dict[str, float]:
    tokens = -(-cfg.training.max_tokens_per_microbatch // parallel.cp)
    held = parameters.held(model.family.rows, model.arch, parallel, rank)
    parts: dict[str, float] = dict(state_bytes(held, cfg.model.dtype, cfg.optimizer))
    parts["activations"] = kept(cfg, model, parallel, rank).device + _there_for_a_while(cfg, model, parallel, rank)
    parts["gradients in passing"] = _in_passing(model, parallel, tokens)
    if rank == parallel.pp - 1:
        parts["logits and entropy"] = sum(_output(cfg, model, parallel, tokens))
    passing_parts = ("activations", "gradients in passing", "logits and entropy")
    parts["fragmentation"] = assumed.fragmentation * sum(parts.get(name, 0) for name in passing_parts)
    parts["context, NCCL"] = assumed.reserved
    return parts


def kept(cfg: Config, model: Model, parallel: ParallelConfig, rank: int) -> Kept:
    """What pipeline rank `rank` keeps for backward, of full microbatches, at most at once; of the output layer only the copy in
    host memory, since its tensors are on the device when backward begins.
    """
    arch, element, offloaded = model.arch, model.element, cfg.training.offload_activations
    tokens = -(-cfg.training.max_tokens_per_microbatch // parallel.cp)
    in_flight = activations.microbatches_in_flight(parallel, rank)
    device = host = 0.0
    for sparse, layers in _layers(arch, parallel, rank).items():
        one = activations.kept(_terms(cfg, model, parallel, sparse), element, tokens, offloaded=offloaded)
        device, host = device + layers * in_flight * one.device, host + layers * in_flight * one.host
    if rank == parallel.pp - 1:
        norm = activations.final_norm_terms(arch, parallel, model.kernels)
        one = activations.kept(norm, element, tokens, offloaded=offloaded)
        device, host = device + one.device, host + one.host
        host += _output(cfg, model, parallel, tokens)[0] if offloaded else 0.0
    return Kept(device, host)


def _there_for_a_while(cfg: Config, model: Model, parallel: ParallelConfig, rank: int) -> float:
    """Bytes of activations of one layer that are not kept, or not there: those that backward computes again, and what is being
    copied to the host or back while the next layer computes.
    """
    tokens = -(-cfg.training.max_tokens_per_microbatch // parallel.cp)
    most = 0.0
    for sparse in _layers(model.arch, parallel, rank):
        terms = _terms(cfg, model, parallel, sparse)
        mine = activations.kept(terms, model.element, tokens).device
        every = activations.kept(_terms(cfg, model, parallel, sparse, again=True), model.element, tokens).device
        again = every if model.recompute == "full" else every - mine
        stays = activations.kept(terms, model.element, tokens, offloaded=cfg.training.offload_activations).device
        most = max(most, again + 2 * (mine - stays))
    return most


def _layers(arch: Architecture, parallel: ParallelConfig, rank: int) -> dict[bool, int]:
    """How many of a rank's layers have experts, and how many have not."""
    layers = [layer for chunk in parameters.stages(arch, parallel, rank) for layer in chunk.layers]
    sparse = sum(layer in arch.sparse_layers for layer in layers)
    return {kind: count for kind, count in ((False, len(layers) - sparse), (True, sparse)) if count}


def _terms(cfg: Config, model: Model, parallel: ParallelConfig, sparse: bool, *, again: bool = False) -> list[activations.Term]:
    """Of a layer. again: all of them, though they are computed again."""
    recompute: Recompute = "none" if again else model.recompute
    return activations.kept_terms(model.arch, parallel, recompute, model.kernels, sparse=sparse, sequence=cfg.sequence_tokens)


def _output(cfg: Config, model: Model, parallel: ParallelConfig, tokens: int) -> tuple[float, float]:
    budget = cfg.training.logits_budget_mib
    return activations.output_bytes(model.arch, parallel, tokens, model.element, None if budget is None else budget * MIB)


def _in_passing(model: Model, parallel: ParallelConfig, tokens: int) -> float:
    """In backward: the largest weight gradient before it is added in fp32, and gradients of one feed-forward block."""
    arch, tp = model.arch, parallel.tp
    largest = max(math.prod(parameters.shape(row, arch, tp)) for row in model.family.rows)
    ffn = arch.ffn_size if arch.experts is None else arch.experts.ffn_size * arch.experts.per_token
    return model.element * (largest + tokens * (3 * ffn / tp + 2 * arch.hidden_size))


def engine_weights(model: Model, tp: int, element: int) -> float:
    """On each of `tp` GPUs; norms, which every one has, are small enough to count as split."""
    return parameters.total_parameters(model.family.rows, model.arch) * element / tp


def kv_bytes(arch: Architecture, tp: int, element: int = 2) -> float:
    """Of one token on each of `tp` GPUs of an engine; with more GPUs than heads these are repeated."""
    return 2 * arch.num_layers * max(1.0, arch.num_query_groups / tp) * arch.head_dim * element


def engine_share(cfg: Config, assumed: Assumptions = ASSUMED) -> float:
    """Of a GPU's memory that the engine takes: as `rollout.server.extra_args` says, else its default.

    Raises ConfigError for one that is no number.
    """
    words = [part for word in cfg.rollout.server.extra_args for part in word.split("=", 1)]
    for option in ("--gpu-memory-utilization", "--mem-fraction-static"):
        if option in words:
            value = [*words, ""][words.index(option) + 1]
            try:
                return float(value)
            except ValueError:
                raise ConfigError(f"rollout.server.extra_args: {option} {value!r} is no number") from None
    return assumed.engine_share


def generating(cfg: Config, model: Model, gpu: Gpu, assumed: Assumptions = ASSUMED) -> State:
    """The engine's part of a GPU: weights, what it computes with, and the rest of its share for the KV cache."""
    tp = cfg.rollout.server.tp
    element = ELEMENT[cfg.rollout.server.precision or cfg.model.dtype]
    weights = engine_weights(model, tp, element)
    if cfg.rollout.server.kv_cache_gib is not None:
        cache = cfg.rollout.server.kv_cache_gib * GIB
    else:
        cache = max(0.0, engine_share(cfg, assumed) * gpu.memory - weights - assumed.engine_other)
    return State("generate", {"engine's weights": weights, "KV cache": cache, "engine's other": assumed.engine_other})


def states(cfg: Config, model: Model, gpu: Gpu, assumed: Assumptions = ASSUMED) -> list[State]:
    """All states that must fit, for cfg.parallel, as the config places trainer and engine."""
    train, generate = training(cfg, model, cfg.parallel, assumed), generating(cfg, model, gpu, assumed)
    buckets = {"sync buckets": cfg.sync.bucket_mib * MIB * (2 if cfg.sync.transport == "group" else 1)}
    stays = {name: train.parts[name] for name in ("weights", "gradients", "optimizer", "context, NCCL")}
    kind = placement_of(cfg).kind
    if kind == "apart":
        return [train, State("sync", stays | buckets), generate]
    engine = {name: generate.parts[name] for name in ("engine's weights", "engine's other")}
    mine = {"weights": stays["weights"], "context, NCCL": stays["context, NCCL"]}
    return [
        State("train", {**train.parts, "engine's context": assumed.reserved / 2}),
        State("sync", mine | engine | buckets),
        State("generate", {**generate.parts, "trainer's context, NCCL": assumed.reserved}),
    ]


def host_bytes(cfg: Config, model: Model, gpu_count: int) -> dict[str, float]:
    """Host memory that copies of one rank's state take, times the ranks of a machine (`gpu_count`)."""
    held = parameters.held(model.family.rows, model.arch, cfg.parallel, 0)
    state = state_bytes(held, cfg.model.dtype, cfg.optimizer)
    parts: dict[str, float] = {}
    if cfg.optimizer.offload:
        parts["optimizer's share of the host"] = held.owned * HOST_OPTIMIZER * cfg.optimizer.offload
    if cfg.training.offload_activations:
        stages = range(cfg.parallel.pp)
        parts["activations that wait for backward"] = max(kept(cfg, model, cfg.parallel, rank).host for rank in stages)
    if cfg.rollout.colocate:
        parts["weights and optimizer while the engine has the GPU"] = state["weights"] + state["optimizer"]
    if cfg.checkpoint.every and cfg.checkpoint.asynchronous:
        parts["checkpoint that is being written"] = held.owned * 12
    if cfg.objective.ref_beta:
        parts["reference policy"] = held.parameters * model.element
    parts = {name: size * gpu_count for name, size in parts.items()}
    if cfg.sync.transport == "shm":
        parts["weights on their way to the engine"] = 2 * cfg.sync.bucket_mib * MIB
    return parts
