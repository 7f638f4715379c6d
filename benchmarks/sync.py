"""Measure the delivery of weights to an engine, compared with a copy of the same bytes into shared memory.

    python -m benchmarks.sync [--quick] [--transport shm|group|ipc] [--engines vllm,sglang] [--pushes 5] [--bucket-mib 32]
    torchrun --nproc-per-node 2 -m benchmarks.sync --tp 2

Makes a random Qwen3 in fp32 (50 M parameters, 200 MB), serves it with each engine on the CPU, and pushes its weights. For each
push: seconds to gather and write all rounds (with `ipc` into the rank's own memory) while nobody reads them (transport), and
seconds until the engine has loaded them (total). The copy, made just before by one process, writes as many bytes to one file in
/dev/shm. Printed are medians; the first push of each engine warms up and is not counted. Target: transport <= 3 copies.

With `--transport group` (gloo) transport is a push to a process that receives everything and loads nothing. Target: 10 copies.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks._receiver import Receiver
from benchmarks._weights import QUICK, SHAPE, copy_seconds
from tepo_megatron.config import Config, RolloutConfig, ServerConfig
from tepo_megatron.config.io import validate
from tepo_megatron.inference.engine_api import LaunchSpec
from tepo_megatron.inference.engines import build_engine
from tepo_megatron.inference.servers.fleet import Fleet
from tepo_megatron.platform import activate
from tepo_megatron.weight_sync.broadcast_group import GroupSpec
from tepo_megatron.weight_sync.bucket_format import Source
from tepo_megatron.weight_sync.transport import Recipient

if TYPE_CHECKING:  # Megatron-Core is imported after the platform is active
    from tepo_megatron.actor.actor import Actor
    from tepo_megatron.weight_sync.sync import WeightSync

TARGETS = {"shm": 3.0, "group": 10.0, "ipc": 3.0}  # limits, in copies


class NullReceiver:
    """A receiver that accepts everything at once, reads nothing, and never joins a process group."""

    recipients: tuple[Recipient, ...] = ()

    def join_groups(self, specs: Mapping[Recipient, GroupSpec]) -> Future[None]:
        raise AssertionError("this receiver joins no group")

    base: int | None = None

    def begin_update(self, version: int) -> None: ...

    def keep_unchanged(self, names: Sequence[str]) -> None: ...

    def load(self, sources: Sequence[Source]) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def finish_update(self) -> None: ...

    def verify(self, sent: Mapping[str, int]) -> None: ...


def timed_push(sync: WeightSync, version: int) -> float:
    """Push the weights and return the seconds until all ranks have finished."""
    start = time.perf_counter()
    sync.push(version)
    return time.perf_counter() - start


def measure(actor: Actor, cfg: Config, engine: Fleet | None, nbytes: int, pushes: int) -> dict[str, float]:
    """Return median seconds: copy of `nbytes`, transport and total; and the number of rounds."""
    source = torch.ones(nbytes, dtype=torch.uint8)
    from tepo_megatron.weight_sync.sync import make_weight_sync

    main, grouped = actor.groups.is_main, cfg.sync.transport.type == "group"
    times: dict[str, list[float]] = collections.defaultdict(list)
    with contextlib.ExitStack() as stack:

        def sync_to(receiver: Any) -> WeightSync:
            return stack.enter_context(make_weight_sync(cfg.sync, actor.bindings, actor.arch, actor.groups, receiver))

        recipient: Any = None
        if main:
            recipient = stack.enter_context(Receiver(Path(cfg.model.path))) if grouped else NullReceiver()
        syncs = {"transport": sync_to(recipient), "total": sync_to(engine)}
        for version in range(pushes + 1):
            once = {"copy": copy_seconds(source)} | {name: timed_push(sync, version) for name, sync in syncs.items()}
            if version:
                for name, seconds in once.items():
                    times[name].append(seconds)
        rounds = syncs["total"].rounds
    return {name: statistics.median(seconds) for name, seconds in times.items()} | {"rounds": rounds}


def write_model(shape: dict[str, int], folder: Path) -> Path:
    """Write a random model; every rank writes its own, with the same seed."""
    torch.manual_seed(0)
    config = Qwen3Config(**shape, max_position_embeddings=512, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    return folder / "model"


def report(name: str, transport: str, nbytes: int, times: dict[str, float]) -> None:
    """Print a row of the table."""
    copies, target = times["transport"] / times["copy"], TARGETS[transport]
    print(
        f"{name:7s} {nbytes / 1e6:6.0f} MB {times['rounds']:4.0f} rounds  copy {times['copy']:.3f} s  transport "
        f"{times['transport']:.3f} s ({copies:.1f} copies, target {target:g}: {'met' if copies <= target else 'MISSED'})  "
        f"total {times['total']:.3f} s"
    )


def main() -> None:
    """Make the model, measure with each engine, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--transport", choices=TARGETS, default="shm")
    parser.add_argument("--engines", default="vllm,sglang")
    parser.add_argument("--pushes", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=32)
    parser.add_argument("--verify", action="store_true", help="with checksums in every push")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the medians there too, in seconds, by engine")
    args = parser.parse_args()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29512")):
        os.environ.setdefault(name, value)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        model = write_model(QUICK if args.quick else SHAPE, Path(temporary))
        cfg = validate({
            "name": "benchmark", "platform": "cpu", "model": {"path": str(model), "precision": "fp32"},
            "data": {"train": "unused", "max_prompt_tokens": 8}, "rollout": {"max_response_tokens": 8},
            "training": {"max_tokens_per_microbatch": 64},
            "parallel": {"tp": args.tp, "dp": int(os.environ["WORLD_SIZE"]) // args.tp},
            "sync": {"bucket_mib": args.bucket_mib, "verify_every": int(args.verify), "transport": args.transport},
        })  # fmt: skip
        platform = activate("cpu")
        from tepo_megatron.actor.actor import Actor
        from tepo_megatron.distributed import parallel

        groups = parallel.initialize(cfg.parallel, platform, cfg.seed)
        actor = Actor.open(cfg, groups)
        nbytes = sum(p.stat().st_size for p in model.glob("*.safetensors"))
        results = {}
        for name in args.engines.split(","):
            results[name] = with_engine(name, actor, cfg, model, nbytes, args.pushes)
            if groups.is_main:
                report(name, args.transport, nbytes, results[name])
        if args.json and groups.is_main:
            args.json.write_text(json.dumps(results))
        parallel.shutdown()


def with_engine(name: Any, actor: Actor, cfg: Config, model: Path, nbytes: int, pushes: int) -> dict[str, float]:
    """Return the measures of one engine, which rank 0 starts and ends."""
    if not actor.groups.is_main:
        return measure(actor, cfg, None, nbytes, pushes)
    server = ServerConfig(kv_cache_gib=0.25, restarts=0)
    launch = LaunchSpec(model, max_model_len=128, platform="cpu", precision="fp32", seed=0)
    with build_engine(RolloutConfig(engine=name, server=server), launch, model / f"{name}.log") as engine:
        engine.start()
        engine.wait_ready()
        return measure(actor, cfg, engine, nbytes, pushes)


if __name__ == "__main__":
    main()
