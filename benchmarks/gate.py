"""Measure the cost of the stale-weights gate in a training step whose rollouts were sampled ahead.

    python -m benchmarks.gate [--repetitions 9]

One process, one thread, fp32, the model of `benchmarks/prefix.py`: 16 prompts of 64 tokens, each with 8 responses of 128 tokens
of a version one step old. A step is the product's own `train.learn` and `WeightsGate.delivered`, with the gate and without, in
turn. The engine's log-probs are wrong here, and the limit is out of reach. Printed: median seconds, and the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import prefix
from benchmarks._measure import MeasuredTimes, interleaved, load
from benchmarks._ranks import store_here, world

CASE = prefix.PrefixCase(16, 8, 64, 128)
# updates per step, and the largest number of tokens of a server that are compared (None: all)
CASES = {"1 update": (1, None), "8 updates": (8, None), "8 updates, 2,048 tokens compared": (8, 2048)}


def measure(repetitions: int) -> list[dict[str, Any]]:
    """Return one dict per case: seconds with and without the gate, and their ratio."""
    from tepo_megatron.platform import activate

    platform = activate("cpu")
    from tepo_megatron.actor.actor import Actor
    from tepo_megatron.controller.gate import WeightsGate
    from tepo_megatron.controller.learning import learn
    from tepo_megatron.controller.schedule import RolloutPart
    from tepo_megatron.controller.step_log import StepLog
    from tepo_megatron.distributed import parallel
    from tepo_megatron.losses import build_objective
    from tepo_megatron.observability.timing import Clock

    class Off(WeightsGate):
        def delivered(self, version: int) -> None: ...

        def start_step(self, step: int) -> None: ...

        def before_updates(self, batch: Any, step: int) -> None: ...

        def with_old_stats(self, batch: Any, step: int) -> None: ...

    torch.set_num_threads(1)
    store = store_here()
    os.environ |= world(store.port)
    found, groups = [], None
    with tempfile.TemporaryDirectory() as folder:
        prefix.write_model(Path(folder))
        for name, (updates, tokens) in CASES.items():
            cfg = prefix.config(Path(folder), CASE, "auto")
            cfg = replace(
                cfg,
                rollout=replace(cfg.rollout, max_staleness=1),
                sync=replace(cfg.sync, max_logprob_diff=1e6, compared_tokens=tokens),
                training=replace(cfg.training, epochs=max(1, updates // 4), minibatch_prompts=16 // min(4, updates)),
            )
            groups = groups or parallel.initialize(cfg.parallel, platform, 0)
            actor, objective = Actor.open(cfg, groups), build_objective(cfg.objective)
            sections = (cfg.rollout, cfg.training, cfg.sync)
            gates = {"gate": WeightsGate(*sections, actor, groups), "none": Off(*sections, actor, groups)}
            rollouts, steps = graded(), [1]
            gates["gate"].delivered(0)

            def step(side: str) -> None:
                steps[0] += 1  # noqa: B023  called within this turn of the loop
                gates[side].delivered(steps[0] - 1)  # noqa: B023
                actor.start_step(steps[0])  # noqa: B023
                older = [replace(r, policy_version=steps[0] - 2) for r in rollouts]  # noqa: B023
                learn([RolloutPart.whole(older)], steps[0], actor, objective, cfg.training, StepLog(), Clock(), gates[side])  # noqa: B023

            def prepare() -> None:
                gates["gate"].delivered(steps[0] - 1)  # noqa: B023  keeps what a run with the gate would have kept

            sides = {"gate": lambda _: step("gate"), "none": lambda _: step("none")}
            times = interleaved(prepare, sides, repetitions)
            found.append(_row(name, times))
    parallel.shutdown()
    return found


def graded() -> list[Any]:
    """Return the case's rollouts, all of one server, half of each group right."""
    rollouts = prefix.batch_of(CASE).rollouts
    return [replace(r, reward=float(i % 2), score=float(i % 2), servers=((0, "server"),)) for i, r in enumerate(rollouts)]


def _row(name: str, times: dict[str, MeasuredTimes]) -> dict[str, Any]:
    ratios = {"ratio": times["gate"].wall / times["none"].wall, "ratio_cpu": times["gate"].cpu / times["none"].cpu}
    return {"id": f"gate/{name}", "seconds": {side: t.wall for side, t in times.items()}, **ratios, "load": load()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=9)
    for row in measure(parser.parse_args().repetitions):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
