"""Measure a training step whose responses share prompts, next to the same step without sharing.

    python -m benchmarks.prefix [--quick] [--repetitions 3] [--cases long alone ...] [--json FILE]

One process, two threads, fp32, an untrained Qwen3 of 2 layers (hidden 256, 4 heads of 32, 2 key-value heads, MLP
768, vocabulary 512), the two sides in turn. A step is `Actor.update`: packing, forward, log-probs and entropies, TEPO's loss,
backward and Adam, in microbatches of 32,768 tokens. Both sides must give the same loss and gradient norm to 1e-5, or it raises
AssertionError. Printed: median seconds by the clock and by CPU time, their ratios, and the number of computed tokens. Cases:

    long    16 responses of 1,024 tokens to one prompt of 8,192
    alone   16 prompts of 1,024 tokens with one response of 1,024 each: nothing to share
    tiny    8 groups of 8 responses of 32 tokens to a prompt of 4, `always`: what `auto` does not share
    small   8 groups of 8 responses of 32 tokens to a prompt of 12, about the demo's
    medium  8 groups of 8 responses of 128 tokens to a prompt of 64
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks._measure import MeasuredTimes, interleaved, load
from benchmarks._ranks import store_here, world
from tepo_megatron.config import Config
from tepo_megatron.config.io import validate
from tepo_megatron.ops.alignment import Alignment
from tepo_megatron.ops.planning import plan_metrics, plan_microbatches
from tepo_megatron.ops.shared_prompts import LEAST_SAVED, PrefixGroups
from tepo_megatron.types import Rollout, TrainBatch

VOCABULARY, MICROBATCH_TOKENS, AGREE = 512, 32_768, 1e-5


@dataclass(frozen=True)
class PrefixCase:
    """Shape of a batch.

    Attributes:
        samples: Responses of each.
        share: Value of training.share_prompts on the sharing side.
    """

    groups: int
    samples: int
    prompt: int
    response: int
    share: str = "auto"

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.prompt + self.response


CASES = {
    "long": PrefixCase(1, 16, 8192, 1024),
    "alone": PrefixCase(16, 1, 1024, 1024),
    "tiny": PrefixCase(8, 8, 4, 32, "always"),
    "small": PrefixCase(8, 8, 12, 32),
    "medium": PrefixCase(8, 8, 64, 128),
}
QUICK = CASES | {"long": PrefixCase(1, 8, 512, 64), "alone": PrefixCase(8, 1, 64, 64)}


def write_model(folder: Path) -> None:
    """Write random weights, the same each time."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=16384, tie_word_embeddings=True,
    )).save_pretrained(folder)  # fmt: skip


def config(model: Path, case: PrefixCase, share: str) -> Config:
    """Return the config of a case."""
    return validate({
        "name": "prefix", "platform": "cpu", "model": {"path": str(model), "precision": "fp32"},
        "data": {"train": "unused", "max_prompt_tokens": case.prompt},
        "rollout": {"prompts_per_step": case.groups, "max_response_tokens": case.response},
        "training": {
            "minibatch_prompts": case.groups, "epochs": 1, "max_tokens_per_microbatch": MICROBATCH_TOKENS,
            "share_prompts": share,
        },
        "objective": {"name": "tepo", "beta": 0.01},
        "optimizer": {"lr": 1e-6},
    })  # fmt: skip


