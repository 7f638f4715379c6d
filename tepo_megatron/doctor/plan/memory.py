"""Predict bytes on a GPU by component, for every pipeline stage and each state of trainer and engine.

The engine's are its weights, its KV cache, and the memory that it keeps while it sleeps.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.base.hardware import Gpu, arena_bytes
from tepo_megatron.config import (
    AnyServerConfig,
    CheckpointConfig,
    Config,
    ModelConfig,
    ObjectiveConfig,
    ParallelConfig,
    RolloutConfig,
    ServerConfig,
    SyncConfig,
)
from tepo_megatron.config.megatron import OptimizerFields
from tepo_megatron.config.training import TrainingConfig
from tepo_megatron.doctor.plan import activations, parameters
from tepo_megatron.doctor.plan.activations import Recompute, SavedActivations
from tepo_megatron.doctor.plan.inputs import (
    ASSUMED,
    ELEMENT,
    GIB,
    GPUS_PER_NODE,
    Assumptions,
    MemoryState,
    PlannedModel,
    placement_of,
)
from tepo_megatron.doctor.plan.parameters import HeldElements, LayerKind, attention_layers, kinds_of
from tepo_megatron.models.ops import Architecture


def engine_weights(model: PlannedModel, tp: int, element: int) -> float:
    """Return the bytes of the engine's weights on each GPU. Norms are replicated, but small enough to count as split.

    Args:
        tp, element: GPUs of the engine, and bytes of a weight.
    """
    return parameters.total_parameters(model.family.rows, model.arch) * element / tp


def kv_bytes(arch: Architecture, tp: int, element: int = 2) -> float:
    """Return the bytes of KV cache per token on each GPU of an engine. With more GPUs than KV heads, heads are replicated.

    Layers with linear attention have none; see `parameters.sequence_state_bytes`.

    Args:
        tp, element: GPUs of the engine, and bytes of a cached number.
    """
    return 2 * attention_layers(arch) * max(1.0, arch.num_query_groups / tp) * arch.head_dim * element


def _extra_args(cfg: AnyServerConfig) -> list[str]:
    """Return the additional arguments of the engine; none are known of servers that others start."""
    return cfg.extra_args if isinstance(cfg, ServerConfig) else []


def engine_share(cfg: AnyServerConfig, assumed: Assumptions = ASSUMED) -> float:
    """Return the share of a GPU's memory that the engine takes."""
    words = [part for word in _extra_args(cfg) for part in word.split("=", 1)]
    for option in ("--gpu-memory-utilization", "--mem-fraction-static"):
        if option in words:
            value = [*words, ""][words.index(option) + 1]
            try:
                return float(value)
            except ValueError:
                raise ConfigError(f"rollout.server.extra_args: {option} {value!r} is no number") from None
    return assumed.engine_share


def generating(cfg: AnyServerConfig, dtype: str, model: PlannedModel, gpu: Gpu, assumed: Assumptions = ASSUMED) -> MemoryState:
    """Return the engine's part of a GPU: weights, working memory, and the rest of its share for the KV cache.

    Args:
        dtype: Type of the served weights where the section names none.
    """
    weights = engine_weights(model, cfg.tp, ELEMENT[cfg.precision or dtype])
    if isinstance(cfg, ServerConfig) and cfg.kv_cache_gib is not None:
        cache = cfg.kv_cache_gib * GIB
    else:
        cache = max(0.0, engine_share(cfg, assumed) * gpu.memory - weights - assumed.engine_other)
    return MemoryState("generate", {"engine's weights": weights, "KV cache": cache, "engine's other": assumed.engine_other})


def sleeping_bytes(cfg: RolloutConfig, assumed: Assumptions = ASSUMED) -> int:
    """Return the bytes that a sleeping engine keeps on each GPU. vLLM always starts with --sleep-mode-offload-cudagraph."""
    size = assumed.asleep - (assumed.graphs if cfg.engine == "vllm" else 0)
    if "--enable-nccl-comm-suspend" in _extra_args(cfg.server) and cfg.server.tp > 1:
        size -= assumed.nccl
    return size


MOMENT: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp8": 1}
FP8_WORKSPACES = "FP8 copies of weights"
TEACHER_ON_HOST = "teacher's hidden states of an update"
HOST_OPTIMIZER = 16  # bytes per element in Megatron's hybrid optimizer: fp32 master, gradient and two moments
MIB = 2**20
_ADAM = OptimizerFields()


