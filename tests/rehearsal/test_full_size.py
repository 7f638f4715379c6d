"""Ten steps of the 14B recipe on 64 GPUs, with its counts and lengths: one server is killed, and the run once (`make rehearsal`).

Service, graders, gateway, batch memory, launcher and the coordination of pushes are real, and so are `tepo serve` and the way of
a batch to the ranks. Four rank processes stand for the recipe's 32 and read each batch as often as these.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import save_file
from transformers import Qwen3Config

from tepo_megatron.checkpoint.folder import steps
from tepo_megatron.config.io import load_config
from tepo_megatron.rollout.decisions import read_history
from tests.e2e.conftest import ROOT, Command, commands
from tests.fast_clock.clock import SPEED, sweep, variables
from tests.rehearsal.rank import MESSAGE, READS, TRAINED
from tests.tiny import VOCAB_SIZE, char_tokenizer

pytestmark = [pytest.mark.full, pytest.mark.fast_clock]
RECIPE = ROOT / "examples/recipes/qwen3-14b-64gpu-apart.yaml"
STEPS, PROCESSES, PROMPTS = 10, 4, 17_398  # ranks' processes; prompts of the recipe's dataset
TOKENIZER, VOCABULARY = 151_669, 151_936  # sizes of Qwen3's
LIMIT = 1200.0  # real seconds of one wait


def write_model(path: Path) -> None:
    """Write what the service reads of Qwen3-14B: its shape and a tokenizer of its size, of characters and words."""
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"], vocab_size=VOCABULARY, hidden_size=5120, intermediate_size=17408,
        num_hidden_layers=40, num_attention_heads=40, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
        tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    ).save_pretrained(path)  # fmt: skip
    char_tokenizer(TOKENIZER - VOCAB_SIZE).save_pretrained(path)
    save_file({"model.norm.weight": torch.zeros(5120)}, path / "model.safetensors")


def write_prompts(path: Path) -> None:
    """Write fractions behind texts of 256 tokens on average and 2000 at most, each another prompt."""
    chance = Random(0)
    with path.open("w") as file:
        for i in range(PROMPTS):
            text = "".join(chance.choices("abcdefghijklmnopqrstuvwxyz ", k=min(1960, round(chance.lognormvariate(5.2, 0.8)))))
            a, b = 1000 + i, chance.randrange(3, 1000)
            file.write(json.dumps({"prompt": f"{text}\n{a}/{b}=?\n", "answer": f"\\frac{{{a}}}{{{b}}}"}) + "\n")


def write_config(folder: Path, speed: float) -> Path:
    """Write the recipe with paths of this machine, fewer ranks, and a checkpoint in every second step."""
    keys = {
        "base": str(RECIPE), "name": "run", "output": str(folder), "platform": "cpu", "export_hf": False,
        "model": {"path": str(folder / "model")}, "data": {"train": str(folder / "train.jsonl")},
        "parallel": {"tp": 1, "dp": PROCESSES, "sequence_parallel": False}, "evaluation": {"benchmarks": []},
        "rollout": {"server": {"rendezvous": str(folder / "servers")}}, "training": {"steps": STEPS},
        "reward": {"timeout_seconds": 4.0 * speed}, "checkpoint": {"every": 2},
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(keys))
    return folder / "recipe.yaml"


@contextmanager
def watched(command: Command, peaks: dict[str, int]) -> Iterator[None]:
    """Measure the command's service meanwhile: its peak memory, open files and processes."""
    over = threading.Event()

    def service() -> psutil.Process | None:
        lines = [line for line in command.left_over() if "controller.service" in line and "guard" not in line]
        return psutil.Process(int(lines[0].split()[0])) if lines else None

    def watch() -> None:
        found = None
        while not over.wait(0.5):
            with suppress(psutil.Error, OSError):
                found = found or service()
                if found is not None:
                    status = Path(f"/proc/{found.pid}/status").read_text()
                    children = found.children(recursive=True)
                    now = {
                        "memory_mib": int(status.partition("VmHWM:")[2].split()[0]) // 1024, "open_files": found.num_fds(),
                        "threads": found.num_threads(), "processes": 1 + len(children),
                        "children_mib": sum(child.memory_info().rss for child in children) // 2**20,
                    }  # fmt: skip
                    peaks.update({key: max(value, peaks.get(key, 0)) for key, value in now.items()})

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(LIMIT)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in folder.glob("*.json")]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check_accounts(run: Path) -> None:
    """Assert that every prompt that was asked for is trained on once and whole, or all its samples were graded alike."""
    cfg = load_config(run / "config.yaml")
    history, trained = read_history(run), {row["step"]: row["prompts"] for row in rows_of(run / TRAINED)}
    assert not history.faults and list(history.steps) == sorted(trained) == list(range(1, STEPS + 1))
    ended: list[int] = []
    for step, line in history.steps.items():
        kept = [prompt for prompt, verdict, *_ in line["arrived"] if verdict == "kept"]
        assert {verdict for _, verdict, *_ in line["arrived"]} <= {"kept", "uniform"} and not line["left"]
        assert sorted(p for asked in line["asked"] for p in asked) == sorted(prompt for prompt, *_ in line["arrived"])
        assert len(kept) == cfg.rollout.prompts_per_step and set(trained[step]) == set(kept)
        assert len(trained[step]) == len(kept) * cfg.rollout.samples_per_prompt
        ended += [prompt for prompt, *_ in line["arrived"]]
    assert len(ended) == len(set(ended)), "a prompt was sampled for two steps"


def test_ten_steps_of_the_14b_recipe(tmp_path: Path) -> None:
    speed, run = float(os.environ[SPEED]), tmp_path / "run"
    write_model(tmp_path / "model")
    write_prompts(tmp_path / "train.jsonl")
    config = write_config(tmp_path, speed)
    reads = load_config(RECIPE).parallel.world_size // PROCESSES
    peaks: dict[str, int] = {}
    with commands(tmp_path) as begin:
        start = partial(begin, env=variables(speed) | {READS: str(reads)})
        servers = start(config, "127.0.0.2", module="tests.rehearsal.serve")
        first = start("train", config, module="tests.rehearsal.rank")
        with watched(first, peaks):
            first.until(lambda: len(rows_of(run / "metrics.jsonl")) >= 2, LIMIT)
            os.kill(servers.oldest_server("tests.rehearsal.server"), signal.SIGKILL)
            first.until(lambda: 6 in steps(run / "checkpoints") and len(rows_of(run / TRAINED)) >= 7, LIMIT)
            first.process.kill()
        first.assert_nothing_left()
        agent = ("--rollout.function", "examples/agents/calculator.py:calculator")
        second = start("train", config, "--resume", "true", *agent, module="tests.rehearsal.rank")
        with watched(second, peaks):
            assert second.wait(LIMIT) == 0, second.output
        second.assert_nothing_left()
        counts = [json.load(urllib.request.urlopen(f"{row['url']}/counts")) for row in records(tmp_path / "servers")]
        servers.process.terminate()
        assert servers.wait(LIMIT) == 0, servers.output
        servers.assert_nothing_left()
    sweep()
    metrics = rows_of(run / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    lost = (
        "rollout/samples_raised",
        "rollout/samples_timed_out",
        "rollout/samples_over_limit",
        "grading/timeout",
        "grading/died",
    )
    assert not any(row.get(key) for row in metrics for key in lost), metrics
    assert sum(row["rollout/server_restarts"] for row in metrics) == 1
    check_accounts(run)
    print(json.dumps({**peaks, "message": json.loads((run / MESSAGE).read_text()), "servers": counts}))
