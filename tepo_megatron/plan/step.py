"""Predict the seconds of a training step by phase, and its throughput."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tepo_megatron.actor.layout import stage_layers
from tepo_megatron.config import Config
from tepo_megatron.ops.alignment import Alignment
from tepo_megatron.ops.pipeline_time import Pipeline
from tepo_megatron.ops.planning import plan_metrics, plan_microbatches
from tepo_megatron.ops.shared_prompts import pieces_of
from tepo_megatron.plan import parameters
from tepo_megatron.plan.activations import microbatches_in_flight
from tepo_megatron.plan.compute import Cost, MachineModel, forward_output, stage_seconds
from tepo_megatron.plan.engine_memory import generating
from tepo_megatron.plan.generation import EngineModel
from tepo_megatron.plan.gpus import GPUS_PER_NODE
from tepo_megatron.plan.judges import JudgeLoad, judge_loads
from tepo_megatron.plan.memory import TrainerMemory, state_bytes
from tepo_megatron.plan.memory_parts import ELEMENT, PlannedModel
from tepo_megatron.plan.placement import Placement, placement_of
from tepo_megatron.plan.teacher import has_teacher
from tepo_megatron.plan.workload import Workload, prefix_groups_of

_LAUNCHED_AGAIN = {"none": 0.0, "selective": 0.5, "full": 1.0}  # share of a layer's forward pass
REFILLS, VERDICTS = "sample again, for what was dropped", "verdicts of judges, after the responses"  # names of phases
_OPTIMIZER_BYTES = 34  # per owned element: reads gradient, master and two moments; writes these and the weight


@dataclass(frozen=True)
class PassPrediction:
    """All microbatches of one pass.

    Attributes:
        seconds: Time of the pass.
        cost: Time of products, moves and links alone.
        packing: Metrics of the run's own microbatch planner.
    """

    seconds: float
    cost: Cost
    packing: Mapping[str, float]


@dataclass(frozen=True)
class StepPrediction:
    """A predicted training step.

    Attributes:
        phases: Seconds by name.
        update: Forward and backward of one update.
        tokens: Tokens of prompts and responses that the step learns from.
        gpus: GPUs of trainer, engine and judges.
        hidden: Share of the trainer's phases that run while the engine samples.
        beyond: Share of the phases' time that steps take in addition.
    """

    phases: Mapping[str, float]
    update: PassPrediction
    tokens: int
    gpus: int
    hidden: float
    beyond: float

    @property
    def seconds(self) -> float:
        """Return the time from one step to the next. `beyond` is a share of the time without refills, as in published steps."""
        return self.modelled + self.beyond * self._modelled(self.phases["sample"] + self.phases[VERDICTS])

    @property
    def modelled(self) -> float:
        """Return the seconds of the phases, counting concurrent ones once."""
        return self._modelled(self.phases["sample"] + self.phases[REFILLS] + self.phases[VERDICTS])

    def _modelled(self, sample: float) -> float:
        sync = self.phases["send weights"]
        rest = sum(self.phases.values()) - sync - sum(self.phases[name] for name in ("sample", REFILLS, VERDICTS))
        return sync + max(sample, self.hidden * rest) + (1 - self.hidden) * rest

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens of prompts and responses that a step learns from, per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class PhaseFactors:
    """Ratios of the phases of a recorded step to their predictions (`calibration.py`).

    Attributes:
        factors: Measured over predicted seconds, by phase of the plan; 1 for those that are not there.
        beyond: Share of the phases' time that the step took in addition; below 0 where phases ran at once.
    """

    factors: Mapping[str, float]
    beyond: float


@dataclass(frozen=True)
class Predictor:
    """Predictor of the steps of one config on one kind of GPU.

    Attributes:
        measured: Correction by a recorded run. None: the assumptions alone.
        known: Cached results, which stay valid under `replace` with another config.
    """

    cfg: Config
    model: PlannedModel
    machine: MachineModel
    workload: Workload
    measured: PhaseFactors | None = None
    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def placement(self) -> Placement:
        """Return the GPUs of trainer and engine."""
        return placement_of(self.cfg.parallel.world_size, self.cfg.rollout)

    def run(self, sequences: Sequence[int], max_tokens: int, *, backward: bool) -> PassPrediction:
        """Return one pass. All sequences have the mean prompt, which the sequences of a group share."""
        key = (self.cfg.parallel, len(sequences), max_tokens, backward)
        if key not in self.known:
            self.known[key] = self._run(sequences, max_tokens, backward)
        return self.known[key]

    def _run(self, sequences: Sequence[int], max_tokens: int, backward: bool) -> PassPrediction:
        parallel = self.cfg.parallel
        alignment = Alignment(parallel.cp, parallel.tp if parallel.sequence_parallel else 1)
        pipeline = Pipeline(parallel.pp, parallel.vpp)
        multiple = parallel.pp if parallel.vpp > 1 else 1
        cfg, samples = self.cfg, self.cfg.rollout.samples_per_prompt
        prefix_groups = prefix_groups_of(cfg.training, cfg.platform, samples, self.workload.prompt, len(sequences), alignment)
        plan = plan_microbatches(
            sequences, parallel.dp, max_tokens, alignment, multiple, pipeline=pipeline, prefix_groups=prefix_groups
        )
        packing = plan_metrics(plan, sequences, alignment, pipeline, prefix_groups=prefix_groups)
        tokens = packing["packing/computed_tokens"] / parallel.dp
        pieces = [piece for rank in plan for m in rank for piece in pieces_of(m, sequences, prefix_groups)]
        squares = sum(piece.stop**2 - piece.start**2 for piece in pieces) / parallel.dp
        rows = (sum(sequences) - len(sequences) * self.workload.prompt) / parallel.dp
        fused = self.cfg.training.logits_budget_mib is not None
        cost = stage_seconds(self.model, parallel, self.machine, tokens, squares, rows, backward=backward, fused_output=fused)
        if backward:
            cost += Cost(links=self._offload_seconds(tokens))
        waiting = packing["packing/balance"] * (1 - packing["packing/bubble_share"])
        count = packing["packing/microbatches"] + pipeline.bubble
        launches = 3 + _LAUNCHED_AGAIN[self.model.recompute] if backward else 1
        layers = max(stage_layers(self.model.arch.num_layers, parallel.pp))
        host = count * layers * launches * self.machine.assumed.layer_seconds
        return PassPrediction(max(cost.total / waiting, host), cost, packing)

    def _offload_seconds(self, tokens: float) -> float:
        """Return the seconds to move the activations of `tokens` tokens to the host and back."""
        cfg, parallel = self.cfg, self.cfg.parallel
        if not cfg.training.offload_activations:
            return 0.0
        trainer = TrainerMemory.of(cfg, self.model)
        of_a_microbatch = max(trainer.kept(rank).host / microbatches_in_flight(parallel, rank) for rank in range(parallel.pp))
        return 2 * of_a_microbatch * tokens / cfg.training.max_tokens_per_microbatch / self.host_rate

    @property
    def host_rate(self) -> float:
        """Return the bytes per second between a GPU and its host, in one direction."""
        return self.machine.gpu.host * self.machine.assumed.links

    def step(self) -> StepPrediction:
        """Return a whole training step."""
        cfg, work = self.cfg, self.workload
        training, rollout = cfg.training, cfg.rollout
        groups = work.rounds(rollout, cfg.objective)[1]
        everything = work.sequences(groups * rollout.samples_per_prompt)
        updates = training.epochs * -(-groups // training.minibatch_prompts)
        minibatch = work.sequences(min(groups, training.minibatch_prompts) * rollout.samples_per_prompt)
        update = self.run(minibatch, training.max_tokens_per_microbatch, backward=True)
        without = self.run(everything, training.tokens_without_grad(cfg.megatron.fixed_length), backward=False)
        reduced, stepped = self.optimizer_seconds()
        phases = {
            "sample": self.sample_seconds()[0],
            REFILLS: self.sample_seconds()[1],
            "old log-probs": without.seconds if updates > 1 and training.old_logprobs == "actor" else 0.0,
            "log-probs of the weights that sampled": self.gate_share(updates) * without.seconds,
            VERDICTS: max(0.0, self.verdict_seconds() - self.sample_seconds()[0]),
            "reference log-probs": without.seconds if cfg.objective.ref_kl and not has_teacher(cfg.objective) else 0.0,
            "teacher": updates * self.teacher_seconds(minibatch) if has_teacher(cfg.objective) else 0.0,
            "forward and backward": updates * update.seconds,
            "gradients and weights over dp": updates * reduced,
            "optimizer": updates * stepped,
            "change places": self.moving_seconds(),
            "send weights": self.sync_seconds(),
        }
        beyond = self.machine.assumed.beyond
        if self.measured is not None:
            phases = {name: seconds * self.measured.factors.get(name, 1.0) for name, seconds in phases.items()}
            beyond = self.measured.beyond
        hidden = float(rollout.max_staleness > 0 and not rollout.colocate)
        if training.stream == "arrival" and not hidden:  # all minibatches of the first epoch but the last
            hidden = 1 / training.epochs - 1 / updates
        gpus = self.placement.gpus + cfg.reward.judge_gpus
        return StepPrediction(phases, update, sum(everything), gpus, hidden, beyond)

    def verdict_seconds(self) -> float:
        """Return the seconds of the slowest judge, if it had all responses at once. Judges work at the same time."""
        key = "verdicts"
        if key not in self.known:
            self.known[key] = max((load.seconds for load in self.judges()), default=0.0)
        return self.known[key]

    def judges(self) -> list[JudgeLoad]:
        """Return the judges that the run serves."""
        rollout = self.cfg.rollout
        responses = sum(self.workload.rounds(rollout, self.cfg.objective)[0]) * rollout.samples_per_prompt
        return list(judge_loads(self.cfg.reward, responses, self.machine, self.workload))

    def teacher_seconds(self, minibatch: Sequence[int]) -> float:
        """Return the seconds that the exact KL to the teacher adds to an update: a forward pass, and its logits once more."""
        visit = self.run(minibatch, self.cfg.training.max_tokens_per_microbatch, backward=False)
        rows = (sum(minibatch) - len(minibatch) * self.workload.prompt) / self.cfg.parallel.dp
        return visit.seconds + forward_output(self.model, self.cfg.parallel, self.machine, rows).total

    def gate_share(self, updates: int) -> float:
        """Return the share of a step's tokens that the stale-weights gate compares in a separate pass."""
        cfg = self.cfg
        passes = cfg.rollout.max_staleness > 0 or (cfg.training.old_logprobs == "rollout" and updates > 1)
        if not passes or cfg.sync.compared_tokens is None:
            return float(passes)
        groups = self.workload.rounds(cfg.rollout, cfg.objective)[1]
        sampled = sum(self.workload.responses(groups * cfg.rollout.samples_per_prompt))
        return min(1.0, cfg.sync.compared_tokens * cfg.rollout.servers / sampled)

    def sample_seconds(self) -> tuple[float, float]:
        """Return the seconds of a step's first round, and the seconds of all further rounds, one after the other."""
        rollout = self.cfg.rollout
        key = (rollout.servers, rollout.server.tp)
        if key not in self.known:
            asked = self.workload.rounds(rollout, self.cfg.objective)[0]
            first, *further = (self.served_seconds(n, rollout.samples_per_prompt, self.workload) for n in asked)
            self.known[key] = first, sum(further)
        return self.known[key]

    def served_seconds(self, prompts: int, samples: int, work: Workload) -> float:
        """Return the seconds until the slowest of equal servers has answered."""
        cfg = self.cfg
        server, each = cfg.rollout.server, -(-prompts // cfg.rollout.servers)
        at_once = min(server.concurrency * samples, self.machine.assumed.engine_sequences)
        engine_state = generating(server, cfg.model.dtype, self.model, self.machine.gpu, self.machine.assumed)
        cache = max(engine_state.parts["KV cache"], 1.0)
        element = ELEMENT[server.precision or cfg.model.dtype]
        engine = EngineModel(self.model, self.machine, server.tp, cache, at_once, element)
        return engine.seconds(work.prompt, each, work.responses(each * samples))

    def optimizer_seconds(self) -> tuple[float, float]:
        """Return the seconds of one update on the rank with the largest buffers: (collectives over dp x cp, Adam).

        The collectives scatter gradients and gather weights.
        """
        parallel = self.cfg.parallel
        ranks = parallel.dp * parallel.cp
        stages = (parameters.held(self.model.family.rows, self.model.arch, parallel, rank) for rank in range(parallel.pp))
        most = max(stages, key=lambda held: held.buffer)
        sent = most.buffer * (4 + self.model.element) * (ranks - 1) / ranks
        link = self.machine.link(ranks, parallel.tp)
        on_host = most.owned * self.cfg.megatron.offloaded_share
        stepped = (most.owned - on_host) * _OPTIMIZER_BYTES / self.machine.memory_rate
        # fp32 gradients to the host, fp32 weights back, and the host's Adam in between
        stepped += on_host * (2 * 4 / self.host_rate + _OPTIMIZER_BYTES / self.machine.assumed.host_adam)
        return sent / link, stepped

    def moving_seconds(self) -> float:
        """Return the seconds to move weights and optimizer to the host and back, under rollout.colocate."""
        if not self.cfg.rollout.colocate:
            return 0.0
        held = parameters.held(self.model.family.rows, self.model.arch, self.cfg.parallel, 0)
        state = state_bytes(held, self.cfg.model.dtype, self.cfg.megatron.known_optimizer)
        return 2 * (state["weights"] + state["optimizer"]) / self.host_rate

    def sync_seconds(self) -> float:
        """Return the seconds to send all weights once.

        With broadcasts: the size over the link. With files: one rank of each stage writes them and every server reads them. The
        files lie in a machine's memory, on each machine after a network transfer, or on a file system as fast as the network.
        """
        size = parameters.total_parameters(self.model.family.rows, self.model.arch) * self.model.element
        if self.cfg.sync.transport.type == "group":
            return size / self.machine.link(GPUS_PER_NODE + 1 if self.placement.machines > 1 else 2, 1)
        network = size / self.machine.link(GPUS_PER_NODE + 1, 1) if self.placement.machines > 1 else 0.0
        if self.cfg.sync.shared_folder is not None and network:
            return network
        return network + size / (self.machine.assumed.host_copy * self.cfg.parallel.pp)
