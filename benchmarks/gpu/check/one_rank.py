"""An actor in a world of one rank, this process, for the parts `offload` and `transfer`."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.check.lines import Check
from benchmarks.gpu.check.model import random_model, run_tree
from tepo_megatron.config import Config
from tepo_megatron.config.io import validate
from tepo_megatron.platform import activate


@contextlib.contextmanager
def actor_of(check: Check, **sections: dict[str, Any]) -> Iterator[tuple[Any, Config]]:
    """Yield an actor with the random model, and its config.

    Args:
        check: Selects the platform and has the model's folder.
        sections: Further keys, by section of the config.
    """
    cfg = validate(run_tree(check, random_model(check), **sections))
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(world | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    platform = activate(cfg.platform)
    from tepo_megatron.actor.actor import Actor
    from tepo_megatron.distributed import parallel

    groups = parallel.initialize(cfg.parallel, platform, cfg.seed)
    try:
        yield Actor.open(cfg, groups), cfg
    finally:
        parallel.shutdown()
