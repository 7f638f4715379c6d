"""Caches on the device, besides the actor's parts, leave it with the parameters between updates.

See also tests/transformer_engine/test_fp8.py.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from tepo_megatron.config import Config
from tepo_megatron.types import TrainBatch
from tests.parallel import cases
from tests.worlds import run_world


def _losses(rank: int, cfg: Config, batch: TrainBatch, offloads: bool) -> list[torch.Tensor]:
    """Old log-probs before and after an update; the parameters leave and come back after each pass."""
    from tepo_megatron.actor.actor import Actor
    from tepo_megatron.actor.rotary import PACKED
    from tepo_megatron.distributed import parallel
    from tepo_megatron.losses import build_objective
    from tepo_megatron.platform import activate

    actor = Actor.open(cfg, parallel.initialize(cfg.parallel, activate("cpu"), cfg.seed))
    objective, found = build_objective(cfg.objective), []
    for step in range(2):
        stats = actor.attach_old_stats(batch)
        assert stats.old_logprobs_N is not None
        found.append(stats.old_logprobs_N.clone())
        assert PACKED.tables is not None and RotaryEmbedding.forward.cache_info().currsize > 0
        tables = [weakref.ref(t) for t in (PACKED.tables.freqs, PACKED.tables.cos, PACKED.tables.sin)]
        if offloads:
            actor.offload("gradients", "optimizer")
            assert all(table() is not None for table in tables)
            actor.offload("parameters")
            gc.collect()
            assert [table() for table in tables] == [None] * 3, "something else keeps them"
            assert RotaryEmbedding.forward.cache_info().currsize == 0
            actor.load()
        actor.start_step(step + 1)
        actor.update(batch, objective)
    parallel.shutdown()
    return found


@pytest.mark.slow
def test_rotary_tables_leave_with_the_parameters_and_are_made_again(case: cases.Case) -> None:
    cfg = cases.run_config(case.model, {})
    (straight,) = run_world(1, _losses, cfg, case.batches[0], False)
    (offloaded,) = run_world(1, _losses, cfg, case.batches[0], True)
    assert len(straight) == 2 and all(torch.equal(a, b) for a, b in zip(straight, offloaded, strict=True))
    assert not torch.equal(*straight)
