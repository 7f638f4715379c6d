"""`tepo train` whose ranks have no model: python -m tests.rehearsal.rank train CONFIG [--key value ...]

Started by the launcher, the module is one of the ranks. The loop of a rank, its calls of the service, the way of a batch to all
ranks and the pushes are those of `train.py`; `scripted.py` has the rest.
"""

import functools
import json
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tepo_megatron.command import launcher, parsers
from tepo_megatron.config import Config
from tepo_megatron.config.io import load_config
from tepo_megatron.trainer import worker

READS = "TEPO_REHEARSAL_READS"  # environment variable: how often each process reads a batch, for the ranks that it stands for
MESSAGE = "largest_message.json"  # file in the folder of the run


def measure_messages(path: Path) -> None:
    """Write the size of the largest message of the run between rank 0 and the service into a file."""
    largest = json.loads(path.read_text()) if path.exists() else 0

    def measured(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Connection, *args: Any) -> Any:
            nonlocal largest
            received = method(self, *args)
            nbytes = len(ForkingPickler.dumps(args[0] if args else received))
            if nbytes > largest:
                path.write_text(json.dumps(largest := nbytes))
            return received

        return call

    Connection.send, Connection.recv = measured(Connection.send), measured(Connection.recv)


def work(cfg: Config, platform: Any) -> None:
    from tepo_megatron.dist import parallel
    from tepo_megatron.trainer import batch_receiver, train
    from tests.rehearsal import scripted

    cfg.run_dir.mkdir(parents=True, exist_ok=True)
    if os.environ["RANK"] == "0":
        measure_messages(cfg.run_dir / MESSAGE)
    batch_receiver.read = functools.partial(scripted.read, batch_receiver.read, int(os.environ[READS]))
    parallel.initialize, train.Checkpoints = scripted.initialize, scripted.Checkpoints
    train.Actor = SimpleNamespace(open=scripted.open_actor)
    train.make_weight_sync = functools.partial(scripted.make_weight_sync, cfg.model.path)
    train.learn = functools.partial(scripted.learn, run=cfg.run_dir)
    train.train(cfg, platform)


if __name__ == "__main__":
    if "RANK" in os.environ:
        sys.exit(worker.run_rank(load_config(sys.argv[1]), work=work))
    launcher.launch = functools.partial(launcher.launch, worker="tests.rehearsal.rank")
    sys.exit(parsers.main())
