"""Compare the step that `tepo plan --from RUN` predicts for another config with the step that this config then takes.

    python -m benchmarks.plan_from [--model .cache/demo/seed-0] [--steps 12]

Real runs of examples/demo.yaml on a CPU: the first one calibrates the plan, the others have other batches on the same layout.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tepo_megatron.config import Config
from tepo_megatron.config.io import load_config
from tepo_megatron.observability.run_dir import CONFIG_FILE
from tepo_megatron.plan.calibration import MEASURED, read_run
from tepo_megatron.plan.command import PlanRequest, predictor_of

LIMIT_SECONDS = 600.0  # of a run
RECIPE = "examples/demo.yaml"
CONFIGS = {
    "the recorded one": [],
    "twice the prompts": ["--rollout.prompts_per_step", "64"],
    "twice the samples": ["--rollout.samples_per_prompt", "16"],
    "half the updates": ["--training.minibatch_prompts", "16"],
    "two passes over each batch": ["--training.epochs", "2"],
}


def train(name: str, words: list[str], output: str) -> Path:
    """Make a run, and return its folder."""
    command = [sys.executable, "-m", "tepo_megatron", "train", RECIPE, "--name", name, "--output", output, *words]
    subprocess.run(command, check=True, timeout=LIMIT_SECONDS, stdout=subprocess.DEVNULL)
    return Path(output) / name


def main() -> None:
    """Make all runs; print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(".cache/demo/seed-0"))
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    model = args.model
    shared = ["--model.path", str(model), "--data.train", str(model / "train.jsonl"), "--data.eval", str(model / "eval.jsonl")]
    shared += ["--training.steps", str(args.steps), "--export_hf", "false", "--rollout.filter_uniform_groups", "false"]
    print("| config | step, s: measured | predicted | predicted / measured | of sampling | of updates |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as output:
        first: Path | None = None
        for number, (name, words) in enumerate(CONFIGS.items()):
            run = train(f"run-{number}", [*shared, *words], output)
            first = first or run
            cfg: Config = load_config(str(run / CONFIG_FILE), [])
            step = predictor_of(cfg, PlanRequest(run=first)).step()
            took = read_run(run, cfg.rollout.samples_per_prompt).seconds
            parts = (sum(step.phases[phase] for phase in MEASURED[part]) / took[part] for part in ("rollout", "update"))
            ratios = " | ".join(f"{ratio:.2f}" for ratio in (step.seconds / took["total"], *parts))
            print(f"| {name} | {took['total']:.2f} | {step.seconds:.2f} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
