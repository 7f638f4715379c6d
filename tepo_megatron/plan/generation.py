"""Predict the sampling time of the engine. Every decoding step reads the weights and the KV cache of all running sequences."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from tepo_megatron.plan.compute import MachineModel, attention_operations, layer_operations
from tepo_megatron.plan.engine_memory import kv_bytes
from tepo_megatron.plan.layers import attention_layers, kinds_of
from tepo_megatron.plan.linear_attention import delta_rule_operations, sequence_state_bytes
from tepo_megatron.plan.memory_parts import PlannedModel
from tepo_megatron.weights.ops import Architecture


@dataclass(frozen=True)
class EngineModel:
    """One inference server.

    Attributes:
        cache: Bytes of KV cache and of states on each GPU.
    """

    model: PlannedModel
    machine: MachineModel
    tp: int
    cache: float
    sequences: int
    element: int = 2

    def step_seconds(self, active: float, context: float) -> float:
        """Return the seconds of one decoding step, with one token per sequence."""
        arch, assumed = self.model.arch, self.machine.assumed
        weights = touched_weights(arch, active) * self.element / self.tp
        state = sequence_state_bytes(arch, self.tp)  # read and written
        cache = active * (context * kv_bytes(arch, self.tp) + 2 * state)
        memory = (weights + cache) / self.machine.memory_rate
        products = active * decode_operations(arch) / self.tp / self.machine.matmul_rate
        collectives = 0.0
        if self.tp > 1:
            sent = 2 * active * arch.hidden_size * self.model.element * (self.tp - 1) / self.tp
            one = assumed.decode_collective_seconds + sent / self.machine.link(self.tp, 1)
            collectives = 2 * arch.num_layers * one
        return assumed.decode_seconds + max(memory, products) + collectives

    def seconds(self, prompt: int, prompts: int, responses: Sequence[int]) -> float:
        """Return the seconds until all responses are complete. Sequences that do not fit wait.

        The samples of one prompt read it once. A sequence needs cache for its whole length when it begins; real engines begin
        some more and preempt them.
        """
        arch = self.model.arch
        operations = prompts * (
            prompt * decode_operations(arch) + attention_layers(arch) * attention_operations(arch, prompt**2)
        )
        if arch.linear_attention is not None:
            operations += prompts * prompt * len(arch.linear_layers) * delta_rule_operations(arch)
        prefill = operations / self.tp / self.machine.matmul_rate
        token, state = kv_bytes(arch, self.tp), sequence_state_bytes(arch, self.tp)
        waiting = list(reversed(responses))
        ends: list[tuple[float, int]] = []  # (step at which a sequence ends, its response tokens)
        now = used = seconds = 0.0
        while waiting or ends:
            while (
                waiting
                and len(ends) < self.sequences
                and (not ends or used + token * (prompt + waiting[-1]) + state <= self.cache)
            ):
                tokens = waiting.pop()
                heapq.heappush(ends, (now + tokens, tokens))
                used += token * (prompt + tokens) + state
            end, active = ends[0][0], len(ends)
            context = prompt + (sum(tokens - (at - now) for at, tokens in ends) / active) + (end - now) / 2
            seconds += (end - now) * self.step_seconds(active, context)
            now = end
            while ends and ends[0][0] == end:
                used -= token * (prompt + heapq.heappop(ends)[1]) + state
        return prefill + seconds


def decode_operations(arch: Architecture) -> float:
    """Return the operations of all matrix products for one token, including the output layer but not attention."""
    layers = sum(count * layer_operations(arch, kind) for kind, count in kinds_of(arch).items())
    return layers + 2.0 * arch.vocab_size * arch.hidden_size


def touched_weights(arch: Architecture, active: float) -> float:
    """Return the weights read for one token of each sequence: all dense weights, and only the experts that some token chose."""
    dense = decode_operations(arch) / 2
    if arch.experts is None:
        return dense
    one = 3 * arch.hidden_size * arch.experts.ffn_size
    missed = (1 - arch.experts.per_token / arch.experts.number) ** active
    return dense + len(arch.sparse_layers) * one * (arch.experts.number * (1 - missed) - arch.experts.per_token)