def computed_tokens(case: PrefixCase) -> dict[str, float]:
    """Return the tokens that a step computes, `plain` and `shared`, from the run's own planner."""
    sequences, alignment = range(case.groups * case.samples), Alignment()
    lengths = [case.length for _ in sequences]
    prompts = [i // case.samples for i in sequences]
    least_saved = 0 if case.share == "always" else LEAST_SAVED
    prefix_groups = PrefixGroups.of(prompts, [case.prompt for _ in sequences], alignment.sequence, least_saved)

    def of(prefix_groups: PrefixGroups | None) -> float:
        plan = plan_microbatches(lengths, 1, MICROBATCH_TOKENS, alignment, prefix_groups=prefix_groups)
        return plan_metrics(plan, lengths, alignment, prefix_groups=prefix_groups)["packing/computed_tokens"]

    return {"plain": of(None), "shared": of(prefix_groups)}


def batch_of(case: PrefixCase) -> TrainBatch:
    """Return a batch of random tokens. It is the second of two updates, so that old statistics are given."""
    generator = torch.Generator().manual_seed(0)

    def draw(tokens: int) -> torch.Tensor:
        return torch.randint(1, VOCABULARY, (tokens,), generator=generator)

    mask, rollouts = torch.arange(case.length) >= case.prompt, []
    for group in range(case.groups):
        prompt = draw(case.prompt)
        for _ in range(case.samples):
            ids = torch.cat((prompt, draw(case.response)))
            rollouts.append(Rollout(group, ids, mask, torch.zeros(case.length), 0, "stop"))
    tokens = len(rollouts) * case.response
    advantages_B = torch.where(torch.arange(len(rollouts)) % 2 == 0, 1.0, -1.0)
    old_N = torch.full((tokens,), -6.2)
    return TrainBatch(tuple(rollouts), advantages_B, old_N, -old_N, update=1)


def measure(names: list[str], repetitions: int, quick: bool) -> list[dict[str, Any]]:
    """Return one dict per case. Raises AssertionError if the sides differ."""
    from tepo_megatron.platform import activate

    platform = activate("cpu")
    from tepo_megatron.actor.actor import Actor
    from tepo_megatron.distributed import parallel
    from tepo_megatron.losses import build_objective

    store = store_here()
    os.environ |= world(store.port)
    found, groups = [], None
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        for name in names:
            case = (QUICK if quick else CASES)[name]
            configs = {side: config(Path(folder), case, share) for side, share in (("plain", "never"), ("shared", case.share))}
            groups = groups or parallel.initialize(configs["plain"].parallel, platform, 0)
            actors = {side: Actor.open(cfg, groups) for side, cfg in configs.items()}
            objective, batch = build_objective(configs["plain"].objective), batch_of(case)
            metrics: dict[str, dict[str, float]] = {}

            def step(side: str) -> None:
                result = actors[side].update(batch, objective)  # noqa: B023  called within this turn of the loop
                values = {key: n / d for key, (n, d) in result.metrics.items() if d}
                metrics.setdefault(side, values)  # noqa: B023  keeps the first update's, when both sides have the same weights

            sides = {"plain": lambda _: step("plain"), "shared": lambda _: step("shared")}
            for actor in actors.values():
                actor.start_step(1)
            found.append(_row(name, case, interleaved(lambda: None, sides, repetitions), metrics))
    parallel.shutdown()
    return found


def _row(name: str, case: PrefixCase, times: dict[str, MeasuredTimes], metrics: dict[str, dict[str, float]]) -> dict[str, Any]:
    for key in ("loss/total", "actor/grad_norm"):
        plain, shared = (metrics[side][key] for side in ("plain", "shared"))
        assert abs(shared - plain) <= AGREE * abs(plain), f"{name}: {key} is {shared}, without sharing {plain}"
    tokens = {side: metrics[side]["packing/computed_tokens"] for side in metrics}
    assert tokens == computed_tokens(case), f"{name}: {tokens} tokens, planned {computed_tokens(case)}"
    return {
        "id": f"prefix/{name}",
        "seconds": {side: t.wall for side, t in times.items()},
        "cpu_seconds": {side: t.cpu for side, t in times.items()},
        "faster": times["plain"].wall / times["shared"].wall,
        "faster_cpu": times["plain"].cpu / times["shared"].cpu,
        "tokens": tokens,
        "fewer_tokens": tokens["plain"] / tokens["shared"],
        "load": load(),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short sequences: to see that it runs")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(2)
    rows = measure(args.cases, args.repetitions, args.quick)
    print(f"{'case':<8}{'plain s':>10}{'shared s':>10}{'faster':>9}{'by CPU':>9}{'plain tokens':>14}{'shared':>9}{'fewer':>8}")
    for row in rows:
        seconds, tokens = row["seconds"], row["tokens"]
        print(
            f"{row['id'].split('/')[1]:<8}{seconds['plain']:>10.3f}{seconds['shared']:>10.3f}{row['faster']:>8.2f}x"
            f"{row['faster_cpu']:>8.2f}x{tokens['plain']:>14,.0f}{tokens['shared']:>9,.0f}{row['fewer_tokens']:>7.2f}x"
        )
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
