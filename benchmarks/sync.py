"""How long the delivery of weights to an engine takes, against a copy of the same bytes into shared memory.

    python -m benchmarks.sync [--quick] [--engines vllm,sglang] [--pushes 5] [--bucket-mib 32] [--json FILE]
    torchrun --nproc-per-node 2 -m benchmarks.sync --tp 2

Makes a random Qwen3 in fp32 (50 M parameters, 200 MB), serves it with each engine on the CPU, and pushes its weights. Of each
push: seconds to gather and write all rounds when nobody reads them (transport), seconds of the whole push with the engine
(total), and the seconds in between that the engine was loading. The copy, made just before by one process, writes as many bytes
to one file in /dev/shm. Medians; the first push of each engine warms up and is not counted. Target: transport <= 3 copies.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from tepo_megatron.config import Config, RolloutConfig, ServerConfig
from tepo_megatron.config_io import validate
from tepo_megatron.platform import activate
from tepo_megatron.rollout.engine import Launch
from tepo_megatron.rollout.engines import build_engine
from tepo_megatron.rollout.fleet import Fleet

if TYPE_CHECKING:  # Megatron-Core is imported after the platform is active
    from tepo_megatron.actor.actor import Actor
    from tepo_megatron.weights.sync import WeightSync

TARGET = 3.0  # copies
SHAPE = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32_000,
}  # fmt: skip
QUICK = SHAPE | {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "head_dim": 32, "vocab_size": 512}


class Nobody:
    """A receiver that takes everything at once and reads nothing."""

    def begin_update(self, version: int) -> None: ...

    def load(self, files: Sequence[Path]) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def finish_update(self) -> None: ...


class Timed:
    """A fleet, with the seconds in which it was loading or finishing."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.seconds = fleet, 0.0

    def begin_update(self, version: int) -> None:
        start, self.seconds = time.perf_counter(), 0.0
        self.fleet.begin_update(version)
        self.seconds += time.perf_counter() - start

    def load(self, files: Sequence[Path]) -> Future[None]:
        start = time.perf_counter()
        loading = self.fleet.load(files)
        loading.add_done_callback(lambda _: self._add(start))
        return loading

    def finish_update(self) -> None:
        start = time.perf_counter()
        self.fleet.finish_update()
        self._add(start)

    def _add(self, start: float) -> None:
        self.seconds += time.perf_counter() - start


def copy_seconds(source: torch.Tensor) -> float:
    """Of writing these bytes to a file in shared memory."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", buffering=0) as file:
        start = time.perf_counter()
        left = memoryview(source.numpy())
        while left:
            left = left[file.write(left[: 16 * 2**20]) :]
        return time.perf_counter() - start


def timed_push(sync: WeightSync, version: int) -> float:
    start = time.perf_counter()
    sync.push(version)
    return time.perf_counter() - start


def measure(actor: Actor, cfg: Config, engine: Fleet | None, nbytes: int, pushes: int) -> dict[str, float]:
    """Median seconds: copy of `nbytes`, transport, and with an engine loading, total; rounds."""
    source = torch.ones(nbytes, dtype=torch.uint8)
    from tepo_megatron.weights.sync import WeightSync

    receiver = Timed(engine) if engine is not None else None
    main = actor.groups.is_main
    times: dict[str, list[float]] = {"copy": [], "transport": [], "total": [], "loading": []}
    with (
        WeightSync(cfg.sync, actor.bindings, actor.arch, actor.groups, Nobody() if main else None) as alone,
        WeightSync(cfg.sync, actor.bindings, actor.arch, actor.groups, receiver) as served,
    ):
        for version in range(pushes + 1):
            once = {"copy": copy_seconds(source), "transport": timed_push(alone, version), "total": timed_push(served, version)}
            once["loading"] = receiver.seconds if receiver is not None else 0.0
            if version:
                for name, seconds in once.items():
                    times[name].append(seconds)
        rounds = served.rounds
    return {name: statistics.median(seconds) for name, seconds in times.items()} | {"rounds": rounds}


def write_model(shape: dict[str, int], folder: Path) -> Path:
    """A random model (every rank its own, of the same seed)."""
    torch.manual_seed(0)
    config = Qwen3Config(**shape, max_position_embeddings=512, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    return folder / "model"


def report(name: str, nbytes: int, times: dict[str, float]) -> None:
    """A row of the table."""
    copies = times["transport"] / times["copy"]
    print(
        f"{name:7s} {nbytes / 1e6:6.0f} MB {times['rounds']:4.0f} rounds  copy {times['copy']:.3f} s  transport "
        f"{times['transport']:.3f} s ({copies:.1f} copies, target {TARGET:g}: {'met' if copies <= TARGET else 'MISSED'})  "
        f"engine loading {times['loading']:.3f} s  total {times['total']:.3f} s"
    )


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that it runs")
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
            "sync": {"bucket_mib": args.bucket_mib, "verify_every": int(args.verify)},
        })  # fmt: skip
        platform = activate("cpu")
        from tepo_megatron import parallel
        from tepo_megatron.actor.actor import Actor

        groups = parallel.initialize(cfg.parallel, platform, cfg.seed)
        actor = Actor(cfg, groups)
        nbytes = sum(p.stat().st_size for p in model.glob("*.safetensors"))
        results = {}
        for name in args.engines.split(","):
            results[name] = with_engine(name, actor, cfg, model, nbytes, args.pushes)
            if groups.is_main:
                report(name, nbytes, results[name])
        if args.json and groups.is_main:
            args.json.write_text(json.dumps(results))
        parallel.shutdown()


def with_engine(name: Any, actor: Actor, cfg: Config, model: Path, nbytes: int, pushes: int) -> dict[str, float]:
    """The measures of one engine, which rank 0 starts and ends."""
    if not actor.groups.is_main:
        return measure(actor, cfg, None, nbytes, pushes)
    server = ServerConfig(kv_cache_gib=0.25, ready_seconds=300, restarts=0)
    launch = Launch(model, max_model_len=128, platform="cpu", precision="fp32", seed=0)
    with build_engine(RolloutConfig(engine=name, server=server), launch, model / f"{name}.log") as engine:
        engine.start()
        engine.wait_ready()
        return measure(actor, cfg, engine, nbytes, pushes)


if __name__ == "__main__":
    main()
