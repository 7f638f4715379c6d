"""Measure the CPU time of metrics and alerts: `python -m benchmarks.metrics_cost`, for each step and for each scrape.

The endpoint answers over HTTP, with two servers whose metrics have 400 lines each. The engines' own counting is not in it.
"""

import tempfile
import time
import urllib.request
from pathlib import Path

from tepo_megatron.controller.live_metrics import LiveMetrics
from tepo_megatron.controller.step_log import KEYS
from tepo_megatron.inference.report import EngineReport, ServerReport
from tepo_megatron.observability.alerts import AlertWatch
from tepo_megatron.observability.metrics_server import KEY_FILE, serve_metrics
from tepo_megatron.rollout.collector import Progress

STEPS, SCRAPES = 2000, 200
LINES = "".join(f'vllm:tokens_total{{engine="0",model_name="policy",kind="{i}"}} {i}.0\n' for i in range(400))


class FixedServers:
    """Two servers with metrics of usual length."""

    def report(self, seconds: float) -> EngineReport:
        """See `Lifecycle.report`."""
        names = ("one", "two")
        return EngineReport([ServerReport(n, "serving", 1, 3, 0) for n in names], 2, 1, dict.fromkeys(names, LINES))


def main() -> None:
    """Print the milliseconds."""
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


if __name__ == "__main__":
    main()
