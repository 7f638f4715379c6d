"""Measure how much memory a server keeps from step to step.

    python -m benchmarks.server_memory MODEL [--engine vllm] [--steps 100]

Starts one server on the CPU with a small Hugging Face model. A step does to it what a run does: the weights are delivered as
files, then 32 groups of 4 samples of up to 20 tokens are sampled. Resident MiB and CPU seconds of its processes are printed at
each tenth of the steps. ONEDNN_PRIMITIVE_CACHE_CAPACITY=1024 in the environment is oneDNN's own default.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from pathlib import Path

import psutil

from tepo_megatron.config import RolloutConfig, ServerConfig
from tepo_megatron.inference.engine_api import LaunchSpec
from tepo_megatron.inference.engines import build_engine
from tepo_megatron.types import Prompt, SamplingParams

PROMPTS, SAMPLING = 32, SamplingParams(samples=4, max_tokens=20)
VOCABULARY = 64  # token IDs of the prompts are below this


def main() -> None:
    """Run the steps and print a line for each tenth of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--engine", default="vllm", choices=["vllm", "sglang"])
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    chance = random.Random(0)
    tokens = [tuple(chance.randrange(4, VOCABULARY) for _ in range(3 + i % 10)) for i in range(PROMPTS)]
    prompts = [Prompt(id=i, token_ids=ids, answer="") for i, ids in enumerate(tokens)]
    server = ServerConfig(kv_cache_gib=0.25, restart_after_growth_gib=0, ready_seconds=3600, heartbeat_timeout=600, restarts=0)
    launch = LaunchSpec(args.model, max_model_len=128, platform="cpu", precision="fp32", seed=0)
    with (
        tempfile.TemporaryDirectory() as folder,
        build_engine(RolloutConfig(engine=args.engine, server=server), launch, Path(folder) / "server.log") as engine,
    ):
        # a server reads weights from a folder of mode 0700 alone, which the model's own need not be
        files = [Path(shutil.copy(file, folder)) for file in sorted(args.model.glob("*.safetensors"))]
        engine.start()
        engine.wait_ready()
        for step in range(args.steps + 1):
            if step % max(1, args.steps // 10) == 0:
                mine = psutil.Process().children(recursive=True)
                seconds = sum(sum(process.cpu_times()[:2]) for process in mine)
                print(f"step {step:6d}  {engine.resident_bytes() / 2**20:8.0f} MiB  {seconds:8.1f} CPU s", flush=True)
            engine.update_weights(files, version=step)
            engine.generate(prompts, SAMPLING, seed=step)


if __name__ == "__main__":
    main()
