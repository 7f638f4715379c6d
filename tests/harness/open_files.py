"""Count the files that the processes of a short run have open at once.

`tepo_megatron/launcher/open_files.py` has its figure from here.

    python -m tests.harness.open_files [--engine vllm|sglang|scripted] [--tp 2] [--dp 1] [--steps 4]

Prints, for each role, the greatest count that was seen in any process of it, and what of it the formula has terms for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tepo_megatron.config.io import load_config
from tepo_megatron.launcher.open_files import needed_open_files
from tests.e2e.conftest import Command, commands, settings
from tests.harness.chaos import roles_of
from tests.tiny import tiny_qwen3

POLL_SECONDS = 0.05
RUN_SECONDS = 1500.0


def open_files(pid: int) -> Counter[str]:
    """Return the open files of a process by kind; empty if it has ended."""
    found: Counter[str] = Counter()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                found[target.partition(":")[0] if ":[" in target or target.startswith("anon_inode:") else "file"] += 1
    return found


def watch(command: Command) -> dict[str, Counter[str]]:
    """Watch a command until it ends; return the open files of the fullest process of each role, by kind."""
    greatest: dict[str, Counter[str]] = {}
    deadline = time.monotonic() + RUN_SECONDS
    while command.process.poll() is None:
        assert time.monotonic() < deadline, command.output
        for role, processes in roles_of(command.process.pid).items():
            for process in processes if role != "all" else ():
                found = open_files(process.pid)
                if found.total() > greatest.get(role, Counter()).total():
                    greatest[role] = found
        time.sleep(POLL_SECONDS)
    assert command.process.returncode == 0, command.output
    return greatest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tepo-open-files-") as made:
        folder = Path(made)
        tiny_qwen3(folder / "model", layers=2)
        rows = "".join(json.dumps({"prompt": f"1+{i}?\n", "answer": str(1 + i)}) + "\n" for i in range(40))
        for name in ("train.jsonl", "eval.jsonl"):
            (folder / "model" / name).write_text(rows)
        keys: dict[str, Any] = {
            "output": folder / "runs", "name": "counted", "training__steps": args.steps, "checkpoint__every": 2,
            "parallel__tp": args.tp, "parallel__dp": args.dp, "rollout__prompts_per_step": 8,
            "training__minibatch_prompts": 4, "rollout__record": "true", "rollout__filter_uniform_groups": "false",
            "rollout__server__kv_cache_gib": 0.25, "rollout__server__ready_seconds": 1200, "evaluation__max_problems": 8,
            "sync__max_logprob_diff": "1e-3", "logging__tensorboard": "true",
        }  # fmt: skip
        keys |= {} if args.engine == "scripted" else {"rollout__engine": args.engine}
        words = settings(folder / "model", **keys)
        with commands(folder) as start:
            engine = "slow" if args.engine == "scripted" else None
            greatest = watch(start("train", "examples/demo.yaml", *words, engine=engine))
        cfg = load_config(folder / "runs" / "counted" / "config.yaml")
    for role, found in greatest.items():
        print(f"{role:10} {found.total():4}  {dict(found.most_common())}")
    limit = f"{cfg.parallel.world_size} ranks, {cfg.reward.workers} grading workers"
    needed = needed_open_files(cfg.parallel.world_size, cfg.rollout, cfg.reward)
    print(f"limit that the run asks for: {needed} ({limit}, {cfg.rollout.server.concurrency} requests at once)")


if __name__ == "__main__":
    main()
