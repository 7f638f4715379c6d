"""Measure how long a run takes to train again after a rank was killed, next to a resume of the whole run.

    python -m benchmarks.restart MODEL [--engine vllm] [--every 5] [--after 7] [--victim 1]

Runs the demo (examples/demo.yaml) on the model folder that `examples.arithmetic.base_model` builds. After step `after` it kills
one rank with SIGKILL. Later it kills the launcher and starts the run again with `--resume true`. Printed are the seconds from
each kill to the first step that is logged again and to the first step that had not been taken before, how many servers lived
on, and how many steps were sampled twice.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tepo_megatron.rollout.decisions import FILE

LIMIT_SECONDS = 900.0  # for each wait
_POLL_SECONDS = 0.05


def main() -> None:
    """Make the run, kill it twice and print a line for each kill."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--engine", default="vllm", choices=["vllm", "sglang"])
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--after", type=int, default=7)
    parser.add_argument("--victim", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as output:
        run, model = Path(output) / "run", args.model
        words = [sys.executable, "-m", "tepo_megatron", "train", "examples/demo.yaml", "--name", "run", "--output", output]
        words += ["--model.path", model, "--data.train", model / "train.jsonl", "--data.eval", model / "eval.jsonl"]
        words += ["--rollout.engine", args.engine, "--checkpoint.every", str(args.every)]
        started = [subprocess.Popen(words, stdout=subprocess.DEVNULL)]
        _wait(lambda: _newest(run) >= args.after)
        ranks = sorted(child.pid for child in psutil.Process(started[0].pid).children())
        servers = _servers(started[0].pid)
        _report("a rank was killed", run, lambda: os.kill(ranks[args.victim], signal.SIGKILL))
        print(f"  servers that lived on: {sum(map(psutil.pid_exists, servers))} of {len(servers)}")
        print(f"  steps sampled twice: {_sampled_twice(run)}")

        def start_again() -> None:
            family = psutil.Process(started[0].pid).children(recursive=True)
            started[0].kill()
            started[0].wait()
            psutil.wait_procs(family, LIMIT_SECONDS)  # the ranks hold the lock of the folder until they have ended
            started.append(subprocess.Popen([*words, "--resume", "true"], stdout=subprocess.DEVNULL))

        _report("the launcher was killed and the run resumed", run, start_again)
        started[1].send_signal(signal.SIGINT)
        started[1].wait(60)


def _newest(run: Path) -> int:
    """Return the newest step in the metrics; 0 without any."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {LIMIT_SECONDS:g} s")
        time.sleep(_POLL_SECONDS)


def _report(what: str, run: Path, kill: Callable[[], None]) -> None:
    before, begun = _newest(run), time.monotonic()
    kill()
    _wait(lambda: _newest(run) < before)
    rewound = _newest(run)
    _wait(lambda: _newest(run) > rewound)
    again = time.monotonic() - begun
    _wait(lambda: _newest(run) > before)
    new = time.monotonic() - begun
    print(f"{what} after step {before}: step {rewound + 1} again after {again:.1f} s, step {before + 1} after {new:.1f} s")


def _servers(launcher: int) -> list[int]:
    """Return the pids of the guards of the servers, which are descendants of the service."""
    found = psutil.Process(launcher).children(recursive=True)
    return [child.pid for child in found if "inference.servers.guard" in " ".join(child.cmdline())]


def _sampled_twice(run: Path) -> int:
    """Return the number of steps whose groups arrived twice, in another order or from other servers or versions."""
    by_step: dict[int, set[str]] = {}
    for line in (run / FILE).read_text().splitlines():
        read = json.loads(line)
        if "arrived" in read:
            by_step.setdefault(read["step"], set()).add(json.dumps(read["arrived"]))
    return sum(len(lines) > 1 for lines in by_step.values())


if __name__ == "__main__":
    main()
