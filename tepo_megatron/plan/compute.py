"""Predict the seconds of a forward or backward pass over one pipeline stage, with a roofline model per term.

Matrix products count by their operations, norms and activations by the bytes that they move, collectives by the bytes on the
slowest link. Nothing overlaps, as the trainer is configured. Backward takes twice the products and moves of forward, and two
and a half times the attention (arXiv 2307.08691).
"""

import operator
from dataclasses import astuple, dataclass

from tepo_megatron.config import ParallelConfig
from tepo_megatron.plan import parameters
from tepo_megatron.plan.gpus import ASSUMED, GPUS_PER_NODE, Assumptions, Gpu
from tepo_megatron.plan.layers import DENSE, LayerKind, kinds_of
from tepo_megatron.plan.linear_attention import delta_rule_operations, moved_elements, projection_operations
from tepo_megatron.plan.memory_parts import PlannedModel
from tepo_megatron.weights.ops import Architecture

ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True)
class Cost:
    """Seconds on one rank, by kind of work."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    links: float = 0.0

    @property
    def total(self) -> float:
        """Return the sum of all kinds."""
        return self.products + self.attention + self.elementwise + self.links

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*map(operator.add, astuple(self), astuple(other)))

    def times(self, factor: float, attention: float | None = None) -> "Cost":
        """Return the cost multiplied by a factor.

        Args:
            attention: Factor of attention instead. None: `factor`.
        """
        attention = factor if attention is None else attention
        return Cost(self.products * factor, self.attention * attention, self.elementwise * factor, self.links * factor)


@dataclass(frozen=True)
class MachineModel:
    """A GPU with assumptions about it.

    Attributes:
        matmul_size: Bytes per element of the matrices in the layers' products.
        assumed: Shares of the datasheet values that are reached.
    """

    gpu: Gpu
    matmul_size: int = 2
    assumed: Assumptions = ASSUMED

    @property
    def matmul_rate(self) -> float:
        """Return the operations per second of matrix products."""
        return self.gpu.peak[self.matmul_size] * self.assumed.matmul[self.matmul_size]

    @property
    def attention_rate(self) -> float:
        """Return the operations per second of attention, which runs in bf16."""
        return self.gpu.peak[2] * self.assumed.attention

    @property
    def memory_rate(self) -> float:
        """Return the bytes per second of operations bound by memory bandwidth."""
        return self.gpu.memory_bandwidth * self.assumed.elementwise

    def link(self, size: int, stride: int) -> float:
        """Return the bytes per second that each rank sends in a ring.

        If the ring spans machines, each of its members in a machine has its own network adapter.
        """
        if size * stride <= GPUS_PER_NODE:
            return self.gpu.nvlink * self.assumed.links
        return min(self.gpu.nvlink, self.gpu.network * max(1, GPUS_PER_NODE // stride)) * self.assumed.links


def layer_operations(arch: Architecture, kind: LayerKind = DENSE) -> float:
    """Return the operations of one layer's matrix products for one token in forward: two per weight that the token meets."""
    if kind.linear:
        return projection_operations(arch) + feed_forward_operations(arch, kind.sparse)
    heads = (2 + arch.attention_output_gate) * arch.num_heads + 2 * arch.num_query_groups
    return 2.0 * arch.hidden_size * arch.head_dim * heads + feed_forward_operations(arch, kind.sparse)


def feed_forward_operations(arch: Architecture, sparse: bool) -> float:
    """Return the part of `layer_operations` in the feed-forward block."""
    if sparse and arch.experts is not None:
        return 2.0 * arch.hidden_size * (3 * arch.experts.ffn_size * arch.experts.per_token + arch.experts.number)
    return 2.0 * arch.hidden_size * 3 * arch.ffn_size


def attention_operations(arch: Architecture, lengths_squared: float) -> float:
    """Return the operations of one layer's causal attention in forward: 2 (QK and PV) x 2 x L^2 / 2."""
    return 2.0 * lengths_squared * arch.num_heads * arch.head_dim


def forward_layer(
    model: PlannedModel, parallel: ParallelConfig, machine: MachineModel, tokens: float, lengths_squared: float, kind: LayerKind
) -> Cost:
    """Return the cost of one layer in forward."""
    arch, tp, cp = model.arch, parallel.tp, parallel.cp
    mine = tokens / cp
    hidden = arch.hidden_size / (tp if parallel.sequence_parallel else 1)
    if kind.linear:
        mixed = _linear_attention(model, parallel, machine, tokens)
    else:
        mixed = _attention(model, parallel, machine, tokens, lengths_squared)
    operations = layer_operations(arch, kind) - feed_forward_operations(arch, kind.sparse)
    return (
        forward_feed_forward(model, parallel, machine, tokens, kind.sparse)
        + mixed
        + Cost(
            products=mine * operations / machine.matmul_rate / tp,
            # two norms read and write once each, residual sums read two tensors and write one
            elementwise=mine * model.element * 10 * hidden / machine.memory_rate,
            links=_between_tensor_ranks(model, parallel, machine, mine),
        )
    )