def has_teacher(objective: ObjectiveConfig) -> bool:
    """Return whether an objective takes the KL over the whole vocabulary."""
    return (objective.ref_kl or {}).get("estimator") == "full"


def state_bytes(held: HeldElements, precision: str, adam: OptimizerFields = _ADAM) -> dict[str, float]:
    """Return the bytes of weights, gradients (fp32) and optimizer state of one rank on its device.

    bf16: fp32 master and two fp32 moments of the owned elements. fp32: the weights themselves are the masters. With smaller
    moments FusedAdam always keeps masters: for bf16 weights the 16 bits that these lack, for fp32 weights a copy.

    Args:
        precision: Type of the weights, fp32 or bf16.
    """
    return {
        "weights": held.buffer * ELEMENT[precision],
        "gradients": held.buffer * 4,
        "optimizer": held.owned * sum(_kept_of_an_element(precision, adam)) * (1 - adam.optimizer_offload_fraction),
    }


def _kept_of_an_element(precision: str, adam: OptimizerFields) -> tuple[int, ...]:
    """Return the bytes per owned element of each optimizer tensor: the master, if any, and two moments."""
    moments = (MOMENT[adam.exp_avg_dtype], MOMENT[adam.exp_avg_sq_dtype])
    if adam.small_moments:
        return (4 if precision == "fp32" else 2, *moments)
    return moments if precision == "fp32" else (4, *moments)


def offload_bytes(held: HeldElements, precision: str, adam: OptimizerFields = _ADAM) -> int:
    """Return the host memory of one rank's weights and optimizer while the engine has its GPU (`actor/offload.py`)."""
    weights = arena_bytes([n * ELEMENT[precision] for n in held.buffers])
    each = _kept_of_an_element(precision, adam)
    return weights + arena_bytes([n * size for n in held.shards for size in each])


def checkpoint_bytes(held: HeldElements, precision: str) -> int:
    """Return the maximum bytes that one rank writes of a checkpoint: weight, master and both moments of each owned element.

    Weights that several ranks hold, such as norms, are written by only one of them.
    """
    return held.owned * (ELEMENT[precision] + sum(_kept_of_an_element(precision, _ADAM)))


