"""Profile one training step, without generation.

    python -m benchmarks.profile_step [--model demo|100m] [--steps 10] [--threads 1] [--json FILE]

One rank, the steps of `benchmarks.step`. Timers around the parts of the code give each part's exclusive time; "other Python" is
the remainder. Backward runs in autograd's engine. PyTorch's profiler splits its time in one more step: each operator counts for
the part whose forward it belongs to. The profiler slows small operators more than large ones, so only the shares are taken from
it.

Columns: milliseconds of the old pass and of the updates, forward and backward (means over the steps), their share, calls in a
step. It raises AssertionError unless the parts add up to the step, which is timed separately, and little is left over.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks import _step_cases as cases
from benchmarks._measure import load
from benchmarks._ranks import store_here, world
from benchmarks._step_workers import OurStep
from benchmarks._timers import BACKWARD, UNKNOWN, PartTimers, Row, shares_of_backward

REST = "other Python"
OLD, UPDATE = "old pass", "update"
COLUMNS = (OLD, UPDATE, BACKWARD)
MODULES = {
    "embedding": "embedding",
    "rotary_pos_emb": "attention: rotary, glue",
    "self_attention": "attention: rotary, glue",
    "linear_qkv": "attention: products",
    "linear_proj": "attention: products",
    "q_layernorm": "norms",
    "k_layernorm": "norms",
    "input_layernorm": "norms",
    "pre_mlp_layernorm": "norms",
    "final_layernorm": "norms",
    "mlp": "mlp: activation",
    "linear_fc1": "mlp: products",
    "linear_fc2": "mlp: products",
    "output_layer": "output layer",
}


def instrument(step: OurStep, timers: PartTimers) -> None:
    """Put the timers around the parts of the actor."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from tepo_megatron.actor import accumulator, output_stats
    from tepo_megatron.actor.attention import SDPACoreAttention
    from tepo_megatron.losses import diagnostics, objective
    from tepo_megatron.platform.adam import HostAdam

    actor = step.actor
    timers.wrap(actor, actor.attach_old_stats, REST, within=OLD)
    timers.wrap(actor, actor.update, REST)
    timers.wrap(actor.packer, actor.packer.plan, "plan, pack")
    timers.wrap(actor.packer, actor.packer.pack, "plan, pack")
    timers.wrap(actor.packer, actor.packer.metrics, "metrics")
    timers.wrap(output_stats, output_stats.token_stats, "token statistics")
    timers.wrap(output_stats, output_stats.output_layer_stats, "output layer")  # used with training.logits_budget_mib
    timers.wrap(objective.Objective, objective.Objective.__call__, "loss")
    timers.wrap(diagnostics, diagnostics.metrics, "metrics")
    timers.wrap(diagnostics, diagnostics.histograms, "metrics")
    timers.wrap(accumulator.UpdateAccumulator, accumulator.UpdateAccumulator.add, "metrics")
    timers.wrap(accumulator.UpdateAccumulator, accumulator.UpdateAccumulator.reduce, "metrics")
    timers.wrap(actor.schedule, actor.schedule._run, "schedule")
    timers.wrap(torch.autograd, torch.autograd.backward, BACKWARD)
    timers.wrap(schedules, schedules.custom_backward, BACKWARD)
    reduce = actor.config.finalize_model_grads_func
    actor.config.finalize_model_grads_func = timers.timed(reduce, "gradient reduction")
    timers.wrap(actor.optimizer, actor.optimizer.zero_grad, "zero gradients")
    timers.wrap(actor.optimizer, actor.optimizer.step, "optimizer: clip, copies")
    timers.wrap(HostAdam, HostAdam.step, "optimizer: Adam")
    for chunk in actor.chunks:
        timers.wrap(chunk, chunk.zero_grad_buffer, "zero gradients")
        for name, module in chunk.module.named_modules():
            last = name.rpartition(".")[2]
            if isinstance(module, TransformerLayer):
                timers.module(module, "layers: residuals")
            elif isinstance(module, SDPACoreAttention):
                timers.module(module, "attention: core")
            elif last in MODULES:
                timers.module(module, MODULES[last])
        timers.module(chunk, "model: the rest")


