"""Measure the effect of low precision on log-probs, entropies and TEPO's mask, on the demo's model, against fp32.

    python -m benchmarks.precision [--model .cache/demo/seed-0] [--prompts 32] [--out benchmarks/results/precision.json]

The model (python -m examples.arithmetic.base_model --seed 0 --out .cache/demo/seed-0) answers problems of its own kind. The
graded responses are one rollout batch. Then every precision separately does what a training step does: the old statistics, and
the demo's four updates on minibatches of them, at its learning rate. After each update all tokens are compared with fp32's.

    log-prob, entropy   |difference| to fp32 under the same weights: before the first update, mean and largest, in nats
    noise of dH         99 % of the entropies change by less if the sequences are packed differently (`Actor.measure_noise`)
    mask flips          share of response tokens whose TEPO mask (A > 0 and dH < 0) differs from that in fp32, after each update

bf16 is real. FP8 needs a GPU: here its forward products are emulated (inputs and weights of the layers' linear modules are
rounded to e4m3 with the preset's scales, products are bf16's, gradients pass through); its kernels and its gradients in e5m2
are not. Prints the table of docs/precision.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from examples.arithmetic import task
from tepo_megatron.config import Config
from tepo_megatron.config.io import load_config
from tepo_megatron.platform import activate
from tepo_megatron.types import Rollout, TrainBatch

if TYPE_CHECKING:
    from tepo_megatron.actor.actor import Actor
    from tepo_megatron.distributed.parallel import ParallelDims

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks/results/precision.json"
SAMPLES, TOKENS = 8, 48  # as in the demo
LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
E4M3_MAX, BLOCK = 448.0, 128


def rounded_by_tensor(x: Tensor) -> Tensor:
    """Return x rounded to e4m3 with one scale, from its own maximum (fp8-current)."""
    scale = E4M3_MAX / x.abs().amax().float().clamp(min=1e-12)
    return ((x.float() * scale).to(torch.float8_e4m3fn).float() / scale).to(x.dtype)


def rounded_by_block(x: Tensor, rows: int) -> Tensor:
    """Return x rounded to e4m3 with one power-of-two scale for each `rows` x 128 values (fp8-blockwise)."""
    flat = x.flatten(0, -2).float()
    grid = torch.nn.functional.pad(flat, (0, -flat.size(1) % BLOCK, 0, -flat.size(0) % rows))
    blocks = grid.unflatten(0, (-1, rows)).unflatten(2, (-1, BLOCK))
    scale = (E4M3_MAX / blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-12)).log2().floor().exp2()
    back = ((blocks * scale).to(torch.float8_e4m3fn).float() / scale).flatten(2, 3).flatten(0, 1)
    return back[: flat.size(0), : flat.size(1)].view(x.shape).to(x.dtype)


# name -> (model.precision here, what rounds inputs, what rounds weights)
Rounding = Callable[[Tensor], Tensor]
VARIANTS: dict[str, tuple[str, Rounding | None, Rounding | None]] = {
    "fp32": ("fp32", None, None),
    "bf16": ("bf16", None, None),
    "fp8-current, emulated": ("bf16", rounded_by_tensor, rounded_by_tensor),
    "fp8-blockwise, emulated": ("bf16", lambda x: rounded_by_block(x, 1), lambda w: rounded_by_block(w, BLOCK)),
}


def emulate(actor: Actor, inputs: Rounding, weights: Rounding) -> None:
    """Have the linear modules of the layers multiply rounded inputs with rounded weights; gradients pass through."""
    found = [m for chunk in actor.chunks for name, m in chunk.named_modules() if name.rpartition(".")[2] in LINEARS]
    assert len(found) == len(LINEARS) * actor.arch.num_layers
    for module in found:
        product = module._forward_impl

        def rounded(input: Tensor, weight: Tensor, *args: Any, product: Any = product, **kwargs: Any) -> Any:
            x = input + (inputs(input.detach()) - input.detach())
            w = weight + (weights(weight.detach()) - weight.detach())
            return product(x, w, *args, **kwargs)

        module._forward_impl = rounded


def sampled(model: Path, prompts: int, seed: int = 0) -> list[Rollout]:
    """Return graded responses of the model, in groups that are neither all right nor all wrong."""
    torch.manual_seed(seed)
    rng, tokenizer = random.Random(seed), task.build_tokenizer()
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    stop = tokenizer.convert_tokens_to_ids(task.END)
    out: list[Rollout] = []
    kept = 0
    while kept < prompts:
        problem = task.make_problem(rng)
        prompt = torch.tensor([tokenizer(problem.prompt).input_ids])
        ids = policy.generate(
            prompt, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=TOKENS, num_return_sequences=SAMPLES,
            eos_token_id=stop, pad_token_id=tokenizer.pad_token_id,
        )[:, prompt.size(1) :].tolist()  # fmt: skip
        responses = [row[: row.index(stop) + 1] if stop in row else row for row in ids]
        scores = [float(task.boxed_answer(tokenizer.decode(r)) == str(problem.answer)) for r in responses]
        if len(set(scores)) > 1:
            out += [_rollout(kept, prompt[0].tolist(), r, s) for r, s in zip(responses, scores, strict=True)]
            kept += 1
    return out


def _rollout(prompt_id: int, prompt: list[int], response: list[int], score: float) -> Rollout:
    ids = torch.tensor(prompt + response)
    mask = torch.arange(ids.numel()) >= len(prompt)
    return Rollout(prompt_id, ids, mask, torch.zeros(ids.numel()), 0, "stop", reward=score, score=score)


def statistics(actor: Actor, batch: TrainBatch) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies of all response tokens under the actor's weights, fp32."""
    found = actor.attach_old_stats(replace(batch, old_logprobs_N=None, old_entropies_N=None))
    assert found.old_logprobs_N is not None and found.old_entropies_N is not None
    return found.old_logprobs_N.clone(), found.old_entropies_N.clone()


