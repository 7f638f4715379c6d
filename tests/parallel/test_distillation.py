"""Distillation with the exact KL over the vocabulary: two updates on every layout against fp64, memory, and collectives."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tepo_megatron.config import Config
from tepo_megatron.config.io import plain, validate
from tests.marks import full_but
from tests.parallel import cases
from tests.parallel.cases import open_actor
from tests.parallel.test_reference_policy import other  # noqa: F401
from tests.parallel.test_statistics import counting
from tests.reference import tepo as reference
from tests.worlds import run_world

BETA = 0.7
DISTILL = {"name": "distill", "ref_kl": {"beta": BETA, "estimator": "full"}}


def config(model: Path, teacher: Path, layout: dict[str, Any], max_tokens: int = 4096, objective: Any = DISTILL) -> Config:
    objective = objective | {"ref_kl": objective["ref_kl"] | {"path": str(teacher)}}
    tree = plain(cases.run_config(model, layout, max_tokens, objective, logits_budget_mib=0))
    return validate(tree | {"rollout": tree["rollout"] | {"filter_uniform_groups": False}})


def updates(rank: int, cfg: Config, batches: Any) -> list[dict[str, Any]]:
    from tepo_megatron.service.method import resolve

    actor = open_actor(cfg)
    actor.keep_reference()
    out = cases.steps_of(actor, batches, resolve(cfg).objective)
    return out


def expected(case: cases.Case, teacher: Path, reward: bool) -> tuple[reference.Step, ...]:
    """Two steps of transformers' model in fp64: KL(student || teacher) summed over the vocabulary, mean over tokens."""
    trainer, of_teacher, steps = reference.Trainer(case.model, **cases.ADAM), reference.load(teacher), []
    for batch in case.batches:
        total = torch.zeros((), dtype=torch.float64)
        old_N = batch.old_logprobs_N
        assert old_N is not None
        of_old = old_N.double().split(batch.response_lengths)
        for row, advantage, old in zip(batch.rollouts, batch.advantages_B.double(), of_old, strict=True):
            keep = row.response_mask_L[1:]
            log_p, log_q = (
                torch.log_softmax(model(row.token_ids_L[None]).logits[0, :-1][keep] / cases.TEMPERATURE, dim=-1)
                for model in (trainer.model, of_teacher)
            )
            total = total - BETA * (log_p.exp() * (log_p - log_q.detach())).sum()
            if reward:
                log_ratio = log_p.gather(1, row.token_ids_L[1:][keep][:, None])[:, 0] - old
                ratio = log_ratio.mean().exp()
                clipped = ratio.clamp(1 - cases.EPS, 1 + cases.EPS)
                total = total + log_ratio.numel() * torch.minimum(ratio * advantage, clipped * advantage)
        steps.append(trainer.take(-total / batch.num_tokens))
    return tuple(steps)


@pytest.fixture(scope="module")
def distilled(case: cases.Case, other: Path) -> tuple[reference.Step, ...]:  # noqa: F811
    return expected(case, other, reward=False)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "max_tokens"), full_but([("CP2 TP2", 100)], [], [(name, 100) for name in cases.LAYOUTS]))
def test_every_layout_trains_to_the_exact_kl(
    case: cases.Case,
    other: Path,  # noqa: F811
    distilled: tuple[reference.Step, ...],
    name: str,
    max_tokens: int,
) -> None:
    cfg = config(case.model, other, cases.LAYOUTS[name], max_tokens)
    batches = [replace(batch, advantages_B=torch.zeros_like(batch.advantages_B)) for batch in case.batches]
    cases.compare(run_world(cfg.parallel.world_size, updates, cfg, batches), distilled)


def counted(rank: int, size: int, vocabulary: int) -> tuple[torch.Tensor, Counter, Counter]:
    """Return the KL of some rows on a rank of a tensor-parallel group, and the collectives of forward and of backward."""
    from tepo_megatron.ops.output_layer import output_layer_stats
    from tepo_megatron.ops.token_statistics.teacher import TeacherRows

    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    hidden, of_teacher = (torch.randn(9, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    weight, teacher_weight = (torch.randn(16, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    h, labels = hidden.clone().requires_grad_(), torch.arange(9) % vocabulary
    teacher = TeacherRows(of_teacher, teacher_weight.chunk(size)[rank])
    forward: Counter = Counter()
    backward: Counter = Counter()
    with pytest.MonkeyPatch.context() as patch:
        counting(forward, patch)
        stats = output_layer_stats(
            h,
            weight.chunk(size)[rank],
            labels,
            temperature=0.8,
            group=dist.group.WORLD,
            vocab_size=vocabulary,
            teacher=teacher,
            sum_hidden_gradient=False,
        )
    assert stats.teacher_kl_R is not None
    with pytest.MonkeyPatch.context() as patch:
        counting(backward, patch)
        stats.teacher_kl_R.square().sum().backward()
    log_p, log_q = (
        torch.log_softmax((x @ w.t())[:, :vocabulary] / 0.8, 1) for x, w in ((hidden, weight), (of_teacher, teacher_weight))
    )
    assert torch.allclose(stats.teacher_kl_R, (log_p.exp() * (log_p - log_q)).sum(1), rtol=1e-12, atol=1e-13)
    return stats.teacher_kl_R.detach(), forward, backward


@pytest.mark.parametrize("vocabulary", [13, 7])
def test_one_collective_in_forward_and_none_in_backward(vocabulary: int) -> None:
    """With 7 real columns of 16, the second rank has padding alone."""
    ranks = run_world(2, counted, 2, vocabulary)
    for kl, forward, backward in ranks:
        assert forward == {"all_gather_into_tensor": 1} and not backward
        assert torch.equal(kl, ranks[0][0])
