"""Programs of the ranks in the checkpoint tests, and comparisons of their results."""

import contextlib
import logging
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tepo_megatron.config import CheckpointConfig, Config
from tests.parallel import cases

RUN_STATE = {"policy_version": 1, "data": {"epoch": 0, "position": 16}, "accuracy": 0.25, "config": "name: x\n"}


def run_config(model: Path, layout: dict[str, Any], precision: str = "fp32") -> Config:
    """Return the config of the other layout tests, with a learning rate that differs from step to step."""
    cfg = cases.run_config(model, layout)
    return replace(cfg, model=replace(cfg.model, precision=precision), optimizer=replace(cfg.optimizer, warmup_steps=3))


def checkpoints(folder: Path, actor: Any, timeout_seconds: float = 1800.0, **fields: Any) -> Any:
    from tepo_megatron.checkpoint.checkpoints import Checkpoints

    return Checkpoints.open(folder, CheckpointConfig(**fields), actor.groups, timeout_seconds)


def update(actor: Any, step: int, batch: Any) -> float:
    from tepo_megatron.losses import build_objective

    actor.start_step(step)
    return actor.update(batch, build_objective(actor.cfg.objective)).metrics["loss/total"][0]


def raw_state(actor: Any) -> list[Any]:
    """Return this rank's weights, masters, moments and counters as Megatron holds them, in its order."""
    state = [p.detach().clone() for chunk in actor.chunks for p in chunk.parameters()]
    for part in actor.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            state += [group["lr"], group["weight_decay"], group.get("step", 0)]
            for master in group["params"]:
                kept = part.optimizer.state.get(master, {})
                state += [master.detach().clone(), *(kept[k].clone() for k in sorted(kept))]
    return [*state, actor.scheduler.num_steps]


def generators() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, keys.tolist(), rest, torch.get_rng_state().tolist()


def draw(count: int) -> None:
    """Return `count` numbers from each generator."""
    torch.rand(count), np.random.rand(count), [random.random() for _ in range(count)]


def same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Return whether two states are equal, bit for bit."""

    def equal(x: Any, y: Any) -> bool:
        if isinstance(x, Tensor):
            return x.dtype == y.dtype and x.shape == y.shape and bool((x == y).all())
        return x == y

    return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))


def parts(actor: Any) -> list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]:
    """Return this rank's part of each whole tensor: name, whole shape, offset, values."""
    from tepo_megatron.checkpoint.state import loaded_slices

    return [(b.name, b.shape, b.offset, b.data.clone()) for b in loaded_slices(actor)]


def whole(ranks: Sequence[list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]], vocab: int) -> dict[str, Tensor]:
    """Assemble the whole tensors from the parts of all ranks, without the padding of the vocabulary; nan where no part is."""
    tensors: dict[str, Tensor] = {}
    for name, shape, offset, values in (part for rank in ranks for part in rank):
        tensor = tensors.setdefault(name, torch.full(shape, torch.nan, dtype=values.dtype))
        tensor[tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))] = values
    padded = [n for n in tensors if n.endswith(("word_embeddings.weight", "output_layer.weight"))]
    return tensors | {n: tensors[n][:vocab] for n in padded}


def hold_back_writing(begun: threading.Event | None = None) -> threading.Event:
    """Let the saving thread of this rank wait for the returned event before it writes its file; set `begun` when it waits."""
    from tepo_megatron.checkpoint import saving

    go, original = threading.Event(), saving.write_items

    def late(*args: Any) -> Any:
        if begun is not None:
            begun.set()
        assert go.wait(60)
        return original(*args)

    saving.write_items = late  # type: ignore[assignment]
    return go


@contextlib.contextmanager
def checkpoint_warnings() -> Iterator[list[str]]:
    """Collect the warnings of `tepo_megatron.checkpoint` on this rank."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("tepo_megatron.checkpoint")
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
