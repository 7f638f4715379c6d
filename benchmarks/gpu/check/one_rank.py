"""An actor in a world of one rank, this process, for the parts `offload` and `transfer`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from benchmarks._ranks import one_rank
from benchmarks.gpu.check.lines import Check
from benchmarks.gpu.check.model import random_model, run_tree
from tepo_megatron.config import Config
from tepo_megatron.config.io import validate
from tepo_megatron.platform import activate


@contextlib.contextmanager
def actor_of(check: Check, **sections: dict[str, Any]) -> Iterator[tuple[Any, Config]]:
    """Yield an actor with the random model, and its config."""
    cfg = validate(run_tree(check, random_model(check), None, **sections))
    platform = activate(cfg.platform)
    from tepo_megatron.actor.actor import Actor
    from tepo_megatron.distributed import parallel

    with one_rank():
        groups = parallel.initialize(cfg.parallel, platform, cfg.seed)
        try:
            yield Actor.open(cfg, groups), cfg
        finally:
            parallel.shutdown()
