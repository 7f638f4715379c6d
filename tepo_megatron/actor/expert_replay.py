"""Routers that send tokens where the engine's routers sent them.

Engine and actor round differently, so for a few tokens their routers choose other experts, and the actor's log-probs are then
those of another network than the one that sampled. Given the engine's choices (arXiv 2510.11370), Megatron's routers weigh and
learn as ever: the weights of the chosen experts are the softmax of this router's own logits, and their gradient reaches it.

What is replayed is set before each microbatch's forward pass. Megatron's separate action for activations that are computed
again is not needed: nothing that holds a router is computed again (config/run.py refuses it).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from tepo_megatron.parallel import Groups


class ExpertReplay:
    """The routers of this rank's model chunks. sparse_layers: the model's layers with experts, ascending; sequence_parallel:
    each tensor-parallel rank has its part of the tokens, one after the other.
    """

    def __init__(
        self, chunks: Sequence[torch.nn.Module], sparse_layers: Sequence[int], groups: Groups, sequence_parallel: bool
    ) -> None:
        self._parts, self._part = (groups.tp.size, groups.tp.rank) if sequence_parallel else (1, 0)
        places = {layer: k for k, layer in enumerate(sparse_layers)}
        self._routers = [
            [(_replay_of(m), places[m.layer_number - 1]) for m in chunk.modules() if isinstance(m, TopKRouter)]
            for chunk in chunks
        ]

    def set(self, chunk: int, experts_SKT: Tensor) -> None:
        """Have the routers of a chunk send its next tokens, S of a context-parallel rank, to these experts (on the device)."""
        experts_SKT = experts_SKT.chunk(self._parts)[self._part]
        for router, k in self._routers[chunk]:
            router.clear_indices()  # also the list for activations that are computed again, which grows without end
            router.set_target_indices(experts_SKT[:, k].long())
            router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def clear(self) -> None:
        """Have all routers choose by themselves."""
        for router, _ in (pair for routers in self._routers for pair in routers):
            router.clear_indices()
            router.clear_router_replay_action()


def _replay_of(router: TopKRouter) -> RouterReplay:
    assert router.router_replay is not None, "the model was built for it (build.transformer_config)"
    return router.router_replay
