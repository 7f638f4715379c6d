"""Measure how much slower rank 0 launches small operators while its rollout service takes in, grades and records tokens.

The rank is pinned to one core; the service, its graders and the fake servers are pinned to another one. It is compared with the
same load that another process has started: there the service works in the same way, but not for this rank.

python -m benchmarks.controller.slow_down FOLDER CORE URL...   (that other process; makes a step for each line of its input)
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.controller.answers import END, VOCABULARY, write_tokenizer
from benchmarks.controller.engine_rows import CAP, CONCURRENCY, MEAN, SAMPLES, WORKERS
from benchmarks.controller.fake_pool import BINARY, FakePool, PoolSpec
from benchmarks.results import ROOT
from tepo_megatron.config.io import to_yaml, validate
from tepo_megatron.controller.driver import ServiceDriver, ServiceTask
from tepo_megatron.controller.service_start import start_service
from tepo_megatron.inference.servers.server_key import KEY_VARIABLE

LAYERS, WIDTH, BATCH = 40, 64, 32  # of the network whose operators are small
SERVERS, PROMPTS = 64, 128  # PROMPTS x SAMPLES x MEAN tokens are the 12M of a step
ROUNDS = 5
ALONE_SECONDS = 2.0
STEP_SECONDS = 300.0  # limit of one step of the service
POLL_SECONDS = 0.5  # between two questions of the rank whether the rollouts are there


class PythonBackward(torch.autograd.Function):
    """The identity, whose backward is written in Python: Megatron has many of these, and each takes the interpreter's lock."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return x."""
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradient."""
        return grads[0] * 1.0


def make_rank_step() -> Callable[[], None]:
    """Return a forward and backward pass of many small operators, as Megatron's Python launches them."""
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    x = torch.randn(BATCH, WIDTH)

    def step() -> None:
        h = x
        for layer in layers:
            h = PythonBackward.apply(torch.nn.functional.gelu(layer(h))) + h
        h.sum().backward()
        for layer in layers:
            layer.zero_grad()

    return step


def steps_per_second(step: Callable[[], None], done: Callable[[], bool]) -> float:
    """Return how often the calling thread runs `step` in a second, until something is done."""
    start = asked = time.monotonic()
    count = 0
    while True:
        step()
        count += 1
        now = time.monotonic()
        if now - asked >= POLL_SECONDS:
            if done():
                return count / (now - start)
            assert now - start < STEP_SECONDS, "the service does not finish its step"
            asked = time.monotonic()


@contextlib.contextmanager
def driver_of(folder: Path, core: int, urls: Sequence[str]) -> Iterator[ServiceDriver]:
    """Yield rank 0's driver, whose service runs on one core."""
    model, data, run = folder / "model", folder / "data.jsonl", folder / "run"
    write_tokenizer(model)
    (model / "config.json").write_text(json.dumps({"eos_token_id": END, "vocab_size": VOCABULARY}))
    # each character is a token; the chat template of a model without one is not needed for plain text
    data.write_text("".join(json.dumps({"prompt": f"problem {i} " * 20, "answer": str(i)}) + "\n" for i in range(PROMPTS)))
    run.mkdir()
    cfg = validate(
        {
            "name": "run", "output": str(folder), "platform": "cpu", "model": {"path": str(model)},
            "data": {"train": str(data), "max_prompt_tokens": 400}, "objective": {"name": "tepo"},
            "training": {"steps": 10**6, "max_tokens_per_microbatch": 2 * CAP},
            "reward": {"workers": WORKERS},
            "rollout": {
                "only": True, "servers": len(urls), "prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES,
                "max_response_tokens": CAP + 1, "filter_uniform_groups": False,
                "server": {"urls": list(urls), "concurrency": CONCURRENCY},
            },
        }
    )  # fmt: skip
    (run / "config.yaml").write_text(to_yaml(cfg))
    os.environ[KEY_VARIABLE] = "k" * 32
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})  # a process that is started inherits it
    with start_service(STEP_SECONDS) as client:
        os.sched_setaffinity(0, before)
        client.call("open", cfg)
        driver = ServiceDriver(client, cfg)
        driver.resume(None)
        driver.wait_engine()
        yield driver


def finished(driver: ServiceDriver, task: ServiceTask) -> None:
    """Release the memory of a step that is done."""
    header = task.wait().result
    assert header.tokens > PROMPTS * SAMPLES * MEAN / 2
    driver.release(header.path)


def slow_down() -> dict[str, float]:
    """Measure the rank in turn: alone, while another process's service makes a step, and while its own service does.

    Returns:
        Median steps per second of each, and the slow-down: the rate with the other process's service divided by that with
        its own.
    """
    core, other = sorted(os.sched_getaffinity(0))[:2]
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {core})
    step, rates = make_rank_step(), dict[str, list[float]]()
    spec = PoolSpec(SERVERS, MEAN, CAP, format=BINARY, core=other)
    with FakePool(spec) as pool, tempfile.TemporaryDirectory(prefix="slow-down-") as name, contextlib.ExitStack() as stack:
        folders = [Path(name) / kind for kind in ("own", "other")]
        for folder in folders:
            folder.mkdir()
        command = [sys.executable, "-m", "benchmarks.controller.slow_down", str(folders[1]), str(other), *pool.urls]
        process = stack.enter_context(subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        stack.callback(process.kill)
        assert process.stdout is not None
        answers = process.stdout
        driver = stack.enter_context(driver_of(folders[0], other, pool.urls))
        _ask(process)
        answers.readline()  # a first step of both, which imports and starts what is needed
        finished(driver, driver.collect(1))
        os.set_blocking(answers.fileno(), False)
        for number in range(ROUNDS):
            rates.setdefault("alone", []).append(steps_per_second(step, partial(_past, time.monotonic() + ALONE_SECONDS)))
            _ask(process)
            answered = steps_per_second(step, lambda: bool(answers.readline()))
            rates.setdefault("another process's service", []).append(answered)
            task = driver.collect(number + 2)
            rates.setdefault("its own service", []).append(steps_per_second(step, partial(getattr, task, "done")))
            finished(driver, task)
    median = {kind: sorted(found)[len(found) // 2] for kind, found in rates.items()}
    return median | {"slow-down": median["another process's service"] / median["its own service"]}


def _past(moment: float) -> bool:
    return time.monotonic() > moment


def _ask(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()


def _main(folder: Path, core: int, urls: Sequence[str]) -> None:
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    with driver_of(folder, core, urls) as driver:
        for number, _ in enumerate(sys.stdin, 1):
            finished(driver, driver.collect(number))
            print(number, flush=True)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
