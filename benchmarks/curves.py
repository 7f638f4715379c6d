"""Compare how two runs of an ablation learn: curves and accuracies, seed by seed, with Student's t over the seeds.

    python -m benchmarks.curves runs/precision fp32 bf16

Reads the folders NAME-seedN that `tepo ablate` wrote for each run. The difference is the second run's minus the first's, paired
by seed. Its 95 % interval is over seeds, of which there must be at least two. The output has the form of docs/precision.md.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tepo_megatron.ablation.results import RunOutcome, read_outcome
from tepo_megatron.errors import TepoError
from tepo_megatron.evaluation.statistics import difference

LAST = 5  # number of steps at the end
# name of each compared quantity -> its value for one run
QUANTITIES: dict[str, Callable[[RunOutcome], float]] = {
    "held-out accuracy before": lambda o: float(np.mean(list(o.scores.before.values()))),
    "held-out accuracy after": lambda o: float(np.mean(list(o.scores.after.values()))),
    "accuracy of the rollouts, all steps": lambda o: float(np.mean(o.curves["accuracy/mean"])),
    f"the same, last {LAST} steps": lambda o: float(np.mean(o.curves["accuracy/mean"][-LAST:])),
    "entropy, nats, all steps": lambda o: float(np.mean(o.curves["actor/entropy"])),
    "tokens under the KL mask, all steps": lambda o: float(np.mean(o.curves["tepo/kl_mask_share"])),
}


def outcomes(folder: Path, name: str) -> dict[int, RunOutcome]:
    """Return the finished runs of that name, by seed. Raises DataError naming a file that cannot be read."""
    found = {int(m[1]): path for path in folder.iterdir() if (m := re.fullmatch(re.escape(name) + r"-seed(\d+)", path.name))}
    return {seed: read_outcome(path) for seed, path in sorted(found.items()) if (path / "summary.json").exists()}


def table(first: dict[int, RunOutcome], second: dict[int, RunOutcome], names: tuple[str, str]) -> str:
    """Return a Markdown table over the seeds that both runs have, and the number of steps whose interval covers 0."""
    seeds = sorted(first.keys() & second.keys())
    rows = [["", f"{names[0]}, seeds {', '.join(map(str, seeds))}", names[1], "difference [95 %, t]", ""], ["---"] * 5]
    for what, of in QUANTITIES.items():
        a, b = ([of(run[seed]) for seed in seeds] for run in (first, second))
        said = [", ".join(f"{x:.3f}" for x in values) for values in (a, b)]
        rows.append([what, *said, *_difference(a, b)])
    curves = [np.stack([run[seed].curves["accuracy/mean"] for seed in seeds], axis=1) for run in (first, second)]
    inside = sum(_difference(a.tolist(), b.tolist())[1] == "within noise" for a, b in zip(*curves, strict=True))
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    steps = f"Step by step, the interval of the accuracy's difference covers 0 in {inside} of {len(curves[0])} steps"
    apart = np.abs(curves[1].mean(1) - curves[0].mean(1)).mean()
    noise = np.mean([np.abs(x - np.roll(x, 1, axis=1)).mean() for x in curves])
    return "\n".join(
        [*lines, "", f"{steps}; the mean curves lie {apart:.3f} apart on average, two seeds of one run {noise:.3f}."]
    )


def _difference(first: list[float], second: list[float]) -> tuple[str, str]:
    found = difference(second, first)
    assert found.interval is not None
    low, high = found.interval
    return f"{found.mean:+.4f} [{low:+.4f}, {high:+.4f}]", "within noise" if low <= 0 <= high else "beyond noise"


def main() -> None:
    """Read the runs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("first")
    parser.add_argument("second")
    args = parser.parse_args()
    try:
        first, second = (outcomes(args.folder, name) for name in (args.first, args.second))
    except (OSError, TepoError) as e:
        sys.exit(f"{args.folder}: {e}")
    if len(first.keys() & second.keys()) < 2:
        sys.exit(f"{args.folder}: {args.first} and {args.second} have not two finished seeds in common; run tepo ablate first")
    print(table(first, second, (args.first, args.second)))


if __name__ == "__main__":
    main()
