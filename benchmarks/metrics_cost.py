"""Measure the CPU time of metrics and alerts, for each step and for each scrape, and of the engines' own counting.

    python -m benchmarks.metrics_cost [MODEL] [--engine vllm] [--rounds 40]

The endpoint answers over HTTP, with two servers whose metrics have 400 lines each. With a model, one server of the engine
counts and another one does not. In turns they sample the same 32 groups of 8, five times a round; the first is then scraped.
"""

import argparse
import math
import random
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import psutil

from tepo_megatron.config import RolloutConfig, ServerConfig
from tepo_megatron.controller.live_metrics import LiveMetrics
from tepo_megatron.controller.step_log import KEYS
from tepo_megatron.inference.engine_api import LaunchSpec
from tepo_megatron.inference.engines import build_engine
from tepo_megatron.inference.report import EngineReport, ServerReport
from tepo_megatron.inference.servers.fleet import Fleet
from tepo_megatron.observability.alerts import AlertWatch
from tepo_megatron.observability.metrics_server import KEY_FILE, serve_metrics
from tepo_megatron.rollout.collector import Progress
from tepo_megatron.types import Prompt, SamplingParams

EngineName = Literal["vllm", "sglang"]
STEPS, SCRAPES, WARM, REPEATS = 2000, 200, 3, 5
PROMPTS, SAMPLING = 32, SamplingParams(samples=8, max_tokens=24)
LINES = "".join(f'vllm:tokens_total{{engine="0",model_name="policy",kind="{i}"}} {i}.0\n' for i in range(400))


class FixedServers:
    """Two servers with metrics of usual length."""

    def report(self, seconds: float) -> EngineReport:
        """See `Lifecycle.report`."""
        names = ("one", "two")
        return EngineReport([ServerReport(n, "serving", 1, 3, 0) for n in names], 2, 1, dict.fromkeys(names, LINES))


def main() -> None:
    """Print the milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--engine", default="vllm", choices=["vllm", "sglang"])
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    print_own_cost()
    if args.model is not None:
        ratios, plain = counting_ratios(args.model, args.engine, args.rounds)
        print(f"{args.engine} samples 32 groups of 8 in {plain / REPEATS:.2f} CPU seconds if it does not count")
        error = statistics.stdev(ratios) / math.sqrt(len(ratios))
        print(f"{args.engine} that counts and is scraped: {statistics.mean(ratios) - 1:+.1%} +- {error:.1%} of its CPU seconds")


def print_own_cost() -> None:
    """Print the milliseconds of alerts, metrics and a scrape."""
    watch, record = AlertWatch(), dict.fromkeys(KEYS, 0.5) | {"seconds/total": 3.0}
    live = LiveMetrics("run", "vllm", "cpu", "tepo", 2, STEPS, Progress(), FixedServers(), dict)
    begun = time.process_time()
    for step in range(STEPS):
        watch.observe(step, record)
    judged = time.process_time()
    for step in range(STEPS):
        live.record(step, record)
    recorded = time.process_time()
    with tempfile.TemporaryDirectory() as folder, serve_metrics(Path(folder), "127.0.0.1", 0, live.text) as url:
        headers = {"Authorization": f"Bearer {(Path(folder) / KEY_FILE).read_text().strip()}"}
        begun_scrapes = time.process_time()
        for _ in range(SCRAPES):
            with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
                answer.read()
        scraped = time.process_time() - begun_scrapes
    print(f"alerts: {(judged - begun) / STEPS * 1e3:.3f} ms a step")
    print(f"metrics: {(recorded - judged) / STEPS * 1e3:.3f} ms a step")
    print(f"a scrape, both sides of it: {scraped / SCRAPES * 1e3:.1f} ms")


def counting_ratios(model: Path, engine: EngineName, rounds: int) -> tuple[list[float], float]:
    """Return the CPU seconds of a server that counts, divided by those of one that does not, for each round.

    The second number is the mean of the latter seconds.
    """
    chance, ratios, plain = random.Random(0), [], []
    tokens = [tuple(chance.randrange(4, 20) for _ in range(3 + i % 10)) for i in range(PROMPTS)]
    prompts = [Prompt(i, ids, "") for i, ids in enumerate(tokens)]
    with ExitStack() as stack:
        servers = [stack.enter_context(_server(model, engine, counts)) for counts in (False, True)]
        for number in range(WARM + rounds):
            seconds = [0.0, 0.0]
            for which in (0, 1) if number % 2 else (1, 0):
                fleet, processes = servers[which]
                begun = _cpu_seconds(processes)
                for repeat in range(REPEATS):
                    fleet.generate(prompts, SAMPLING, seed=REPEATS * number + repeat)
                if which:
                    fleet.report(10.0)
                seconds[which] = _cpu_seconds(processes) - begun
            if number >= WARM:
                ratios.append(seconds[1] / seconds[0])
                plain.append(seconds[0])
    return ratios, statistics.mean(plain)


@contextmanager
def _server(model: Path, engine: EngineName, counts: bool) -> Iterator[tuple[Fleet, list[psutil.Process]]]:
    """Yield a ready server and its processes."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    server = ServerConfig(kv_cache_gib=0.25, restart_after_growth_gib=0, restarts=0)
    launch = LaunchSpec(model, max_model_len=128, platform="cpu", precision="fp32", seed=0, counts=counts)
    with (
        tempfile.TemporaryDirectory() as folder,
        build_engine(RolloutConfig(engine=engine, server=server), launch, Path(folder) / "server.log") as fleet,
    ):
        fleet.start()
        fleet.wait_ready()
        yield fleet, [one for one in psutil.Process().children(recursive=True) if one.pid not in before]


def _cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


if __name__ == "__main__":
    main()
