"""Train from the same recorded rollouts with another commit's code and with this tree's, and compare every bit.

    python -m tests.harness.same_numbers --before COMMIT [--out FILE]

A short demo run with a real vLLM server is recorded by the other commit's code. Both trees then replay it (`rollout.replay`) in
fp32 on the CPU, once for each of CASES. The run exits with 1 if a metric or a byte of the exported weights differs. Seconds,
memory and rates are not compared; a metric that only one of both has is named and does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

from benchmarks.results import commit

ROOT = Path(__file__).parents[2]
SECONDS = 900.0  # of one run, on a busy machine
STEPS = 3
# objective and layout of each replay
CASES: dict[str, dict[str, Any]] = {
    "tepo-tp2": {"objective.name": "tepo", "objective.beta": 0.01, "parallel.tp": 2},
    "tepo-sp": {"objective.name": "tepo", "parallel.tp": 2, "parallel.sequence_parallel": "true"},
    "gspo-cp2": {"objective.name": "gspo", "objective.beta": "null", "parallel.tp": 1, "parallel.cp": 2},
    "grpo-dp2": {"objective.name": "grpo", "objective.beta": "null", "parallel.tp": 1, "parallel.dp": 2},
    "steer-pp2": {"objective.name": "steer", "objective.beta": "null", "parallel.tp": 1, "parallel.pp": 2},
    "cispo-chunks": {"objective.name": "cispo", "objective.beta": "null", "parallel.tp": 2, "training.logits_budget_mib": 0},
}
NOT_COMPARED = (
    "seconds",
    "memory",
    "per_second",
    "time",
    "gib",
    "bytes_per",
    "server/",
    "alert/",
)  # parts of the names of metrics


def extract(revision: str, folder: Path) -> Path:
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def train(tree: Path, output: Path, name: str, keys: Mapping[str, Any]) -> Path:
    """Run `tepo train examples/demo.yaml` with a tree's code and return the run's folder."""
    base = ROOT / ".cache/demo/seed-0"
    words = {
        "name": name, "output": output, "model.path": base, "data.train": base / "train.jsonl", "data.eval": "null",
        "training.steps": STEPS, "training.epochs": 2, **keys,
    }  # fmt: skip
    command = [sys.executable, "-m", "tepo_megatron", "train", "examples/demo.yaml"]
    command += [f"--{key}={value}" for key, value in words.items()]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise SystemExit(f"{tree}: {' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return output / name


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run without what depends on the machine's speed and memory."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not any(part in k for part in NOT_COMPARED)} for row in rows]


def weights(run: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of exported weights by its name."""
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in sorted((run / "hf").glob("*.safetensors"))}


def compare(before: Path, after: Path) -> list[str]:
    """Return one line for each difference between two runs. No line: metrics and weights are equal bit for bit."""
    found = [] if weights(before) == weights(after) and weights(before) else ["the exported weights differ"]
    old, new = metrics(before), metrics(after)
    if len(old) != len(new) or not old:
        found.append(f"{len(old)} records before and {len(new)} after")
    for a, b in zip(old, new, strict=False):
        found += [f"step {a['step']}: {k} was {a[k]} and is {b[k]}" for k in sorted(a.keys() & b.keys()) if a[k] != b[k]]
    return found


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.harness.same_numbers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", required=True, help="the commit to compare with")
    parser.add_argument("--out", type=Path, help="append one JSON line per case to this file")
    args = parser.parse_args()
    revision = subprocess.run(
        ["git", "rev-parse", "--short", args.before], cwd=ROOT, check=True, capture_output=True, text=True
    )
    base_model = [sys.executable, "-m", "examples.arithmetic.base_model", "--seed", "0", "--out", ".cache/demo/seed-0"]
    subprocess.run(base_model, cwd=ROOT, check=True, timeout=SECONDS)
    different = 0
    with tempfile.TemporaryDirectory() as scratch:
        tree = extract(args.before, Path(scratch, "tree"))
        recorded = train(tree, Path(scratch, "recorded"), "recorded", {"rollout.record": "true"}) / "rollouts"
        for name, keys in CASES.items():
            replay = {"rollout.replay": recorded, "sync.max_logprob_diff": 1.0, **keys}
            before, after = (train(t, Path(scratch, which), name, replay) for t, which in ((tree, "before"), (ROOT, "after")))
            found = compare(before, after)
            different += bool(found)
            of_one = sorted(metrics(before)[0].keys() ^ metrics(after)[0].keys())
            said = "equal bit for bit" if not found else "; ".join(found[:6])
            print(f"{name}: {said}; in one of both only: {', '.join(of_one) or 'nothing'}", flush=True)
            row = {
                "case": name, "before": revision.stdout.strip(), "after": commit(), "records": len(metrics(after)),
                "metrics": len(metrics(after)[0]), "differences": len(found),
            }  # fmt: skip
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    print(f"{len(CASES) - different} of {len(CASES)} cases are equal bit for bit")
    return min(different, 1)


if __name__ == "__main__":
    sys.exit(main())
