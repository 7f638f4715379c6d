"""Predict bytes on a GPU by component, for every pipeline stage and each state of trainer and engine."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from tepo_megatron.config import Config, OptimizerConfig, ParallelConfig
from tepo_megatron.errors import ConfigError
from tepo_megatron.plan import activations, parameters
from tepo_megatron.plan.activations import Kernels, Recompute, SavedActivations
from tepo_megatron.plan.gpus import ASSUMED, GIB, GPUS_PER_NODE, Assumptions, Gpu
from tepo_megatron.plan.parameters import Held
from tepo_megatron.plan.placement import placement_of
from tepo_megatron.utils.host_sizes import arena_bytes
from tepo_megatron.weights.families import Family
from tepo_megatron.weights.ops import Architecture

ELEMENT: Mapping[str, int] = {"fp32": 4, "bf16": 2}
MOMENT: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp8": 1}
FP8_WORKSPACES = "FP8 copies of weights"
HOST_OPTIMIZER = 16  # bytes per element in Megatron's hybrid optimizer: fp32 master, gradient and two moments
MIB = 2**20
_OPTIMIZER = OptimizerConfig()


@dataclass(frozen=True)
class Model:
    """The trained model and its way of computing."""

    family: Family
    arch: Architecture
    element: int = 2  # bytes of a weight and of an activation
    recompute: Recompute = "none"  # `training.recompute`
    kernels: Kernels = field(default_factory=Kernels)


@dataclass(frozen=True)
class State:
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


def state_bytes(held: Held, precision: str, optimizer: OptimizerConfig = _OPTIMIZER) -> dict[str, float]:
    """Return the bytes of weights, gradients (fp32) and optimizer state of one rank on its device.

    bf16: fp32 master and two fp32 moments of the owned elements. fp32: the weights themselves are the masters. With smaller
    moments FusedAdam always keeps masters: for bf16 weights the 16 bits that these lack, for fp32 weights a copy.

    Args:
        held: Elements that the rank holds.
        precision: Type of the weights, fp32 or bf16.
        optimizer: Sets the moments' type and the offloaded share.
    """
    return {
        "weights": held.buffer * ELEMENT[precision],
        "gradients": held.buffer * 4,
        "optimizer": held.owned * sum(_kept_of_an_element(precision, optimizer)) * (1 - optimizer.offload),
    }


def _kept_of_an_element(precision: str, optimizer: OptimizerConfig) -> tuple[int, ...]:
    """Return the bytes per owned element of each optimizer tensor: the master, if any, and two moments."""
    moment = MOMENT[optimizer.moments]
    if optimizer.moments != "fp32":
        return (4 if precision == "fp32" else 2, moment, moment)
    return (moment, moment) if precision == "fp32" else (4, moment, moment)


def offload_bytes(held: Held, precision: str, optimizer: OptimizerConfig = _OPTIMIZER) -> int:
    """Return the host memory of one rank's weights and optimizer while the engine has its GPU (`actor/offload.py`).

    Args:
        held, precision, optimizer: As in `state_bytes`.
    """
    element = ELEMENT[precision]
    weights = arena_bytes([n * element for n in held.buffers])
    each = _kept_of_an_element(precision, optimizer)
    return weights + arena_bytes([n * size for n in held.shards for size in each])


def checkpoint_bytes(held: Held, precision: str) -> int:
    """Return the maximum bytes that one rank writes of a checkpoint: weight, master and both moments of each owned element.

    Weights that several ranks hold, such as norms, are written by only one of them.

    Args:
        held, precision: As in `state_bytes`.
    """
    return held.owned * (ELEMENT[precision] + sum(_kept_of_an_element(precision, _OPTIMIZER)))


def training(cfg: Config, model: Model, parallel: ParallelConfig, assumed: Assumptions = ASSUMED) -> State:
    """Return the memory of the fullest pipeline stage in the backward pass of an update with full microbatches.

    Args:
        cfg, model: The config, apart from its mesh, and its model.
        parallel: The mesh.
        assumed: Assumptions about the GPU.
    """
    found = [_stage(cfg, model, parallel, rank, assumed) for rank in range(parallel.pp)]
    return State("train", max(found, key=lambda parts: sum(parts.values())))


def _stage(cfg: Config, model: Model, parallel: ParallelConfig, rank: int, assumed: Assumptions) -> dict[str, float]:
    tokens = -(-cfg.training.max_tokens_per_microbatch // parallel.cp)
    held = parameters.held(model.family.rows, model.arch, parallel, rank)
    parts: dict[str, float] = dict(state_bytes(held, cfg.model.dtype, cfg.optimizer))
    parts["activations"] = kept(cfg, model, parallel, rank).device + _there_for_a_while(cfg, model, parallel, rank)
    if cfg.model.fp8:
        parts[FP8_WORKSPACES] = _fp8_workspaces(cfg, model, parallel, rank)
    parts["gradients in passing"] = _in_passing(model, parallel, tokens)
    if rank == parallel.pp - 1:
        parts["logits and entropy"] = sum(_output(cfg, model, parallel, tokens))
    passing_parts = ("activations", "gradients in passing", "logits and entropy")
    parts["fragmentation"] = assumed.fragmentation * sum(parts.get(name, 0) for name in passing_parts)
    parts["context, NCCL"] = assumed.reserved
    return parts


def _fp8_workspaces(cfg: Config, model: Model, parallel: ParallelConfig, rank: int) -> float:
    """Return the bytes of Transformer Engine's FP8 copies of the layers' linear weights: one copy and its transpose."""
    ends = cfg.model.bf16_end_layers
    linear = parameters.linear_parameters(model.family.rows, model.arch, parallel, rank, ends)
    scales = 2 * 4 / 128**2 if cfg.model.precision == "fp8-blockwise" else 0.0  # fp32 scale per block of 128 x 128 weights
    return linear * (2 + scales)


def kept(cfg: Config, model: Model, parallel: ParallelConfig, rank: int) -> SavedActivations:
    """Return the maximum bytes that a pipeline rank keeps for backward at once, with full microbatches.

    Of the output layer only the host copy is counted, because its tensors are on the device when backward begins.

    Args:
        cfg, model, parallel: As in `training`.
        rank: Pipeline rank.
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
    return SavedActivations(device, host)


