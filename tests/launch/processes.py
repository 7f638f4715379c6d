"""Start every kind of process of a run through the run's own code: `python processes.py CONFIG`, in the place of `tepo train`.

Only the work of the processes is missing: no model is loaded and no server answers.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tepo_megatron.config import CustomTermConfig
from tepo_megatron.config.io import load_config
from tepo_megatron.controller.service_start import start_service
from tepo_megatron.inference.servers.process import ServerProcess
from tepo_megatron.launcher.ranks import Lifeline, RankProcesses
from tepo_megatron.rewards.process import GradingWorker
from tepo_megatron.utils import user_file

# of the engines, which tests without servers do not start: the plugin in vLLM's processes, and the program that is SGLang's
ENGINES = {
    "vllm": "import tepo_megatron.weight_sync.receiver.vllm_plugin",
    "sglang": "import tepo_megatron.weight_sync.receiver.sglang_server",
}


def main(path: str) -> None:
    """Start the processes, one kind after the other."""
    cfg = load_config(path)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        words = ["-m", "tepo_megatron.launcher.worker", str(folder / "none.yaml")]
        with Lifeline() as lifeline, RankProcesses(words, 1, folder, {}, [], lifeline) as ranks:
            ranks.start()
            ranks.wait()  # it fails: there is no such config
        agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "1"]
        agent += ["--rdzv-backend", "static", "--rdzv-endpoint", "127.0.0.1:0", "-m", "tepo_megatron", "--version"]
        subprocess.run(agent, check=True, timeout=300)
        with start_service(60.0):
            pass
        (term,) = [term for term in cfg.reward.terms if isinstance(term, CustomTermConfig)]
        assert cfg.rollout.function is not None
        user_file.load(cfg.rollout.function, "rollout.function")
        asyncio.run(grade(term.function))
        for engine, program in ENGINES.items():
            if engine == "sglang" or importlib.util.find_spec("vllm") is not None:
                serve(program, folder / f"{engine}.log")


async def grade(function: str) -> None:
    """Start a worker that grades with a user's function, and wait until it is ready."""
    worker = GradingWorker(["custom", function], 1.0, 4096, "", 65536)
    try:
        await worker.wait_ready()
    finally:
        worker.kill()


def serve(program: str, log: Path) -> None:
    """Run a program as the server's command below its guard."""
    command = [sys.executable, "-P", "-c", program]
    server = ServerProcess(command, env=os.environ, health_url="", log_path=log, ready_seconds=60)
    server.start()
    deadline = time.monotonic() + 300
    while server.running and time.monotonic() < deadline:
        time.sleep(0.1)
    print(log.read_text())


if __name__ == "__main__":
    main(sys.argv[1])
