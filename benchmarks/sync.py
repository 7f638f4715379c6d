"""Measure the delivery of weights to an engine, compared with a copy of the same bytes into shared memory.

    python -m benchmarks --only 12

Makes a random Qwen3 in fp32 (50 M parameters, 200 MB), serves it with each engine on the CPU, and pushes its weights. For each
push: seconds to gather and write all rounds while nobody reads them (transport), and seconds until the engine has loaded them
(total). The copy, made just before by one process, writes as many bytes to one file in /dev/shm. The figures are medians; the
first push of each engine warms up and is not counted. With `group` (gloo) transport is a push to a process that receives
everything and loads nothing.
"""

from __future__ import annotations

import collections
import contextlib
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks._ranks import actor_of
from benchmarks._receiver import Receiver
from benchmarks._weights import QUICK, SHAPE, copy_seconds, write_model
from benchmarks.results import Measure, SuiteOptions, Target
from tepo_megatron.config import RolloutConfig, ServerConfig, SyncConfig
from tepo_megatron.config.io import validate
from tepo_megatron.engines.engine_api import LaunchSpec
from tepo_megatron.engines.engines import build_engine
from tepo_megatron.engines.servers.fleet import Fleet
from tepo_megatron.wire.broadcast_group import GroupSpec
from tepo_megatron.wire.bucket_format import Source
from tepo_megatron.wire.transport import Recipient

if TYPE_CHECKING:  # Megatron-Core is imported after the platform is active
    from tepo_megatron.actor.actor import Actor
    from tepo_megatron.sync.push import WeightSync

TARGETS = {"shm": 3.0, "group": 10.0}  # limits, in copies
PUSHES = 5


class NullReceiver:
    """A receiver that accepts everything at once, reads nothing, and never joins a process group."""

    recipients: tuple[Recipient, ...] = ()
    base: int | None = None

    def join_groups(self, specs: Mapping[Recipient, GroupSpec]) -> Future[None]:
        raise AssertionError("this receiver joins no group")

    def begin_update(self, version: int) -> None: ...

    def keep_unchanged(self, names: Sequence[str]) -> None: ...

    def load(self, sources: Sequence[Source]) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def finish_update(self) -> None: ...

    def verify(self, sent: Mapping[str, int]) -> None: ...


def measure(actor: Actor, cfg: SyncConfig, model: Path, engine: Fleet, pushes: int) -> dict[str, float]:
    """Return median seconds: copy of the weights' bytes, transport and total."""
    from tepo_megatron.sync.push import make_weight_sync

    source = torch.ones(sum(p.stat().st_size for p in model.glob("*.safetensors")), dtype=torch.uint8)
    times: dict[str, list[float]] = collections.defaultdict(list)
    with contextlib.ExitStack() as stack:

        def sync_to(receiver: Any) -> WeightSync:
            return stack.enter_context(make_weight_sync(cfg, actor.bindings, actor.arch, actor.groups, receiver))

        grouped = cfg.transport.type == "group"
        syncs = {
            "transport": sync_to(stack.enter_context(Receiver(model)) if grouped else NullReceiver()), "total": sync_to(engine),
        }  # fmt: skip
        for version in range(pushes + 1):
            once = {"copy": copy_seconds(source)}
            for name, sync in syncs.items():
                start = time.perf_counter()
                sync.push(version)
                once[name] = time.perf_counter() - start
            if version:
                for name, seconds in once.items():
                    times[name].append(seconds)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def measures(options: SuiteOptions) -> list[Measure]:
    """Measure each transport with each engine."""
    found = []
    torch.set_num_threads(1)
    engines: tuple[Any, ...] = ("vllm",) if options.quick else ("vllm", "sglang")
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(QUICK if options.quick else SHAPE, Path(folder))
        tree: dict[str, Any] = {
            "name": "benchmark", "platform": "cpu", "model": {"path": str(model), "precision": "fp32"},
            "data": {"train": "unused", "max_prompt_tokens": 8}, "rollout": {"max_response_tokens": 8},
            "training": {"max_tokens_per_microbatch": 64},
        }  # fmt: skip
        launch = LaunchSpec(model, max_model_len=128, platform="cpu", precision="fp32", seed=0)
        with actor_of(validate(tree)) as actor:
            for transport, target in {"shm": TARGETS["shm"]}.items() if options.quick else TARGETS.items():
                cfg = validate(tree | {"sync": {"bucket_mib": 32, "verify_every": 0, "transport": transport}}).sync
                for engine in engines:
                    rollout = RolloutConfig(engine=engine, server=ServerConfig(kv_cache_gib=0.25, restarts=0))
                    with build_engine(rollout, launch, model / f"{engine}.log") as fleet:
                        fleet.start()
                        fleet.wait_ready()
                        seconds = measure(actor, cfg, model, fleet, 1 if options.quick else PUSHES)
                    copy, name = {"copy": seconds["copy"]}, f"{transport}, {engine}"
                    bound = (Target("ours / copy", "<=", target),)
                    found.append(Measure(12, f"{name}: gather and transport", "s", seconds["transport"], copy, bound))
                    found.append(Measure(12, f"{name}: all, with the engine loading", "s", seconds["total"], copy))
    return found
