"""The batch that every layout must agree on, and functions that run it on one layout.

The old statistics come from perturbed weights and the advantages' signs are chosen so that clipping on both sides, the KL mask,
and sequences of length 1, groups of one, and sequences over several context-parallel ranks all occur.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from tepo_megatron.base.types import Rollout, SamplingMask, TrainBatch, Truncation
from tepo_megatron.config import Config
from tepo_megatron.config.io import validate
from tests.reference import tepo as reference
from tests.reference.rounding import DRAWS, most_beyond_rounding, norm, relative
from tests.tiny import tiny_model, tiny_qwen3
from tests.truncated import kept, rows

VOCAB = 70  # not a multiple of 16 tp: every layout pads it differently
TEMPERATURE, EPS, BETA = 0.8, 0.2, 1.0
# A small eps would divide the rounding errors of small gradients by it, and the second step would show them doubled.
ADAM = {"lr": 1e-3, "eps": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.01, "clip": 1.0}
RESPONSES = (14, 1, 25, 9, 30, 1, 17, 4, 22, 11, 2, 28)  # |y|; prompts of 3 to 8 tokens
GROUP_OF = (0, 1, 1, 2, 2, 2, 3, 4, 4, 5, 5, 5)  # groups of 1, 2 and 3 sequences
SHARED_PROMPTS = (5, 1, 9, 4, 12, 7)  # tokens of each group's prompt, where its sequences share it
STEPS = 2
TOLERANCE = 1e-5  # per tensor, ||a - b|| / ||b||

LAYOUTS = {
    "1 rank": {},
    "TP2": {"tp": 2},
    "TP2+SP": {"tp": 2, "sequence_parallel": True},
    "PP2": {"pp": 2},
    "PP2 VPP2": {"pp": 2, "vpp": 2},
    "CP2": {"cp": 2},
    "CP4": {"cp": 4},
    "DP2": {"dp": 2},
    "TP2 PP2": {"tp": 2, "pp": 2},
    "CP2 TP2": {"cp": 2, "tp": 2},
    "CP2 TP2+SP": {"cp": 2, "tp": 2, "sequence_parallel": True},
    "CP2 PP2": {"cp": 2, "pp": 2},
    "DP2 TP2": {"dp": 2, "tp": 2},
}


@dataclass(frozen=True)
class Case:
    """The model directory, the batch of each optimizer step, and the reference's result for each."""

    model: Path
    batches: tuple[TrainBatch, ...]
    steps: tuple[reference.Step, ...]


