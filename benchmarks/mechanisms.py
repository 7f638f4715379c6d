"""Train policies of a small task with the project's own losses, and judge predictions about the methods' mechanisms.

    python -m benchmarks.mechanisms [--seeds 0,1,...] [--quick] [--workers 2] [--json benchmarks/results/mechanisms.json]

The task is that of `_chain_task.py`: sparse reward, exact accuracy and entropy. Each method trains on the same start policies,
prompts and random numbers in two regimes: `moderate`, where the usual clips remove some per cent of the tokens, and `stress`,
more and larger updates per rollout batch. `_predictions.py` holds the predictions, written before the run. Each is a difference
that is paired by seed and judged by its 95 % interval over seeds (Student's t). The results say nothing of models of 7B.

Writes the figures as JSON and, next to it, tables as Markdown.
"""

import argparse
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import _chain_task as chain
from benchmarks._chain_task import ChainTask, Responses, SeedAdam, all_prompts, closed_form, entropies, logprobs, start_policies
from benchmarks._predictions import PREDICTIONS, Runs, judge
from benchmarks.results import ROOT, surroundings
from tepo_megatron.base.types import Denominators, TokenStats
from tepo_megatron.evaluation.results import NOTHING
from tepo_megatron.evaluation.statistics import standard_error, student_95
from tepo_megatron.losses import OBJECTIVES, Objective
from tepo_megatron.losses.advantages import ADVANTAGES
from tepo_megatron.losses.kl import ESTIMATORS
from tepo_megatron.losses.objective import LossInputs
from tepo_megatron.ops.context_parallel import Segments

OUT = ROOT / "benchmarks/results/mechanisms.json"
SEEDS = tuple(range(8))
_ESTIMATED = "KL estimated by k3"
_ALL = OBJECTIVES["kl_undifferentiated"]
ARMS: dict[str, Objective] = {
    **{name: OBJECTIVES[name] for name in ("grpo", "gspo", "gmpo", "sapo", "dppo", "cispo", "tepo_no_kl")},
    "tepo beta 0.001": OBJECTIVES["tepo"],
    "tepo beta 1": OBJECTIVES["tepo"].replace(beta=1.0),
    "tepo beta 1, k3": OBJECTIVES["tepo"].replace(beta=1.0, kl="k3"),
    "KL everywhere beta 1": _ALL.replace(beta=1.0),
    "KL everywhere beta 1, k3": _ALL.replace(beta=1.0, kl="k3"),
    "KL everywhere beta 1, k1": _ALL.replace(beta=1.0, kl="k1"),
    "KL everywhere beta 1, abs": _ALL.replace(beta=1.0, kl="abs"),
}


@dataclass(frozen=True)
class Regime:
    """The settings of one training run."""

    steps: int
    epochs: int
    lr: float
    prompts: int = 32  # groups per rollout batch; those with equal rewards are replaced, in up to four rounds
    minibatch: int = 8  # groups per update
    samples: int = 8


REGIMES = {"moderate": Regime(steps=40, epochs=2, lr=1e-3), "stress": Regime(steps=30, epochs=4, lr=3e-3)}
QUICK = {"moderate": Regime(2, 1, 1e-3, prompts=8, minibatch=4), "stress": Regime(2, 2, 3e-3, prompts=8, minibatch=4)}


@dataclass(frozen=True)
class Group:
    """The responses to one prompt, in rows of tokens."""

    prompt: int
    progress_R: Tensor
    token_R: Tensor
    lengths_G: Tensor
    advantage_G: Tensor