@dataclass(frozen=True)
class TrainerMemory:
    """The inputs for the memory of the trainer's ranks."""

    model: PlannedModel
    parallel: ParallelConfig
    training: TrainingConfig  # tokens of a microbatch, and offloading
    precision: ModelConfig  # types of the weights (`model.precision`)
    adam: OptimizerFields  # types of the moments, and the offloaded share
    bf16_layers: tuple[int, int]  # numbers of first and of last layers that stay in bf16 in an FP8 model
    sequence_tokens: int
    teacher: bool = False  # the loss has the exact KL to a teacher

    @classmethod
    def of(cls, cfg: Config, model: PlannedModel) -> "TrainerMemory":
        """Return the inputs for a config."""
        fields = cfg.megatron
        optimizer, ends = fields.known_optimizer, fields.bf16_layers
        exact = has_teacher(cfg.objective)
        return cls(model, cfg.parallel, cfg.training, cfg.model, optimizer, ends, cfg.sequence_tokens, exact)

    def state(self, assumed: Assumptions = ASSUMED) -> MemoryState:
        """Return the memory of the fullest pipeline stage in the backward pass of an update with full microbatches."""
        stages = [self._stage(rank, assumed) for rank in range(self.parallel.pp)]
        return MemoryState("train", max(stages, key=lambda parts: sum(parts.values())))

    def held(self, rank: int, dp_cp_rank: int = 0) -> HeldElements:
        """Return the elements that a rank holds."""
        return parameters.held(self.model.family.rows, self.model.arch, self.parallel, rank, dp_cp_rank)

    def kept(self, rank: int) -> SavedActivations:
        """Return the maximum bytes that a pipeline rank keeps for backward at once, with full microbatches.

        Of the output layer only the host copy is counted, because its tensors are on the device when backward begins.
        """
        model, parallel, offloaded = self.model, self.parallel, self.training.offload_activations
        in_flight = activations.microbatches_in_flight(parallel, rank)
        device = host = 0.0
        for kind, layers in _layers(model.arch, parallel, rank).items():
            one = activations.kept(self._terms(kind), model.element, self._tokens, offloaded=offloaded)
            device, host = device + layers * in_flight * one.device, host + layers * in_flight * one.host
        if rank == parallel.pp - 1:
            norm = activations.final_norm_terms(model.arch, parallel, model.kernels)
            one = activations.kept(norm, model.element, self._tokens, offloaded=offloaded)
            device, host = device + one.device, host + one.host
            host += self._output()[0] if offloaded else 0.0
        return SavedActivations(device, host)

    @property
    def _tokens(self) -> int:
        return -(-self.training.max_tokens_per_microbatch // self.parallel.cp)

    def _stage(self, rank: int, assumed: Assumptions) -> dict[str, float]:
        parts: dict[str, float] = dict(state_bytes(self.held(rank), self.precision.dtype, self.adam))
        parts["activations"] = self.kept(rank).device + self._there_for_a_while(rank)
        if self.precision.fp8:
            parts[FP8_WORKSPACES] = self._fp8_workspaces(rank)
        parts["gradients in passing"] = _in_passing(self.model, self.parallel, self._tokens)
        if rank == self.parallel.pp - 1:
            parts["logits and entropy"] = sum(self._output())
            if self.teacher:
                vocabulary = -(-self.model.arch.vocab_size // self.parallel.tp)  # the teacher's output layer, and hidden states
                parts["teacher"] = (vocabulary + self._tokens) * self.model.arch.hidden_size * self.model.element
        passing_parts = ("activations", "gradients in passing", "logits and entropy")
        parts["fragmentation"] = assumed.fragmentation * sum(parts.get(name, 0) for name in passing_parts)
        parts["context, NCCL"] = assumed.reserved
        return parts

    def _fp8_workspaces(self, rank: int) -> float:
        """Return the bytes of Transformer Engine's FP8 copies of the layers' linear weights: one copy and its transpose."""
        linear = parameters.linear_parameters(self.model.family.rows, self.model.arch, self.parallel, rank, self.bf16_layers)
        scales = (
            2 * 4 / 128**2 if self.precision.precision == "fp8-blockwise" else 0.0
        )  # fp32 scale per block of 128 x 128 weights
        return linear * (2 + scales)

    def _there_for_a_while(self, rank: int) -> float:
        """Return the bytes of one layer's recomputed activations, and of offloaded ones in transfer during the next layer."""
        model, tokens, most = self.model, self._tokens, 0.0
        for kind in _layers(model.arch, self.parallel, rank):
            terms = self._terms(kind)
            mine = activations.kept(terms, model.element, tokens).device
            every = activations.kept(self._terms(kind, again=True), model.element, tokens).device
            again = every if model.recompute == "full" else every - mine
            stays = activations.kept(terms, model.element, tokens, offloaded=self.training.offload_activations).device
            most = max(most, again + 2 * (mine - stays))
        return most

    def _terms(self, kind: LayerKind, *, again: bool = False) -> list[activations.ActivationTerm]:
        """Return the terms of a layer. `again`: all of them, including the recomputed ones."""
        model = self.model
        recompute: Recompute = "none" if again else model.recompute
        return activations.kept_terms(
            model.arch, self.parallel, recompute, model.kernels, kind=kind, sequence=self.sequence_tokens
        )

    def _output(self) -> tuple[float, float]:
        budget, model = self.training.logits_budget_mib, self.model
        budget_bytes = None if budget is None else budget * MIB
        return activations.output_bytes(model.arch, self.parallel, self._tokens, model.element, budget_bytes)


def _layers(arch: Architecture, parallel: ParallelConfig, rank: int) -> Mapping[LayerKind, int]:
    return kinds_of(arch, [layer for chunk in parameters.stages(arch, parallel, rank) for layer in chunk.layers])


def _in_passing(model: PlannedModel, parallel: ParallelConfig, tokens: int) -> float:
    """Return the bytes of backward's temporaries: the largest weight gradient before its fp32 sum, one block's gradients."""
    arch, tp = model.arch, parallel.tp
    largest = max(math.prod(parameters.shape(row, arch, tp)) for row in model.family.rows)
    ffn = arch.ffn_size if arch.experts is None else arch.experts.ffn_size * arch.experts.per_token
    return model.element * (largest + tokens * (3 * ffn / tp + 2 * arch.hidden_size))


def states(
    trainer: TrainerMemory, rollout: RolloutConfig, sync: SyncConfig, gpu: Gpu, assumed: Assumptions = ASSUMED
) -> list[MemoryState]:
    """Return all states that must fit, for the mesh and for the placement of trainer and engine."""
    train = trainer.state(assumed)
    generate = generating(rollout.server, trainer.precision.dtype, trainer.model, gpu, assumed)
    buckets = {"sync buckets": sync.bucket_mib * MIB * (2 if sync.transport.type == "group" else 1)}
    names = ("weights", "gradients", "optimizer", FP8_WORKSPACES, "context, NCCL")
    stays = {name: train.parts[name] for name in names if name in train.parts}
    if placement_of(trainer.parallel.world_size, rollout).kind == "disaggregated":
        return [train, MemoryState("sync", stays | buckets), generate]
    engine = {name: generate.parts[name] for name in ("engine's weights", "engine's other")}
    mine = {"weights": stays["weights"], "context, NCCL": stays["context, NCCL"]}
    return [
        MemoryState("train", {**train.parts, "sleeping engine": sleeping_bytes(rollout, assumed)}),
        MemoryState("sync", mine | engine | buckets),
        MemoryState("generate", {**generate.parts, "trainer's context, NCCL": assumed.reserved}),
    ]


def host_bytes(cfg: Config, model: PlannedModel, response: int | None = None) -> dict[str, float]:
    """Return the host memory for copies of the ranks' state, by component, on the machine of ranks that needs most.

    All but the optimizer's share is page-locked. Its arenas and stacks have the sizes that `base/hardware.py` computes.

    Args:
        response: Mean tokens of a response. None: rollout.max_response_tokens.
    """
    tp, whole = cfg.parallel.tp, cfg.parallel.dp * cfg.parallel.cp
    ranks = [(rank // (tp * whole), rank // tp % whole) for rank in range(cfg.parallel.world_size)]
    trainer, reference = TrainerMemory.of(cfg, model), cfg.objective.ref_kl is not None
    of_ranks = {rank: _host_bytes_of(trainer, cfg.rollout, cfg.checkpoint, reference, *rank) for rank in dict.fromkeys(ranks)}
    if trainer.teacher:
        sequences = cfg.training.minibatch_prompts * cfg.rollout.samples_per_prompt
        rows = sequences * (response or cfg.rollout.max_response_tokens)
        size = rows / cfg.parallel.dp / cfg.parallel.cp * model.arch.hidden_size * model.element
        for pp_rank, dp_cp_rank in of_ranks:
            if pp_rank == cfg.parallel.pp - 1:
                of_ranks[pp_rank, dp_cp_rank][TEACHER_ON_HOST] = size
    machines: list[dict[str, float]] = []
    for first in range(0, len(ranks), GPUS_PER_NODE):
        machine: dict[str, float] = defaultdict(float)
        for rank in ranks[first : first + GPUS_PER_NODE]:
            for name, size in of_ranks[rank].items():
                machine[name] += size
        machines.append(machine)
    parts = max(machines, key=lambda machine: sum(machine.values()))
    if cfg.sync.transport.type == "shm":
        # two rounds of files, and on CUDA the staging memory of one round
        rounds = 3 if cfg.platform == "cuda" else 2
        parts["weights on their way to the engine"] = rounds * cfg.sync.bucket_mib * MIB
    return parts


def _host_bytes_of(
    trainer: TrainerMemory, rollout: RolloutConfig, checkpoint: CheckpointConfig, reference: bool, pp_rank: int, dp_cp_rank: int
) -> dict[str, float]:
    model, parallel, adam, dtype = trainer.model, trainer.parallel, trainer.adam, trainer.precision.dtype
    held = trainer.held(pp_rank, dp_cp_rank)
    parts: dict[str, float] = {}
    if adam.optimizer_offload_fraction:
        parts["optimizer's share of the host"] = held.owned * HOST_OPTIMIZER * adam.optimizer_offload_fraction
    if trainer.training.offload_activations:
        in_flight = activations.microbatches_in_flight(parallel, pp_rank)
        of_each = trainer.kept(pp_rank).host / in_flight
        parts["activations that wait for backward"] = in_flight * arena_bytes([math.ceil(of_each)])
    if rollout.colocate:
        parts["weights and optimizer while the engine has the GPU"] = offload_bytes(held, dtype, adam)
    if checkpoint.every and checkpoint.asynchronous:
        parts["checkpoint that is being written"] = arena_bytes([checkpoint_bytes(held, dtype)])
    shards = parameters.rank_parameters(model.family.rows, model.arch, parallel, pp_rank)
    weights = arena_bytes([p.elements * model.element for p in shards])
    if reference:
        parts["reference policy"] = weights
    if rollout.max_staleness or trainer.training.streams:
        parts["weights that may have sampled"] = (rollout.max_staleness + 1) * weights
    return parts
