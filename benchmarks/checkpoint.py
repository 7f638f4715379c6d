"""Measure how long training waits for a checkpoint, compared with plain copies of the same state to host memory.

    python -m benchmarks --only 11

For each save: the seconds for which `save()` blocked training, and those of two plain copies, tensor by tensor. Each of the
three comes right after an optimizer step, as a save does.

    kept    copy into memory that is allocated already
    fresh   copy into newly allocated memory

The fair comparison is with `kept`, because a save also writes into memory that it keeps. The first save describes the state and
allocates that memory, so it is not in the medians.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks._ranks import actor_of
from benchmarks._weights import write_model
from benchmarks.results import Measure, SuiteOptions, Target
from tepo_megatron.config.io import validate

if TYPE_CHECKING:
    from tepo_megatron.actor.actor import Actor

SHAPES = {
    "demo": {  # as in examples/arithmetic: 0.6 M parameters
        "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64,
    },
    "100m": {
        "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 10, "num_attention_heads": 12,
        "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32_000,
    },
}  # fmt: skip
SAVES = {"demo": 41, "100m": 6}


def measures(options: SuiteOptions, name: str) -> list[Measure]:
    """Measure the seconds for which a save of a model blocks training."""
    if options.quick and name != "demo":
        return []
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        saves = measure(write_model(SHAPES[name], Path(folder)), 2 if options.quick else SAVES[name])
    median = {k: statistics.median(s[k] for s in saves[1:]) for k in saves[0]}
    peers = {"plain copy": median["kept"], "plain copy, fresh": median["fresh"]}
    what, more = f"training waits, {name} model, median after the first", {"saves": saves, "complete": median["complete"]}
    # a copy into memory that is allocated already, which a save has too
    target = (Target("ours / plain copy", "<=", 1.0),)
    return [Measure(11, what, "s", median["blocked"], peers, target, more=more)]


def measure(model: Path, saves: int) -> list[dict[str, float]]:
    """Return the seconds of each save: `blocked`, `kept` and `fresh`, and `complete`, until the checkpoint was complete."""
    cfg = validate({
        "name": "benchmark", "platform": "cpu", "model": {"path": str(model), "precision": "fp32"},
        "data": {"train": "unused", "max_prompt_tokens": 8}, "rollout": {"max_response_tokens": 8},
        "training": {"max_tokens_per_microbatch": 64},
    })  # fmt: skip
    found: list[dict[str, float]] = []
    with actor_of(cfg) as actor:
        from tepo_megatron.checkpoint.checkpoints import Checkpoints
        from tepo_megatron.checkpoint.state import saved_slices
        from tepo_megatron.config import CheckpointConfig

        for chunk in actor.chunks:
            chunk.zero_grad_buffer()
        actor.start_step(1)
        actor.optimizer.step()  # creates the moments
        state = [piece.data for piece in saved_slices(actor)]
        kept = [torch.zeros_like(data) for data in state]

        def copy_kept() -> None:
            for to, data in zip(kept, state, strict=True):
                to.copy_(data)

        with Checkpoints.open(model.parent / "checkpoints", CheckpointConfig(keep_last=1), actor.groups) as checkpoints:
            for step in range(1, saves + 1):
                times = {"kept": _seconds(actor, copy_kept), "fresh": _seconds(actor, lambda: [x.clone() for x in state])}
                actor.optimizer.step()
                checkpoints.save(step, actor, {"step": step})
                saved = checkpoints.wait()
                assert saved is not None
                found.append({"blocked": saved.blocked_seconds, **times, "complete": saved.seconds})
    return found


def _seconds(actor: Actor, copy: Callable[[], object]) -> float:
    """Return the seconds of a copy right after an optimizer step."""
    actor.optimizer.step()
    start = time.perf_counter()
    copies = copy()
    seconds = time.perf_counter() - start
    del copies  # not timed
    return seconds
