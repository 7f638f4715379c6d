"""Router replay: route tokens to the experts that the inference engine's routers chose (arXiv 2510.11370).

Engine and actor round differently, so for a few tokens their routers choose different experts. The actor's log-probs are then
those of another network than the one that sampled. With replay, only the choice is taken from the engine: the weights of the
chosen experts are still the softmax of the actor's own router logits, and gradients reach the router.

The choices are set before the forward pass of each microbatch. Megatron's separate replay action for recomputed activations is
not needed, because no module with a router is recomputed (config/run.py refuses it).
"""

from collections.abc import Sequence

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from tepo_megatron.distributed.parallel import ParallelDims


class ExpertReplay:
    """The routers of this rank's model chunks."""

    def __init__(
        self, chunks: Sequence[torch.nn.Module], sparse_layers: Sequence[int], groups: ParallelDims, sequence_parallel: bool
    ) -> None:
        self._parts, self._part = (groups.tp.size, groups.tp.rank) if sequence_parallel else (1, 0)
        places = {layer: k for k, layer in enumerate(sparse_layers)}
        self._routers = [
            [(_replay_of(m), places[m.layer_number - 1]) for m in chunk.modules() if isinstance(m, TopKRouter)]
            for chunk in chunks
        ]

    def set(self, chunk: int, experts_SKT: Tensor) -> None:
        """Make the routers of a chunk route the tokens of its next forward pass to these experts.

        `experts_SKT`: uint8 or int16 on the device, the experts of the S tokens of this context-parallel rank.
        """
        experts_SKT = experts_SKT.chunk(self._parts)[self._part]
        for router, k in self._routers[chunk]:
            router.clear_indices()  # also clears the list for recomputed activations, which would grow forever
            router.set_target_indices(experts_SKT[:, k].long())
            router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def clear(self) -> None:
        """Make all routers choose their experts again."""
        for router, _ in (pair for routers in self._routers for pair in routers):
            router.clear_indices()
            router.clear_router_replay_action()


def _replay_of(router: TopKRouter) -> RouterReplay:
    assert router.router_replay is not None, "the model was built for it (build.transformer_config)"
    return router.router_replay