def make_case(
    folder: Path,
    *,
    tied: bool,
    form: str = "tepo",
    shared: bool = False,
    layers: int = 4,
    truncation: Truncation | None = None,
    config: PretrainedConfig | None = None,
    **model_keys: Any,
) -> Case:
    """Write a model, and return batches and the fp64 reference's steps."""
    model = folder / f"tiny-{tied}"
    if config is None:
        tiny_qwen3(model, tied=tied, layers=layers, vocab_size=VOCAB, **model_keys)
    else:
        tiny_model(model, config)
    trainer = reference.Trainer(model, **ADAM)
    perturbed = reference.load(model)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in perturbed.parameters():
            p.add_(0.04 * p.abs().mean() * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    batches, steps = [], []
    for step in range(STEPS):
        prompts = [torch.randint(1, VOCAB, (n,), generator=generator) for n in SHARED_PROMPTS] if shared else None
        sequences = [
            _sequence(perturbed, trainer.model, i, step, generator, prompts, truncation) for i in range(len(RESPONSES))
        ]
        batches.append(_batch(sequences, step + 1))  # 0 would say that the old statistics are those of the current weights
        steps.append(trainer.step(sequences, TEMPERATURE, EPS, BETA, form))
    return Case(model, tuple(batches), tuple(steps))


def reference_steps(
    model: Path, batches: tuple[TrainBatch, ...], dtype: torch.dtype = torch.float64, nudge: int = 0
) -> tuple[reference.Step, ...]:
    """Return the reference's steps for other batches than those of `make_case`, in another dtype, or nudged (`load`)."""
    trainer = reference.Trainer(model, **ADAM, dtype=dtype, nudge=nudge)
    steps = [trainer.step(reference_sequences(batch), TEMPERATURE, EPS, BETA) for batch in batches]
    return tuple(steps)


def reference_sequences(batch: TrainBatch) -> list[reference.Sequence]:
    assert batch.old_logprobs_N is not None and batch.old_entropies_N is not None
    old = (x.double().split(batch.response_lengths) for x in (batch.old_logprobs_N, batch.old_entropies_N))
    return [
        reference.Sequence(r.token_ids_L, r.response_mask_L, float(a), *statistics)
        for r, a, *statistics in zip(batch.rollouts, batch.advantages_B.double(), *old, strict=True)
    ]


def bf16_error_of_loss(model: Path, weights: dict[str, Tensor], batch: TrainBatch) -> float:
    """Return how far rounding takes a bf16 loss from fp64, where the rounding of all tokens has the same sign.

    To first order in the errors that transformers makes in the logits of each token. No KL mask of the batch may be on the
    edge: the loss would jump.
    """
    exact, low = (reference.load(model, dtype) for dtype in (torch.float64, torch.bfloat16))
    for each in (exact, low):
        assert each.load_state_dict(weights, strict=False).missing_keys in ([], ["lm_head.weight"]), "but for a tied one"
    logits: list[Tensor] = []

    def kept(ids: Tensor) -> Any:
        out = exact(ids)
        out.logits.retain_grad()
        logits.append(out.logits)
        return out

    sequences = reference_sequences(batch)
    reference.tepo_loss(kept, sequences, TEMPERATURE, EPS, BETA, "tepo")[0].backward()
    with torch.no_grad():
        errors = [(z.grad * (low(s.ids[None]).logits - z)).sum(-1).abs().sum() for s, z in zip(sequences, logits, strict=True)]
    return sum(errors, torch.zeros(())).item()


def _sequence(
    old: torch.nn.Module,
    current: torch.nn.Module,
    i: int,
    step: int,
    generator: torch.Generator,
    prompts: list[Tensor] | None,
    truncation: Truncation | None,
) -> reference.Sequence:
    """Draw tokens, behind the group's prompt if there are `prompts`, and old statistics.

    The old statistics come from perturbed weights plus a drift that pushes w beyond the clip range for two of three sequences,
    on the side that the sign of A clips.
    """
    prompt = prompts[GROUP_OF[i]].numel() if prompts else 3 + (5 * i + step) % 6
    # never id 0: transformers keeps the padding token out of the gradient (padding_idx)
    ids = torch.randint(1, VOCAB, (prompt + RESPONSES[i],), generator=generator)
    if prompts:
        ids[:prompt] = prompts[GROUP_OF[i]]
    response = torch.arange(ids.numel()) >= prompt
    with torch.no_grad():
        masks = None
        if truncation is not None:  # some of the tokens, which are drawn from all, are outside of what is kept
            logits = old(ids[None]).logits[0, prompt - 1 : -1]
            masks = [kept(z, TEMPERATURE, truncation) | {int(y)} for z, y in zip(logits, ids[prompt:], strict=True)]
        logprob, entropy = reference.statistics(old, ids, response, TEMPERATURE, masks)
        now, _ = reference.statistics(current, ids, response, TEMPERATURE, masks)
    sign = 1.0 if i % 2 == 0 else -1.0
    alone = GROUP_OF.count(GROUP_OF[i]) == 1
    drift = (0.35 * sign if i % 3 else -0.1 * sign) - (now - logprob).mean()
    magnitude = 0.0 if alone else 0.5 + torch.rand((), generator=generator).item()  # a group of one has no advantage
    return reference.Sequence(
        ids, response, sign * magnitude, (logprob - drift).float().double(), (entropy + 0.05).float().double(), masks
    )


def _batch(sequences: list[reference.Sequence], update: int) -> TrainBatch:
    """Convert the sequences to the product's data objects."""
    rollouts = tuple(
        Rollout(
            prompt_id=GROUP_OF[i],
            token_ids_L=s.ids,
            response_mask_L=s.response,
            rollout_logprobs_L=torch.zeros(s.ids.numel()),
            policy_version=0,
            stop_reason="stop",
            sampling_mask=None if s.masks is None else SamplingMask.from_rows(rows(s.masks)),
        )
        for i, s in enumerate(sequences)
    )
    return TrainBatch(
        rollouts,
        torch.tensor([s.advantage for s in sequences], dtype=torch.float32),
        torch.cat([s.old_logprob for s in sequences]).float(),
        torch.cat([s.old_entropy for s in sequences]).float(),
        update=update,
    )


def run_config(
    model: Path,
    parallel: dict[str, Any],
    max_tokens: int = 4096,
    objective: dict[str, Any] | None = None,
    ddp: dict[str, Any] | None = None,
    **training: Any,
) -> Config:
    return validate({
        "name": "layout",
        "platform": "cpu",
        "model": {"path": str(model), "precision": "fp32"},
        "data": {"train": "unused", "max_prompt_tokens": 8},
        "rollout": {"prompts_per_step": 16, "temperature": TEMPERATURE, "max_response_tokens": 30},
        "training": {"max_tokens_per_microbatch": max_tokens, "minibatch_prompts": 16} | training,
        "parallel": parallel,
        "objective": objective or {"name": "tepo", "beta": BETA, "clip_low": EPS, "clip_high": EPS},
        "optimizer": {"lr": ADAM["lr"]},
        "megatron": {
            "ddp": ddp or {},
            "optimizer": {
                "adam_eps": ADAM["eps"], "adam_beta1": ADAM["betas"][0], "adam_beta2": ADAM["betas"][1],
                "weight_decay": ADAM["weight_decay"], "clip_grad": ADAM["clip"],
            },
        },
    })  # fmt: skip


def open_actor(cfg: Config) -> Any:
    """Return the actor of a forked rank, on the mesh of the config."""
    from tepo_megatron.actor.actor import Actor
    from tepo_megatron.dist import parallel
    from tepo_megatron.dist.platform import activate

    return Actor.open(cfg, parallel.initialize(cfg.parallel, activate(cfg.platform), cfg.seed))


def train_steps(rank: int, cfg: Config, batches: tuple[TrainBatch, ...]) -> list[dict[str, Any]]:
    """Take the optimizer steps in a forked rank; return each as {loss, grad_norm, gradients, weights}.

    Tensors are returned on the ranks that own them in their pipeline stage only.
    """
    return steps_of(open_actor(cfg), batches)


def steps_of(actor: Any, batches: tuple[TrainBatch, ...], objective: Any = None) -> list[dict[str, Any]]:
    """Take the optimizer steps of an actor; return them as `train_steps` does."""
    from tepo_megatron.losses import build_objective

    objective = objective or build_objective(actor.cfg.objective)
    actor.start_step(1)
    out = []
    for batch in batches:
        captured: dict[str, Tensor] = {}
        step_optimizer = actor.optimizer.step

        def capture_then_step(captured=captured, step_optimizer=step_optimizer):
            captured.update(full_gradients(actor))
            return step_optimizer()

        actor.optimizer.step = capture_then_step
        result = actor.update(batch, objective)
        actor.optimizer.step = step_optimizer
        actor.finish_step()  # under overlap_param_gather a rank lacks the others' parts of the weights until then
        out.append({
            "loss": result.metrics["loss/total"][0],
            "metrics": result.metrics,
            "grad_norm": result.metrics["actor/grad_norm"][0],
            "gradients": captured,
            "weights": owned_tensors(actor, [b.parameter for b in actor.bindings]),
            "ratio_B": result.ratio_B.cpu(),
        })  # fmt: skip
    return out


def compare(
    ranks: list[list[dict[str, Any]]],
    steps: tuple[reference.Step, ...],
    in_fp32: Callable[[int], tuple[reference.Step, ...]] | None = None,
) -> None:
    """Assert that loss, gradient norm, every gradient and every weight of `train_steps` are the reference's.

    Args:
        in_fp32: The same steps of the reference in fp32 with a nudge (`load`), computed where an error is above TOLERANCE:
            what is off as these are is rounding (reference/rounding.py). None: nothing is.
    """
    found = errors(ranks, steps)
    worst = (*worst_of(found), TOLERANCE)
    if in_fp32 is not None and not worst[1] <= TOLERANCE:
        draws = [errors([[asdict(step) for step in in_fp32(nudge)]] * len(ranks), steps) for nudge in DRAWS]
        each = [most_beyond_rounding(step, [draw[i] for draw in draws], TOLERANCE) for i, step in enumerate(found)]
        worst = max(each, key=lambda step: step[1] / step[2])
    name, most, bound = worst
    assert most <= bound, f"{name} differ by {most:.1e}, and the bound is {bound:.1e}"


def errors(ranks: list[list[dict[str, Any]]], steps: tuple[reference.Step, ...]) -> list[dict[str, Tensor]]:
    """Return the relative errors of each step: of loss, gradient norm, each gradient and each weight, by name."""
    found: list[dict[str, Tensor]] = []
    for i, expected in enumerate(steps):
        step: dict[str, Tensor] = {}
        for number, rank in enumerate(ranks):
            for kind, scalar in (("loss", expected.loss), ("grad_norm", expected.grad_norm)):
                step[f"step {i}: {kind} of rank {number}"] = relative(torch.tensor([rank[i][kind]]), torch.tensor([scalar]))
        for kind, tensors in (("gradients", expected.gradients), ("weights", expected.weights)):
            merged = {name: t for rank in ranks for name, t in rank[i][kind].items()}
            assert merged.keys() == tensors.keys()
            step |= {f"step {i}: {kind} of {name}": relative(merged[name], t) for name, t in tensors.items()}
        found.append(step)
    return found


def worst_of(steps: list[dict[str, Tensor]]) -> tuple[str, float]:
    """Return the largest of `errors`, with its name; NaN counts as inf."""
    return max(((name, norm(error)) for step in steps for name, error in step.items()), key=itemgetter(1))


def nearness(ranks: list[list[dict[str, Any]]], steps: tuple[reference.Step, ...]) -> tuple[float, float]:
    """Return 1 - cosine of all gradients and the relative error of their norm, of the worst step; for low precision."""
    apart, norms = [], []
    for i, expected in enumerate(steps):
        gradients = _whole({name: t for rank in ranks for name, t in rank[i]["gradients"].items()})
        apart.append(1 - torch.nn.functional.cosine_similarity(gradients, _whole(expected.gradients), dim=0).item())
        norms.append(abs(ranks[0][i]["grad_norm"] / expected.grad_norm - 1))
    return max(apart), max(norms)


def _whole(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


def full_gradients(actor: Any) -> dict[str, Tensor]:
    """Return the reduced gradients, in HF names, gathered from the shards that the distributed optimizer leaves each rank."""
    import torch.distributed as dist
    from megatron.core.distributed.param_and_grad_buffer import shard_buffer

    kept = []
    for chunk in actor.chunks:
        for bucket_group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            group = bucket_group.intra_distributed_optimizer_instance_group
            for bucket in bucket_group.buckets:
                kept.append((bucket.grad_data, bucket.grad_data.clone()))
                shard = shard_buffer(bucket.grad_data, group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)
    gradients = owned_tensors(actor, [b.parameter.main_grad for b in actor.bindings])
    for data, original in kept:
        data.copy_(original)
    return gradients


def owned_tensors(actor: Any, tensors: list[Tensor]) -> dict[str, Tensor]:
    """Return the part of `tensors` (one per binding) that this rank would send, in HF layout."""
    from tepo_megatron.models.gather import iterate_hf, sent_by

    bindings = sent_by([replace(b, parameter=t) for b, t in zip(actor.bindings, tensors, strict=True)], actor.groups)
    found = iterate_hf(bindings, actor.arch, actor.groups.tp)
    return {name: t.detach().cpu() if t.is_cuda else t.detach().clone() for name, t in found}


def distance(a: Tensor, b: Tensor) -> float:
    """Return ||a - b|| / ||b||."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()