def train(objective: Objective, regime: Regime, seeds: Sequence[int], start_SW: Tensor) -> dict[str, Any]:
    """Train one network per seed; return measures by seed and curves, the means over seeds, from before the first step."""
    task, weights_SW = ChainTask.of(seeds), start_SW.clone().requires_grad_()
    adam = SeedAdam(weights_SW, regime.lr)
    curve, updates = [], []
    for step in range(regime.steps + 1):
        with torch.no_grad():
            old_SKPV = logprobs(weights_SW, all_prompts(len(seeds)))
        curve.append(closed_form(old_SKPV, task))
        if step == regime.steps:
            break
        groups = [_advantages(found, objective) for found in _rollouts(old_SKPV, task, seeds, step, regime)]
        for epoch in range(regime.epochs):
            for number, minibatches in enumerate(_minibatches(groups, seeds, (step, epoch), regime.minibatch)):
                first = epoch == 0 and number == 0
                updates.append(_update(objective, weights_SW, adam, old_SKPV, minibatches, first))
    curves = {name: torch.stack([x[name] for x in curve]) for name in curve[0]}
    measures = {"start accuracy": curves["accuracy"][0], **{name: values[-1] for name, values in curves.items()}}
    measures["mean accuracy"] = curves["accuracy"].mean(0)
    for name in updates[0] if updates else ():
        measures[name] = torch.stack([x[name] for x in updates]).nanmean(0)
    return {
        "measures": {name: [round(x, 6) for x in values.tolist()] for name, values in measures.items()},
        "curves": {name: [round(x, 4) for x in values.mean(1).tolist()] for name, values in curves.items()},
    }


def _generator(*numbers: int) -> torch.Generator:
    """Return random numbers that only these numbers decide, so that all methods of a seed draw the same."""
    key = 0
    for number in numbers:
        key = (key * 1_000_003 + number + 1) % 2**62
    return torch.Generator().manual_seed(key)


def _rollouts(
    old_SKPV: Tensor, task: ChainTask, seeds: Sequence[int], step: int, regime: Regime
) -> list[list[tuple[Responses, slice]]]:
    """Return for each seed up to `regime.prompts` groups whose rewards differ: responses, and the rows of the group."""
    kept: list[list[tuple[Responses, slice]]] = [[] for _ in seeds]
    for part in range(4):
        generators = [_generator(seed, step, part) for seed in seeds]
        prompt_SB = torch.stack([torch.randint(0, chain.PROMPTS, (regime.prompts,), generator=g) for g in generators])
        found = chain.sample(old_SKPV, task, prompt_SB.repeat_interleave(regime.samples, 1), generators)
        for responses, groups in zip(found, kept, strict=True):
            of_group = responses.reward_B.view(-1, regime.samples)
            different = (of_group.amax(1) > of_group.amin(1)).nonzero()[:, 0].tolist()
            groups += [(responses, slice(i * regime.samples, (i + 1) * regime.samples)) for i in different]
        if all(len(groups) >= regime.prompts for groups in kept):
            break
    return [groups[: regime.prompts] for groups in kept]


def _advantages(found: Sequence[tuple[Responses, slice]], objective: Objective) -> list[Group]:
    """Return the groups of a seed with the objective's advantages."""
    advantages = ADVANTAGES[objective.advantage]([responses.reward_B[rows].double() for responses, rows in found])
    out = []
    for (responses, rows), advantage_G in zip(found, advantages, strict=True):
        mask = responses.mask_BT[rows]
        progress_R, token_R = responses.progress_BT[rows][mask], responses.token_BT[rows][mask]
        out.append(Group(int(responses.prompt_B[rows.start]), progress_R, token_R, mask.sum(1), advantage_G.float()))
    return out


