"""Ten steps of the 14B recipe on 64 GPUs, with its counts and lengths; a server is killed, and the run (`make rehearsal`).

Service, graders, gateway, batch memory, launcher and the coordination of pushes are real, and so are `tepo serve` and the way
of a batch to the ranks. Four rank processes stand for the recipe's 32 and read each batch as often as these.
"""

import json
import os
import signal
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
from tepo_megatron.command.start import needed_open_files
from tepo_megatron.config.io import load_config
from tepo_megatron.rollout.custom import FILES_OF_AN_AGENT
from tepo_megatron.rollout.decisions import read_history
from tests.e2e.conftest import ROOT, Command, commands
from tests.fast_clock.clock import SPEED, sweep, variables
from tests.recorded import step_records, steps_taken
from tests.rehearsal.rank import MESSAGE, READS
from tests.rehearsal.scripted import TRAINED
from tests.tiny import VOCAB_SIZE, char_tokenizer

pytestmark = [pytest.mark.full, pytest.mark.fast_clock]
RECIPE = ROOT / "examples/recipes/qwen3-14b-64gpu-apart.yaml"
STEPS, PROCESSES, PROMPTS, TOKENS = 10, 4, 17_398, 151_669  # ranks' processes; prompts of the dataset; of Qwen3's tokenizer
LIMIT = 1200.0  # real seconds of one wait


def write_inputs(folder: Path, speed: float) -> Path:
    """Write what the service reads of Qwen3-14B, fractions behind texts of 256 tokens on average, and the recipe; return it."""
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"], vocab_size=151_936, hidden_size=5120, intermediate_size=17408,
        num_hidden_layers=40, num_attention_heads=40, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
        tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    ).save_pretrained(folder / "model")  # fmt: skip
    char_tokenizer(TOKENS - VOCAB_SIZE).save_pretrained(folder / "model")
    save_file({"model.norm.weight": torch.zeros(5120)}, folder / "model" / "model.safetensors")
    chance, rows = Random(0), []
    for a in range(1000, 1000 + PROMPTS):
        text = "".join(chance.choices("abcdefghijklmnopqrstuvwxyz ", k=min(1960, round(chance.lognormvariate(5.2, 0.8)))))
        b = chance.randrange(3, 1000)
        rows.append({"prompt": f"{text}\n{a}/{b}=?\n", "answer": f"\\frac{{{a}}}{{{b}}}"})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
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

    def measure(service: psutil.Process) -> None:
        memory = Path(f"/proc/{service.pid}/status").read_text().partition("VmHWM:")[2].split()[0]
        graders = [child.memory_info().rss // 2**20 for child in service.children()]
        sizes = {"MiB": int(memory) // 1024, "MiB of graders": sum(graders), "graders": len(graders)}
        now = sizes | {"open files": service.num_fds()}
        peaks.update({key: max(value, peaks.get(key, 0)) for key, value in now.items()})

    def watch() -> None:
        pids: list[int] = []
        while not over.wait(0.2):
            pids = pids or [int(x.split()[0]) for x in command.left_over() if "service.service" in x and "guard" not in x]
            with suppress(psutil.Error, OSError, IndexError):  # it has not started, or has ended
                measure(psutil.Process(pids[0]))

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            yield
        finally:
            over.set()
    watching.result(LIMIT)


def counts_of(servers: Command) -> list[dict[str, Any]]:
    """Return what the servers that run now have counted: connections, and bytes of requests and answers."""
    counts = []
    for url in servers.ready_urls():
        with suppress(OSError):  # it has ended
            counts.append(json.load(urllib.request.urlopen(f"{url}/counts", timeout=LIMIT)))
    return counts


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check_accounts(run: Path) -> None:
    """Assert that every prompt that was asked for is trained on once and whole, or all its samples were graded alike."""
    cfg = load_config(run / "config.yaml").rollout
    history, trained = read_history(run), {row["step"]: row["prompts"] for row in rows_of(run / TRAINED)}
    assert not history.faults and list(history.steps) == sorted(trained) == list(range(1, STEPS + 1))
    ended: list[int] = []
    for step, line in history.steps.items():
        arrived, kept = {group[0]: group[1] for group in line["arrived"]}, set(trained[step])
        assert set(arrived.values()) <= {"kept", "uniform"} and not line["left"]
        assert sorted(prompt for asked in line["asked"] for prompt in asked) == sorted(group[0] for group in line["arrived"])
        assert kept == {prompt for prompt, verdict in arrived.items() if verdict == "kept"}
        assert sorted(trained[step]) == sorted([*kept] * cfg.samples_per_prompt) and len(kept) == cfg.prompts_per_step
        ended += arrived
    assert len(ended) == len(set(ended)), "a prompt was sampled for two steps"


def test_ten_steps_of_the_14b_recipe(tmp_path: Path) -> None:
    speed, run, peaks = float(os.environ[SPEED]), tmp_path / "run", dict[str, int]()
    config = write_inputs(tmp_path, speed)
    reads = load_config(RECIPE).parallel.world_size // PROCESSES
    with commands(tmp_path) as begin:
        start = partial(begin, env=variables(speed) | {READS: str(reads)})
        servers = start(config, "127.0.0.2", module="tests.rehearsal.serve")
        train = partial(start, "train", config, module="tests.rehearsal.rank")
        with watched(first := train(), peaks):
            first.until(lambda: steps_taken(run) >= 2, LIMIT)
            os.kill(servers.oldest_server("tests.rehearsal.server"), signal.SIGKILL)
            first.until(lambda: 6 in steps(run / "checkpoints") and len(rows_of(run / TRAINED)) >= 7, LIMIT)
            counts = counts_of(servers)
            first.process.kill()
        first.assert_nothing_left()
        agent = ("--rollout.function", "examples/agents/calculator.py:calculator")
        with watched(second := train("--resume", "true", *agent), peaks):
            second.until(lambda: rows_of(run / TRAINED)[-1]["step"] == STEPS, LIMIT)
            counts += counts_of(servers)
            assert second.wait(LIMIT) == 0, second.output
        second.assert_nothing_left()
        servers.process.terminate()
        assert servers.wait(LIMIT) == 0, servers.output
        servers.assert_nothing_left()
    sweep()
    metrics = step_records(run)
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    lost = [f"rollout/samples_{why}" for why in ("raised", "timed_out", "over_limit")] + ["grading/timeout", "grading/died"]
    assert not any(row.get(key) for row in metrics for key in lost), metrics
    assert sum(row["rollout/server_restarts"] for row in metrics) == 1 and "is sampled again" in first.output
    check_accounts(run)
    cfg = load_config(run / "config.yaml")
    of_agents = FILES_OF_AN_AGENT * cfg.rollout.prompts_per_step * cfg.rollout.samples_per_prompt
    assert peaks["open files"] <= needed_open_files(PROCESSES, cfg.rollout, cfg.reward) + of_agents and peaks["MiB"] < 2048
    largest = {key: max(count[key] for count in counts) for key in ("most_open", "request", "answer")}
    print(json.dumps(peaks | largest | {"message": json.loads((run / MESSAGE).read_text())}))