def _attention(
    model: PlannedModel, parallel: ParallelConfig, machine: MachineModel, tokens: float, lengths_squared: float
) -> Cost:
    """Return the cost of attention between its two projections."""
    arch, tp, cp, links = model.arch, parallel.tp, parallel.cp, 0.0
    # rotary embedding reads and writes; an output gate is read with what it multiplies, which is written
    moved = 2 * (arch.num_heads + 2 * arch.num_query_groups) + 3 * arch.num_heads * arch.attention_output_gate
    if cp > 1:
        both = 2 * arch.num_query_groups * arch.head_dim / tp * model.element
        links = tokens * both * (cp - 1) / cp / machine.link(cp, tp)
    return Cost(
        attention=attention_operations(arch, lengths_squared) / (tp * cp) / machine.attention_rate,
        elementwise=tokens / cp * model.element * moved * arch.head_dim / tp / machine.memory_rate,
        links=links,
    )


def _linear_attention(model: PlannedModel, parallel: ParallelConfig, machine: MachineModel, tokens: float) -> Cost:
    """Return the cost of the gated delta rule between its two projections, at the rate of attention.

    Context-parallel ranks exchange heads for tokens before and after it.
    """
    arch, tp, cp, links = model.arch, parallel.tp, parallel.cp, 0.0
    mine = tokens / cp
    assert arch.linear_attention is not None
    if cp > 1:
        linear = arch.linear_attention
        sent = mine * (sum(linear.projected) + linear.value_heads * linear.value_dim) / tp * model.element
        links = sent * (cp - 1) / cp / machine.link(cp, tp)
    return Cost(
        attention=mine * delta_rule_operations(arch) / tp / machine.attention_rate,
        elementwise=mine * model.element * moved_elements(arch, tp) / machine.memory_rate,
        links=links,
    )


def forward_feed_forward(
    model: PlannedModel, parallel: ParallelConfig, machine: MachineModel, tokens: float, sparse: bool
) -> Cost:
    """Return the cost of one layer's feed-forward block in forward."""
    arch, tp, mine = model.arch, parallel.tp, tokens / parallel.cp
    hidden = arch.hidden_size / (tp if parallel.sequence_parallel else 1)
    ffn = arch.ffn_size if not sparse or arch.experts is None else arch.experts.ffn_size * arch.experts.per_token
    moved = mine * model.element * 3 * ffn / tp  # SwiGLU as one kernel reads gate and up and writes their product
    links = _between_tensor_ranks(model, parallel, machine, mine)
    if sparse and arch.experts is not None and parallel.ep > 1:
        sent = 2 * arch.experts.per_token * mine * arch.hidden_size * model.element
        sent /= tp if parallel.sequence_parallel else 1
        links += sent * (parallel.ep - 1) / parallel.ep / machine.link(parallel.ep, tp)
    products = feed_forward_operations(arch, sparse) / machine.matmul_rate
    if sparse and arch.experts is not None:
        of_experts = 6.0 * arch.hidden_size * arch.experts.ffn_size * arch.experts.per_token
        rate_of_experts = machine.gpu.peak[2] * machine.assumed.experts
        products += of_experts * (1 / rate_of_experts - 1 / machine.matmul_rate)
        moved += 6 * mine * model.element * arch.experts.per_token * hidden  # tokens are sorted by expert, sent, and sent back
    return Cost(products=mine * products / tp, elementwise=moved / machine.memory_rate, links=links)


def _between_tensor_ranks(model: PlannedModel, parallel: ParallelConfig, machine: MachineModel, mine: float) -> float:
    """Return the seconds of an all-reduce, or of a gather and a scatter, of a rank's tokens over tensor-parallel ranks."""
    if parallel.tp == 1:
        return 0.0
    activation = mine * model.arch.hidden_size * model.element
    return 2 * activation * (parallel.tp - 1) / parallel.tp / machine.link(parallel.tp, 1)


def forward_output(model: PlannedModel, parallel: ParallelConfig, machine: MachineModel, rows: float) -> Cost:
    """Return the cost of the output layer in forward, including the statistics of its logits."""
    mine = rows / parallel.cp
    logits = mine * model.arch.vocab_size / parallel.tp
    return Cost(
        products=2 * logits * model.arch.hidden_size / (machine.gpu.peak[2] * machine.assumed.matmul[2]),
        elementwise=2 * logits * model.element / machine.memory_rate,
    )


def stage_seconds(
    model: PlannedModel,
    parallel: ParallelConfig,
    machine: MachineModel,
    tokens: float,
    lengths_squared: float,
    rows: float,
    *,
    backward: bool,
    fused_output: bool = False,
) -> Cost:
    """Return the cost of the slowest stage for one microbatch (or the total work of several)."""
    slowest = Cost()
    for rank in range(parallel.pp):
        layers = [layer for chunk in parameters.stages(model.arch, parallel, rank) for layer in chunk.layers]
        cost, again = Cost(), Cost()
        for kind, count in kinds_of(model.arch, layers).items():
            cost += forward_layer(model, parallel, machine, tokens, lengths_squared, kind).times(count)
            if model.recompute == "selective":
                again += forward_feed_forward(model, parallel, machine, tokens, kind.sparse).times(count)
        again = cost if model.recompute == "full" else again
        if backward:
            cost = cost + cost.times(2, ATTENTION_BACKWARD) + again
        if rank == parallel.pp - 1:
            output = forward_output(model, parallel, machine, rows)
            cost = cost + (output.times(4 if fused_output else 3) if backward else output)
        slowest = max(slowest, cost, key=lambda c: c.total)
    return slowest