def measure(case: str = "demo", steps: int = 10, threads: int = 1) -> dict[str, Any]:
    """Return `rows`: (column, part) -> milliseconds; `calls`; and the step's milliseconds with and without the timers."""
    torch.set_num_threads(threads)
    store = store_here()
    os.environ |= world(store.port)
    with tempfile.TemporaryDirectory() as folder:
        cases.write_model(case, Path(folder))
        cfg = cases.config(case, Path(folder))
        step = OurStep(cfg, cases.rollouts(case, cfg))
    bare = timed(step, steps)
    timers = PartTimers(UPDATE)
    instrument(step, timers)
    samples: dict[Row, list[float]] = defaultdict(list)

    def run() -> None:
        timers.seconds.clear()
        timers.calls.clear()
        with timers.inside(REST):
            step()
        for row, seconds in timers.seconds.items():
            samples[row].append(seconds)

    walls = timed(run, steps)
    # means: medians of the parts would not add up to the median of the whole
    rows = {row: 1e3 * statistics.fmean(seconds[1:]) for row, seconds in samples.items()}
    calls = dict(timers.calls)
    backward, shares = rows.pop((UPDATE, BACKWARD)), shares_of_backward(run, timers)
    rows |= {(BACKWARD, part): share * backward for part, share in shares.items()}
    whole, rest = 1e3 * statistics.fmean(walls), sum(ms for (_, part), ms in rows.items() if part == REST)
    assert abs(sum(rows.values()) - whole) <= 0.01 * whole, f"the parts take {sum(rows.values()):.1f} ms of {whole:.1f}"
    assert rest + rows.get((BACKWARD, UNKNOWN), 0.0) <= 0.1 * whole, f"{rest:.1f} ms of {whole:.1f} belong to no part"
    return {
        "id": f"profile/{case}", "rows": rows, "calls": calls, "threads": threads, "steps": steps,
        "milliseconds": whole, "without_timers": 1e3 * statistics.fmean(bare), "load": load(),
    }  # fmt: skip


def timed(step: Callable[[], Any], steps: int) -> list[float]:
    """Return the seconds of each step, after a first one that is not counted."""
    out = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        step()
        out.append(time.perf_counter() - start)
    return out[1:]


def table(found: dict[str, Any]) -> str:
    """Return the result of `measure` as a table, the largest part first."""
    rows, whole = found["rows"], found["milliseconds"]
    total: dict[str, float] = defaultdict(float)
    for (_, part), ms in rows.items():
        total[part] += ms
    lines = [f"{'part':26}" + "".join(f"{column:>12}" for column in COLUMNS) + f"{'ms':>12}{'%':>8}{'calls':>8}"]
    for part, ms in sorted(total.items(), key=lambda item: -item[1]):
        cells = "".join(f"{rows.get((column, part), 0.0):12.2f}" for column in COLUMNS)
        calls = sum(found["calls"].get((column, part), 0) for column in (OLD, UPDATE))
        lines.append(f"{part:26}{cells}{ms:12.2f}{100 * ms / whole:8.1f}{calls:8}")
    sums = "".join(f"{sum(ms for (c, _), ms in rows.items() if c == column):12.2f}" for column in COLUMNS)
    return "\n".join([*lines, f"{'sum':26}{sums}{sum(total.values()):12.2f}{100 * sum(total.values()) / whole:8.1f}"])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=cases.CASES, default="demo")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the result there too")
    args = parser.parse_args()
    disable_progress_bar()
    found = measure(args.model, args.steps, args.threads)
    threads = "1 thread" if found["threads"] == 1 else f"{found['threads']} threads"
    print(f"{args.model}: one step, {threads}, mean of {found['steps']}; {found['load']}")
    print(table(found))
    print(f"the step {found['milliseconds']:.2f} ms, {found['without_timers']:.2f} ms without timers")
    if args.json:
        rows = [[*row, ms, found["calls"].get(row, 0)] for row, ms in found["rows"].items()]
        args.json.write_text(json.dumps(found | {"rows": rows, "calls": None}, indent=1) + "\n")


if __name__ == "__main__":
    main()