def step(cfg: Config, name: str, groups: ParallelDims, rollouts: list[Rollout]) -> dict[str, Any]:
    """Run a training step in one precision: statistics before and after each update, the mask after each, the noise of dH."""
    from tepo_megatron.actor.actor import Actor
    from tepo_megatron.losses import build_objective
    from tepo_megatron.losses.advantages import group_advantages
    from tepo_megatron.losses.kl import mask_falling_entropy

    precision, inputs, weights = VARIANTS[name]
    actor = Actor.open(replace(cfg, model=replace(cfg.model, precision=precision)), groups)  # type: ignore[arg-type]
    if inputs is not None and weights is not None:
        emulate(actor, inputs, weights)
    objective = build_objective(cfg.objective)
    advantages_B = group_advantages(rollouts, objective.advantage)
    batch = TrainBatch.build(rollouts, advantages_B)
    logprobs, old_entropies = statistics(actor, batch)
    batch = replace(batch, old_logprobs_N=logprobs, old_entropies_N=old_entropies)
    noise = actor.measure_noise(batch)
    advantages_N = advantages_B[batch.sequence_N(advantages_B.device)]
    actor.start_step(1)
    masks: list[Tensor] = []
    after, moved = [], []
    still = falling = 0.0
    before = torch.cat([b.parameter.detach().flatten() for b in actor.bindings])
    for minibatch in batch.epochs(cfg.training.epochs, cfg.training.minibatch_prompts, seed=1):
        if not masks:
            change = statistics(actor, minibatch)[1] - minibatch.old_entropies_N
            still, falling = ((change == 0).float().mean().item(), (change < 0).float().mean().item())
        actor.update(minibatch, objective)
        now, entropies = statistics(actor, batch)
        masks.append(mask_falling_entropy(advantages_N, entropies - old_entropies, 0.0))
        after.append(now)
        changed = torch.cat([b.parameter.detach().flatten() for b in actor.bindings]) != before
        moved.append(changed.float().mean().item())
    return {
        "logprobs": logprobs, "entropies": old_entropies, "noise": noise, "masks": masks, "after": after,
        "moved": moved, "still": still, "falling": falling, "change": (entropies - old_entropies).abs(),
    }  # fmt: skip


def compared(here: dict[str, Any], fp32: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of one precision.

    `moved` is the share of the parameters that differ from the start's after each update. `still` and `falling` are the shares
    of the tokens with dH = 0 and dH < 0 before the first update, where only the different packing changes the entropy.
    `flips_of_large_changes` counts, after the last update, only the half of the tokens with the larger |dH| in fp32.

    Args:
        fp32: Result of `step` in fp32.
    """
    logprob, entropy = ((here[k] - fp32[k]).abs() for k in ("logprobs", "entropies"))
    flips = [(a != b).float().mean().item() for a, b in zip(here["masks"], fp32["masks"], strict=True)]
    large = fp32["change"] > fp32["change"].median()
    return {
        "logprob_mean": logprob.mean().item(), "logprob_max": logprob.max().item(),
        "entropy_mean": entropy.mean().item(), "entropy_max": entropy.max().item(),
        "noise": here["noise"], "flips": flips, "mask_share": here["masks"][-1].float().mean().item(),
        "flips_of_large_changes": (here["masks"][-1] != fp32["masks"][-1])[large].float().mean().item(),
        "moved": here["moved"], "still": here["still"], "falling": here["falling"],
        "logprob_after": (here["after"][-1] - fp32["after"][-1]).abs().mean().item(),
    }  # fmt: skip


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return the Markdown table that docs/precision.md shows."""
    head = ["", "log-prob: mean", "largest", "entropy: mean", "largest", "noise of dH", "mask flips after update 1, 2, 3, 4"]
    rows = [head, ["---"] * len(head)]
    for name, x in results.items():
        figures = [f"{x[k]:.1e}" for k in ("logprob_mean", "logprob_max", "entropy_mean", "entropy_max", "noise")]
        rows.append([name, *figures, ", ".join(f"{share:.2%}" for share in x["flips"])])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(".cache/demo/seed-0"))
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(1)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29512")):
        os.environ.setdefault(name, value)
    platform = activate("cpu")
    from benchmarks.results import surroundings
    from tepo_megatron.distributed import parallel

    rollouts = sampled(args.model, args.prompts)
    with tempfile.TemporaryDirectory() as folder:
        keys = {"model.path": args.model, "parallel.tp": 1, "optimizer.warmup_steps": 0, "output": folder}
        cfg = load_config(ROOT / "examples/demo.yaml", [f"--{key}={value}" for key, value in keys.items()])
        groups = parallel.initialize(cfg.parallel, platform, cfg.seed)
        steps = {name: step(cfg, name, groups, rollouts) for name in VARIANTS}
        parallel.shutdown()
    results = {name: compared(found, steps["fp32"]) for name, found in steps.items()}
    tokens = sum(r.response_length for r in rollouts)
    print(f"{len(rollouts)} responses of {args.model}, {tokens} tokens\n\n{table(results)}")
    args.out.write_text(json.dumps({"tokens": tokens, "results": results} | surroundings(), indent=1) + "\n")


if __name__ == "__main__":
    main()
