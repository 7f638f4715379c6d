"""Predict the seconds of a step with one roofline: operations over the peak, bytes over the bandwidth, nothing overlapped.

Every rate is a datasheet value times an assumed share (`inputs.py`). Work is spread evenly over ranks and stages, microbatches
are full, and a pipeline of p stages and m microbatches waits (p - 1) / (m + p - 1) of its time. Backward takes twice the
products and moves of forward, and two and a half times the attention (arXiv 2307.08691). Each decoding step of the engine reads
its weights and the cache of all running sequences. A recorded run corrects each phase by one factor (`command.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tepo_megatron.base.hardware import Gpu
from tepo_megatron.config import Config
from tepo_megatron.doctor.plan import parameters
from tepo_megatron.doctor.plan.activations import microbatches_in_flight
from tepo_megatron.doctor.plan.inputs import (
    ASSUMED,
    ELEMENT,
    GPUS_PER_NODE,
    Assumptions,
    Placement,
    PlannedModel,
    Workload,
    placement_of,
)
from tepo_megatron.doctor.plan.memory import TrainerMemory, generating, has_teacher, kv_bytes, state_bytes
from tepo_megatron.doctor.plan.parameters import (
    attention_layers,
    delta_rule_operations,
    kinds_of,
    projection_operations,
    sequence_state_bytes,
)
from tepo_megatron.models.ops import Architecture

REFILLS = "sample again, for what was dropped"
ATTENTION_BACKWARD = 2.5
OPTIMIZER_BYTES = 34  # per owned element: reads gradient, master and two moments; writes these and the weight
RECOMPUTED = {"none": 0.0, "selective": 0.5, "full": 1.0}  # share of a layer's forward pass that backward runs again


@dataclass(frozen=True)
class StepPrediction:
    """Predicted seconds of a step."""

    phases: Mapping[str, float]  # seconds by name; "beyond the phases" is what steps take in addition
    hidden: float  # share of the trainer's phases that run while the engine samples
    tokens: int  # tokens of prompts and responses that the step learns from

    @property
    def seconds(self) -> float:
        """Return the time from one step to the next."""
        sample = self.phases["sample"] + self.phases[REFILLS]
        outside = self.phases["send weights"] + self.phases["beyond the phases"]
        rest = sum(self.phases.values()) - sample - outside
        return outside + max(sample, self.hidden * rest) + (1 - self.hidden) * rest

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens that a step learns from, per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Predictor:
    """Predictor of the steps of one config on one kind of GPU."""

    cfg: Config
    model: PlannedModel
    gpu: Gpu
    workload: Workload
    assumed: Assumptions = ASSUMED
    # Recorded over predicted seconds by phase; 1 for those that are not there
    factors: Mapping[str, float] = field(default_factory=dict)
    beyond: float = ASSUMED.beyond  # seconds beyond the phases, as a share of theirs with one round of sampling
    # Cached seconds of sampling by GPU, workload and servers, which layouts that `search` tries have in common
    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def placement(self) -> Placement:
        """Return the GPUs of trainer and engine."""
        return placement_of(self.cfg.parallel.world_size, self.cfg.rollout)

    def step(self) -> StepPrediction:
        """Return a whole training step."""
        cfg, training, rollout = self.cfg, self.cfg.training, self.cfg.rollout
        groups = self.workload.rounds(rollout, cfg.objective)[1]
        sequences = self.workload.sequences(groups * rollout.samples_per_prompt)
        updates = training.epochs * -(-groups // training.minibatch_prompts)
        forward = self.pass_seconds(sequences, 1, training.tokens_without_grad(cfg.megatron.fixed_length))
        update = training.epochs * self.pass_seconds(
            sequences, updates // training.epochs, training.max_tokens_per_microbatch, backward=True
        )
        gate = rollout.max_staleness > 0 or (training.old_logprobs == "rollout" and updates > 1)
        teacher = has_teacher(cfg.objective)
        reduced, stepped = self.optimizer_seconds()
        key = (self.gpu.name, self.workload, rollout.servers, rollout.server.tp)
        if key not in self.known:
            self.known[key] = self.sample_seconds()
        phases = {
            "sample": self.known[key][0],
            REFILLS: sum(self.known[key][1:]),
            "old log-probs": forward * (updates > 1 and training.old_logprobs == "actor"),
            "log-probs of the weights that sampled": forward * gate,
            "reference log-probs": forward * (cfg.objective.ref_kl is not None and not teacher),
            "teacher": training.epochs * forward * teacher,
            "forward and backward": update,
            "gradients and weights over dp": updates * reduced,
            "optimizer": updates * stepped,
            "change places": self.moving_seconds(),
            "send weights": self.sync_seconds(),
        }
        phases = {name: seconds * self.factors.get(name, 1.0) for name, seconds in phases.items()}
        hidden = float(rollout.max_staleness > 0 and not rollout.colocate)
        if training.stream == "arrival" and not hidden:  # all minibatches of the first epoch but the last
            hidden = 1 / training.epochs - 1 / updates
        one_round = StepPrediction(phases | {REFILLS: 0.0, "beyond the phases": 0.0}, hidden, sum(sequences))
        return StepPrediction(phases | {"beyond the phases": self.beyond * one_round.seconds}, hidden, sum(sequences))

    def pass_seconds(self, sequences: Sequence[int], parts: int, max_tokens: int, *, backward: bool = False) -> float:
        """Return the seconds of a pass over sequences.

        Args:
            sequences: Their tokens, prompts included.
            parts: Number of minibatches, after each of which the pipeline is empty.
            max_tokens: Most tokens of a microbatch.
        """
        arch, parallel, model = self.model.arch, self.cfg.parallel, self.model
        tokens = sum(sequences) / parallel.dp
        rows = (sum(sequences) - len(sequences) * self.workload.prompt) / parallel.dp
        squares = sum(n * n for n in sequences) / parallel.dp
        ranks = parallel.tp * parallel.cp * parallel.pp
        again = RECOMPUTED[model.recompute] if backward else 0.0
        products = tokens * sum(count * self._layer_seconds(kind.sparse, kind.linear) for kind, count in kinds_of(arch).items())
        output = 2 * rows * arch.vocab_size * arch.hidden_size / self._matmul_rate(2)
        attention = squares * attention_layers(arch) * 2 * arch.num_heads * arch.head_dim / self._attention_rate
        hidden = arch.hidden_size * (parallel.tp if not parallel.sequence_parallel else 1)
        moved = tokens * arch.num_layers * (10 * hidden + 3 * self._ffn(arch)) * model.element / self._memory_rate
        links = self._link_seconds(tokens)
        times = 3 + again if backward else 1
        compute = (times * products + (3 if backward else 1) * output) / ranks
        compute += ((ATTENTION_BACKWARD + 1 + again) if backward else 1) * attention / ranks
        total = compute + times * (moved / ranks + links)
        if backward and self.cfg.training.offload_activations:
            in_flight = microbatches_in_flight(parallel, 0)
            total += 2 * TrainerMemory.of(self.cfg, model).kept(0).host / in_flight * tokens / max_tokens / self.host_rate
        count = max(parts, -(-tokens // max_tokens)) / parts
        waiting = (parallel.pp - 1) / parallel.vpp / (count + (parallel.pp - 1) / parallel.vpp)
        host = parts * count * arch.num_layers / parallel.pp * times * self.assumed.layer_seconds
        return max(total, host) / (1 - waiting)

    def _layer_seconds(self, sparse: bool, linear: bool) -> float:
        """Return the seconds of one layer's products for one token in forward, on one GPU."""
        arch, peak = self.model.arch, self.gpu.peak[2]
        if linear:
            seconds = projection_operations(arch) / self._matmul_rate() + delta_rule_operations(arch) / self._attention_rate
        else:
            heads = (2 + arch.attention_output_gate) * arch.num_heads + 2 * arch.num_query_groups
            seconds = 2 * arch.hidden_size * arch.head_dim * heads / self._matmul_rate()
        rate = peak * self.assumed.experts if sparse else self._matmul_rate()
        return seconds + 6 * arch.hidden_size * self._ffn(arch, sparse) / rate

    @staticmethod
    def _ffn(arch: Architecture, sparse: bool = True) -> int:
        """Return the width of the feed-forward blocks that a token passes."""
        if sparse and arch.experts is not None:
            return arch.experts.ffn_size * arch.experts.per_token
        return arch.ffn_size

    def _link_seconds(self, tokens: float) -> float:
        """Return the seconds of a rank's collectives in forward: tensor-parallel sums, keys and values, experts' tokens."""
        arch, parallel, element = self.model.arch, self.cfg.parallel, self.model.element
        tp, cp, layers = parallel.tp, parallel.cp, arch.num_layers / parallel.pp
        sums = 4 * tokens / cp * arch.hidden_size * (tp - 1) / tp / self.link(tp, 1)
        keys = 2 * tokens * arch.num_query_groups * arch.head_dim / tp * (cp - 1) / cp / self.link(cp, tp)
        experts = 0.0
        if arch.experts is not None:
            sent = 2 * tokens / cp / tp * arch.experts.per_token * arch.hidden_size * (parallel.ep - 1) / parallel.ep
            experts = sent / self.link(parallel.ep, tp)
        return layers * element * (sums + keys + experts)

    def _matmul_rate(self, element: int = 0) -> float:
        """Return the operations per second of products with operands of `element` bytes (0: those of the layers)."""
        size = element or (1 if self.cfg.model.fp8 else self.model.element)
        return self.gpu.peak[size] * self.assumed.matmul[size]

    @property
    def _attention_rate(self) -> float:
        return self.gpu.peak[2] * self.assumed.attention

    @property
    def _memory_rate(self) -> float:
        return self.gpu.memory_bandwidth * self.assumed.elementwise

    @property
    def host_rate(self) -> float:
        """Return the bytes per second between a GPU and its host, in one direction."""
        return self.gpu.host * self.assumed.links

    def link(self, size: int, stride: int) -> float:
        """Return the bytes per second that each rank sends in a ring of `size` ranks, `stride` apart.

        If the ring spans machines, each of its members in a machine has its own network adapter.
        """
        if size * stride <= GPUS_PER_NODE:
            return self.gpu.nvlink * self.assumed.links
        return min(self.gpu.nvlink, self.gpu.network * max(1, GPUS_PER_NODE // stride)) * self.assumed.links

    def sample_seconds(self) -> list[float]:
        """Return the seconds of each sampling round of a step, on equal servers."""
        rollout, work = self.cfg.rollout, self.workload
        server = rollout.server
        cache = generating(server, self.cfg.model.dtype, self.model, self.gpu, self.assumed).parts["KV cache"]
        state = sequence_state_bytes(self.model.arch, server.tp)
        of_one = (work.prompt + work.response) * kv_bytes(self.model.arch, server.tp) + state
        limit = min(server.concurrency * rollout.samples_per_prompt, self.assumed.engine_sequences)
        at_once = max(1, min(limit, int(cache / of_one)))
        seconds = []
        for prompts in work.rounds(rollout, self.cfg.objective)[0]:
            each = -(-prompts // rollout.servers)
            operations = each * work.prompt * 2 * touched_weights(self.model.arch, 1)
            prefill = operations / server.tp / self._matmul_rate(2)
            seconds.append(prefill + self._decoding(work.responses(each * rollout.samples_per_prompt), at_once))
        return seconds

    def _decoding(self, responses: Sequence[int], at_once: int) -> float:
        """Return the seconds to decode responses, of which `at_once` run as long as others wait."""
        waiting = max(0, len(responses) - at_once)
        mean = sum(responses) / len(responses)
        seconds = waiting * mean / at_once * self._decode_step(at_once, mean / 2)
        before, active = 0, min(len(responses), at_once)
        for length in sorted(responses)[waiting:]:
            seconds += (length - before) * self._decode_step(active, (length + before) / 2)
            before, active = length, active - 1
        return seconds

    def _decode_step(self, active: int, generated: float) -> float:
        """Return the seconds of one decoding step with one token for each of `active` sequences."""
        arch, server, element = self.model.arch, self.cfg.rollout.server, self.model.element
        tp, context = server.tp, self.workload.prompt + generated
        weights = touched_weights(arch, active) * ELEMENT[server.precision or self.cfg.model.dtype] / tp
        cached = active * (context * kv_bytes(arch, tp) + 2 * sequence_state_bytes(arch, tp))
        products = active * 2 * touched_weights(arch, 1) / tp / self._matmul_rate(2)
        sums = 2 * active * arch.hidden_size * element * (tp - 1) / tp / self.link(tp, 1)
        collectives = 2 * arch.num_layers * (self.assumed.decode_collective_seconds + sums) if tp > 1 else 0.0
        return self.assumed.decode_seconds + max((weights + cached) / self._memory_rate, products) + collectives

    def optimizer_seconds(self) -> tuple[float, float]:
        """Return the seconds of one update: (gradients scattered and weights gathered over dp x cp, Adam)."""
        parallel = self.cfg.parallel
        ranks = parallel.dp * parallel.cp
        held = parameters.held(self.model.family.rows, self.model.arch, parallel, 0)
        sent = held.buffer * (4 + self.model.element) * (ranks - 1) / ranks
        on_host = held.owned * self.cfg.megatron.offloaded_share
        stepped = (held.owned - on_host) * OPTIMIZER_BYTES / self._memory_rate
        # fp32 gradients to the host, fp32 weights back, and the host's Adam in between
        stepped += on_host * (2 * 4 / self.host_rate + OPTIMIZER_BYTES / self.assumed.host_adam)
        return sent / self.link(ranks, parallel.tp), stepped

    def moving_seconds(self) -> float:
        """Return the seconds to move weights and optimizer to the host and back, under rollout.colocate."""
        if not self.cfg.rollout.colocate:
            return 0.0
        held = parameters.held(self.model.family.rows, self.model.arch, self.cfg.parallel, 0)
        state = state_bytes(held, self.cfg.model.dtype, self.cfg.megatron.known_optimizer)
        return 2 * (state["weights"] + state["optimizer"]) / self.host_rate

    def sync_seconds(self) -> float:
        """Return the seconds to send all weights once: over the slowest link, or through a machine's memory and back."""
        cfg = self.cfg
        size = parameters.total_parameters(self.model.family.rows, self.model.arch) * self.model.element
        network = size / (self.gpu.network * self.assumed.links)
        if cfg.sync.transport.type == "group":
            spans = self.placement.gpus > GPUS_PER_NODE
            return network if spans else size / (self.gpu.nvlink * self.assumed.links)
        copies = size / cfg.parallel.pp / self.assumed.host_copy + size / cfg.rollout.server.tp / self.host_rate
        return copies + (network if self.placement.machines > 1 else 0.0)


def touched_weights(arch: Architecture, active: float) -> float:
    """Return the weights read for a token of each of `active` sequences: dense ones, and the experts that some token chose."""
    heads = (2 + arch.attention_output_gate) * arch.num_heads + 2 * arch.num_query_groups
    weights = float(arch.vocab_size * arch.hidden_size)
    for kind, count in kinds_of(arch).items():
        mixing = projection_operations(arch) / 2 if kind.linear else arch.hidden_size * arch.head_dim * heads
        width = float(arch.ffn_size)
        if kind.sparse and arch.experts is not None:
            missed = (1 - arch.experts.per_token / arch.experts.number) ** active
            width = arch.experts.ffn_size * arch.experts.number * (1 - missed)
        weights += count * (mixing + 3 * arch.hidden_size * width)
    return weights