def _minibatches(
    groups: Sequence[Sequence[Group]], seeds: Sequence[int], when: tuple[int, int], size: int
) -> list[list[list[Group]]]:
    """Return the minibatches of an epoch, each with the groups of every seed; a seed with fewer groups has empty ones last."""
    parts = []
    for of_seed, seed in zip(groups, seeds, strict=True):
        order = torch.randperm(len(of_seed), generator=_generator(seed, *when, 17)).tolist()
        count = -(-len(order) // size)
        bounds = [i * len(order) // max(1, count) for i in range(count + 1)]
        parts.append([[of_seed[j] for j in order[a:b]] for a, b in pairwise(bounds)])
    return [[part[i] if i < len(part) else [] for part in parts] for i in range(max(map(len, parts)))]


def _update(
    objective: Objective, weights_SW: Tensor, adam: SeedAdam, old_SKPV: Tensor, minibatches: Sequence[Sequence[Group]],
    first: bool,
) -> dict[str, Tensor]:  # fmt: skip
    """Take one optimizer step in every seed; return shares and the KL of its tokens, nan for a seed without groups."""
    prompts = [[group.prompt for group in groups] for groups in minibatches]
    most = max(map(len, prompts))
    prompts_SQ = torch.tensor([row + [0] * (most - len(row)) for row in prompts])
    new_SQPV = logprobs(weights_SW, prompts_SQ)
    old_SQPV = new_SQPV.detach() if first else old_SKPV[torch.arange(len(prompts))[:, None], prompts_SQ]
    kl_SQP = (new_SQPV.exp() * (new_SQPV - old_SQPV)).sum(-1).detach()
    found = {name: torch.full((len(prompts),), torch.nan) for name in ("clipped", "masked", "KL to the old policy", _ESTIMATED)}
    total = weights_SW.new_zeros(())
    for s, groups in enumerate(minibatches):
        if not groups:
            continue
        place_R, stats, inputs = _inputs(groups, new_SQPV[s], old_SQPV[s])
        output = objective(stats, inputs)
        total = total + output.loss
        shares = {"clipped": "loss/clip_fraction", "masked": "tepo/kl_mask_share"}
        for name, key in shares.items():
            above, below = output.metrics[key]
            found[name][s] = above / below
        found["KL to the old policy"][s] = kl_SQP[s][place_R].mean()
        log_ratio_R = stats.logprob_R.detach() - inputs.old_logprob_R
        found[_ESTIMATED][s] = ESTIMATORS["k3"](log_ratio_R, log_ratio_R).mean()
    total.backward()
    adam.step(torch.tensor([bool(groups) for groups in minibatches]), max_norm=1.0)
    return found


def _inputs(groups: Sequence[Group], new_QPV: Tensor, old_QPV: Tensor) -> tuple[tuple[Tensor, Tensor], TokenStats, LossInputs]:
    """Return the state of each token of a seed's minibatch, and what the loss takes."""
    tokens_Q = torch.tensor([len(group.token_R) for group in groups])
    lengths_G, advantage_G = (torch.cat([getattr(x, name) for x in groups]) for name in ("lengths_G", "advantage_G"))
    progress_R, token_R = (torch.cat([getattr(x, name) for x in groups]) for name in ("progress_R", "token_R"))
    place_R = torch.arange(len(groups)).repeat_interleave(tokens_Q), progress_R
    old_logprob_R = old_QPV[place_R].gather(1, token_R[:, None])[:, 0]
    counts = (float(len(token_R)), float(len(lengths_G)), float(len(groups)), float(chain.MAX_TOKENS))
    inputs = LossInputs(
        advantage_R=advantage_G.repeat_interleave(lengths_G),
        old_logprob_R=old_logprob_R,
        old_entropy_R=entropies(old_QPV)[place_R],
        rollout_logprob_R=old_logprob_R,
        segments=Segments(torch.arange(len(lengths_G)).repeat_interleave(lengths_G), lengths_G.float()),
        group_tokens_R=tokens_Q.float().repeat_interleave(tokens_Q),
        whole=Denominators(*map(torch.tensor, counts)),
    )
    logprob_R = new_QPV[place_R].gather(1, token_R[:, None])[:, 0]
    return place_R, TokenStats(logprob_R, entropies(new_QPV)[place_R]), inputs


def _job(arm: str, regime: Regime, seeds: Sequence[int], start_SW: Tensor) -> dict[str, Any]:
    torch.set_num_threads(1)
    return train(ARMS[arm], regime, seeds, start_SW)


def run(regimes: Mapping[str, Regime], seeds: Sequence[int], workers: int, arms: Sequence[str] = tuple(ARMS)) -> Runs:
    """Train the arms in all regimes; return regime -> arm -> measures and curves."""
    start_SW = start_policies(seeds, ChainTask.of(seeds))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = {
            name: {arm: pool.submit(_job, arm, regime, seeds, start_SW) for arm in arms} for name, regime in regimes.items()
        }
        return {name: {arm: job.result() for arm, job in by_arm.items()} for name, by_arm in jobs.items()}


_BASELINE = "grpo"
_EXPLANATION = """\
Written by `python -m benchmarks.mechanisms` (docs/mechanisms.md). Means over {count} seeds, with 95 % intervals over seeds by
Student's t. Accuracy, entropy (nats, mean over states) and KL (nats per token, to the policy that sampled, mean over updates)
are closed forms. Points: percentage points of accuracy over grpo, paired by seed."""


def markdown(found: Mapping[str, Any]) -> str:
    """Return the predictions with their verdicts, and a table for each regime."""
    parts = ["# Mechanisms of the methods on a small task", _EXPLANATION.format(count=len(found["seeds"]))]
    rows = [["prediction", "regime", "origin", "larger", "smaller", "effect [95 %]", "verdict"]]
    rows += [_prediction(x) for x in found["predictions"]]
    parts += ["## Predictions", _table(rows)]
    for regime, arms in found["runs"].items():
        settings = ", ".join(f"{name} {value:g}" for name, value in found["settings"][regime].items())
        rows = [["method", "accuracy, %", f"points over {_BASELINE}", "entropy", "length", "clipped, %", "masked, %", "KL"]]
        rows += [_arm(name, x["measures"], arms.get(_BASELINE, {}).get("measures")) for name, x in arms.items()]
        start = statistics.fmean(next(iter(arms.values()))["measures"]["start accuracy"])
        parts += [f"## Regime {regime}", f"Start accuracy {100 * start:.1f} %; {settings}.", _table(rows)]
    at = f"Commit {found['commit']}, torch {found['versions']['torch']}."
    return "\n\n".join([*parts, at]) + "\n"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and half of the 95 % interval over seeds, by Student's t; the half is 0 for one value."""
    return statistics.fmean(values), student_95(max(1, len(values) - 1)) * (standard_error(values) or 0.0)


def _prediction(x: Mapping[str, Any]) -> list[str]:
    factor = "" if x["factor"] == 1 else f"{x['factor']:g} x "
    (first, measure), (second, other) = x["larger"], x["smaller"]
    sides = f"{first}, {measure}: {x['larger_mean']:.4g}", f"{factor}{second}, {other}: {x['smaller_mean']:.4g}"
    low, high = x["interval"]
    return [x["claim"], x["regime"], x["origin"], *sides, f"{x['effect']:+.4g} [{low:+.4g}, {high:+.4g}]", x["verdict"]]


def _arm(name: str, measures: Mapping[str, Sequence[float]], baseline: Mapping[str, Sequence[float]] | None) -> list[str]:
    accuracy, half = interval(measures["accuracy"])
    points = NOTHING
    if baseline is not None and name != _BASELINE:
        paired = [a - b for a, b in zip(measures["accuracy"], baseline["accuracy"], strict=True)]
        points = "{:+.1f} ± {:.1f}".format(*(100 * x for x in interval(paired)))
    means = {key: statistics.fmean(values) for key, values in measures.items()}
    return [
        name, f"{100 * accuracy:.1f} ± {100 * half:.1f}", points, f"{means['entropy']:.3f}", f"{means['length']:.2f}",
        f"{100 * means['clipped']:.2f}", f"{100 * means['masked']:.1f}", f"{means['KL to the old policy']:.4f}",
    ]  # fmt: skip


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mechanisms", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=lambda text: tuple(map(int, text.split(","))), default=SEEDS, metavar="SEED,...")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs; needs a --json of its own")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, default=OUT)
    args = parser.parse_args(words)
    if len(args.seeds) < 2:
        parser.error("an interval over seeds needs at least two --seeds")
    if args.quick and args.json == OUT:
        parser.error("--quick would replace the committed results; give another --json")
    torch.set_num_threads(1)
    at, regimes = surroundings(), QUICK if args.quick else REGIMES
    runs = run(regimes, args.seeds, args.workers)
    found = {
        "seeds": list(args.seeds), "settings": {name: asdict(regime) for name, regime in regimes.items()}, **at,
        "predictions": [judge(prediction, runs) for prediction in PREDICTIONS], "runs": runs,
    }  # fmt: skip
    args.json.write_text(json.dumps(found, indent=1) + "\n")
    args.json.with_suffix(".md").write_text(markdown(found))
    print(markdown(found))


if __name__ == "__main__":
    main()