def _there_for_a_while(cfg: Config, model: Model, parallel: ParallelConfig, rank: int) -> float:
    """Return the bytes of one layer's recomputed activations, and of offloaded ones in transfer during the next layer."""
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
    """Return the number of a rank's layers without experts (False) and with experts (True)."""
    layers = [layer for chunk in parameters.stages(arch, parallel, rank) for layer in chunk.layers]
    sparse = sum(layer in arch.sparse_layers for layer in layers)
    return {kind: count for kind, count in ((False, len(layers) - sparse), (True, sparse)) if count}


def _terms(cfg: Config, model: Model, parallel: ParallelConfig, sparse: bool, *, again: bool = False) -> list[activations.Term]:
    """Return the terms of a layer. `again`: all of them, including the recomputed ones."""
    recompute: Recompute = "none" if again else model.recompute
    return activations.kept_terms(model.arch, parallel, recompute, model.kernels, sparse=sparse, sequence=cfg.sequence_tokens)


def _output(cfg: Config, model: Model, parallel: ParallelConfig, tokens: int) -> tuple[float, float]:
    budget = cfg.training.logits_budget_mib
    return activations.output_bytes(model.arch, parallel, tokens, model.element, None if budget is None else budget * MIB)


def _in_passing(model: Model, parallel: ParallelConfig, tokens: int) -> float:
    """Return the bytes of backward's temporaries: the largest weight gradient before its fp32 sum, one block's gradients."""
    arch, tp = model.arch, parallel.tp
    largest = max(math.prod(parameters.shape(row, arch, tp)) for row in model.family.rows)
    ffn = arch.ffn_size if arch.experts is None else arch.experts.ffn_size * arch.experts.per_token
    return model.element * (largest + tokens * (3 * ffn / tp + 2 * arch.hidden_size))


def engine_weights(model: Model, tp: int, element: int) -> float:
    """Return the bytes of the engine's weights on each GPU. Norms are replicated, but small enough to count as split.

    Args:
        model: The model.
        tp, element: GPUs of the engine, and bytes of a weight.
    """
    return parameters.total_parameters(model.family.rows, model.arch) * element / tp


def kv_bytes(arch: Architecture, tp: int, element: int = 2) -> float:
    """Return the bytes of KV cache per token on each GPU of an engine. With more GPUs than KV heads, heads are replicated.

    Args:
        arch: Sizes of the model.
        tp, element: GPUs of the engine, and bytes of a cached number.
    """
    return 2 * arch.num_layers * max(1.0, arch.num_query_groups / tp) * arch.head_dim * element


