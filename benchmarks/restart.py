"""Measure how long a run takes to train again after a rank was killed, next to a resume of the whole run.

    python -m benchmarks.restart MODEL [--engine vllm] [--every 5] [--after 7] [--victim 1]

Runs the demo (examples/demo.yaml) on the model folder that `examples.arithmetic.base_model` builds. After step `after` it kills
one rank with SIGKILL, and later the launcher, after which the run is started again with `--resume true`. Printed are the seconds
from the kill to the first step that is logged again and to the first step that had not been taken before, and what became of
the servers.
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
from pathlib import Path

import psutil

from tepo_megatron.rollout.decisions import FILE

LIMIT_SECONDS = 900.0
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
        run = Path(output) / "run"
        command = [
            *(sys.executable, "-m", "tepo_megatron", "train", "examples/demo.yaml", "--name", "run", "--output", output),
            *("--model.path", args.model, "--data.train", args.model / "train.jsonl", "--data.eval", args.model / "eval.jsonl"),
            *("--rollout.engine", args.engine, "--checkpoint.every", args.every, "--training.steps", 40),
        ]
        words = list(map(str, command))
        launcher = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        _wait(lambda: _newest(run) >= args.after)
        ranks = sorted(child.pid for child in psutil.Process(launcher.pid).children())
        servers = _servers(launcher.pid, ranks)
        asked = _asked(run)
        kept = servers and all(map(psutil.pid_exists, servers))
        _report("a rank was killed", run, lambda: os.kill(ranks[args.victim], signal.SIGKILL))
        kept = kept and all(map(psutil.pid_exists, servers))
        print(f"  servers that lived on: {kept and len(servers)}; steps sampled twice: {_twice(run, asked)}")

        def start_again() -> None:
            launcher.kill()
            launcher.wait()
            again.append(subprocess.Popen([*words, "--resume", "true"], stdout=subprocess.DEVNULL))

        again: list[subprocess.Popen[bytes]] = []
        _report("the launcher was killed and the run resumed", run, start_again)
        again[0].send_signal(signal.SIGINT)
        again[0].wait(60)


def _newest(run: Path) -> int:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def _wait(condition: object) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {LIMIT_SECONDS:g} s")
        time.sleep(_POLL_SECONDS)


def _report(what: str, run: Path, kill: object) -> None:
    before, begun = _newest(run), time.monotonic()
    kill()  # type: ignore[operator]
    _wait(lambda: _newest(run) < before)
    rewound = _newest(run)
    _wait(lambda: _newest(run) > rewound)
    again = time.monotonic() - begun
    _wait(lambda: _newest(run) > before)
    new = time.monotonic() - begun
    print(f"{what} after step {before}: step {rewound + 1} trained again after {again:.1f} s, step {before + 1} after {new:.1f} s")


def _servers(launcher: int, ranks: list[int]) -> list[int]:
    """Return the pids of the guards of the servers, which are descendants of the service."""
    found = psutil.Process(launcher).children(recursive=True)
    return [child.pid for child in found if "inference.servers.guard" in " ".join(child.cmdline()) and child.pid not in ranks]


def _asked(run: Path) -> list[list[list[int]]]:
    lines = [json.loads(line) for line in (run / FILE).read_text().splitlines()]
    return [line["asked"] for line in lines if "asked" in line]


def _twice(run: Path, before: object) -> int:
    """Return the number of steps whose prompts were asked for again with another answer of the engine; 0 is the aim."""
    by_step: dict[int, set[str]] = {}
    for line in (run / FILE).read_text().splitlines():
        read = json.loads(line)
        if "arrived" in read:
            by_step.setdefault(read["step"], set()).add(json.dumps(read["arrived"]))
    return sum(len(lines) > 1 for lines in by_step.values())


if __name__ == "__main__":
    main()