def engine_share(cfg: Config, assumed: Assumptions = ASSUMED) -> float:
    """Return the share of a GPU's memory that the engine takes.

    Args:
        cfg: `rollout.server.extra_args` may set the share. Raises ConfigError if it is not a number.
        assumed: Gives the default.
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
    """Return the engine's part of a GPU: weights, working memory, and the rest of its share for the KV cache.

    Args:
        cfg, model: The config and its model.
        gpu, assumed: Datasheet values, and assumptions about the GPU.
    """
    tp = cfg.rollout.server.tp
    element = ELEMENT[cfg.rollout.server.precision or cfg.model.dtype]
    weights = engine_weights(model, tp, element)
    if cfg.rollout.server.kv_cache_gib is not None:
        cache = cfg.rollout.server.kv_cache_gib * GIB
    else:
        cache = max(0.0, engine_share(cfg, assumed) * gpu.memory - weights - assumed.engine_other)
    return State("generate", {"engine's weights": weights, "KV cache": cache, "engine's other": assumed.engine_other})


def states(cfg: Config, model: Model, gpu: Gpu, assumed: Assumptions = ASSUMED) -> list[State]:
    """Return all states that must fit, for cfg.parallel and the config's placement of trainer and engine.

    Args:
        cfg, model: The config and its model.
        gpu, assumed: Datasheet values, and assumptions about the GPU.
    """
    train, generate = training(cfg, model, cfg.parallel, assumed), generating(cfg, model, gpu, assumed)
    buckets = {"sync buckets": cfg.sync.bucket_mib * MIB * (2 if cfg.sync.transport == "group" else 1)}
    names = ("weights", "gradients", "optimizer", FP8_WORKSPACES, "context, NCCL")
    stays = {name: train.parts[name] for name in names if name in train.parts}
    kind = placement_of(cfg).kind
    if kind == "apart":
        return [train, State("sync", stays | buckets), generate]
    engine = {name: generate.parts[name] for name in ("engine's weights", "engine's other")}
    mine = {"weights": stays["weights"], "context, NCCL": stays["context, NCCL"]}
    return [
        State("train", {**train.parts, "sleeping engine": sleeping_bytes(cfg, assumed)}),
        State("sync", mine | engine | buckets),
        State("generate", {**generate.parts, "trainer's context, NCCL": assumed.reserved}),
    ]


def sleeping_bytes(cfg: Config, assumed: Assumptions = ASSUMED) -> int:
    """Return the bytes that a sleeping engine keeps on each GPU. vLLM always starts with --sleep-mode-offload-cudagraph.

    Args:
        cfg, assumed: The config, and assumptions about the engine.
    """
    size = assumed.asleep - (assumed.graphs if cfg.rollout.engine == "vllm" else 0)
    if "--enable-nccl-comm-suspend" in cfg.rollout.server.extra_args and cfg.rollout.server.tp > 1:
        size -= assumed.nccl
    return size


def host_bytes(cfg: Config, model: Model) -> dict[str, float]:
    """Return the host memory for copies of the ranks' state, by component, on the machine of ranks that needs most.

    All but the optimizer's share is page-locked. Its arenas and stacks have the sizes that `host_sizes` computes.

    Args:
        cfg, model: The config and its model.
    """
    tp, whole = cfg.parallel.tp, cfg.parallel.dp * cfg.parallel.cp
    ranks = [(rank // (tp * whole), rank // tp % whole) for rank in range(cfg.parallel.world_size)]
    of_ranks = {rank: _host_bytes_of(cfg, model, *rank) for rank in dict.fromkeys(ranks)}
    machines: list[dict[str, float]] = []
    for first in range(0, len(ranks), GPUS_PER_NODE):
        machine: dict[str, float] = defaultdict(float)
        for rank in ranks[first : first + GPUS_PER_NODE]:
            for name, size in of_ranks[rank].items():
                machine[name] += size
        machines.append(machine)
    parts = max(machines, key=lambda machine: sum(machine.values()))
    if cfg.sync.transport == "shm":
        # two rounds of files, and on CUDA the staging memory of one round
        rounds = 3 if cfg.platform == "cuda" else 2
        parts["weights on their way to the engine"] = rounds * cfg.sync.bucket_mib * MIB
    return parts


def _host_bytes_of(cfg: Config, model: Model, pp_rank: int, dp_cp_rank: int) -> dict[str, float]:
    held = parameters.held(model.family.rows, model.arch, cfg.parallel, pp_rank, dp_cp_rank)
    parts: dict[str, float] = {}
    if cfg.optimizer.offload:
        parts["optimizer's share of the host"] = held.owned * HOST_OPTIMIZER * cfg.optimizer.offload
    if cfg.training.offload_activations:
        in_flight = activations.microbatches_in_flight(cfg.parallel, pp_rank)
        of_each = kept(cfg, model, cfg.parallel, pp_rank).host / in_flight
        parts["activations that wait for backward"] = in_flight * arena_bytes([math.ceil(of_each)])
    if cfg.rollout.colocate:
        parts["weights and optimizer while the engine has the GPU"] = offload_bytes(held, cfg.model.dtype, cfg.optimizer)
    if cfg.checkpoint.every and cfg.checkpoint.asynchronous:
        parts["checkpoint that is being written"] = arena_bytes([checkpoint_bytes(held, cfg.model.dtype)])
    found = parameters.rank_parameters(model.family.rows, model.arch, cfg.parallel, pp_rank)
    weights = arena_bytes([p.elements * model.element for p in found])
    if cfg.objective.ref_beta:
        parts["reference policy"] = weights
    if cfg.rollout.max_staleness:
        parts["weights that may have sampled"] = (cfg.rollout.max_staleness + 1) * weights
    return parts
