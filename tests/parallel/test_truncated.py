"""Truncated sampling on every layout: values, gradients, masks that are recomputed, the same bits, and one collective."""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tepo_megatron.actor.output_stats import TRUNCATION_METRICS, known_mask
from tepo_megatron.base.types import TrainBatch, Truncation
from tepo_megatron.config import Config
from tests.marks import full_but
from tests.parallel import cases
from tests.parallel.cases import open_actor
from tests.parallel.test_statistics import counting
from tests.reference import tepo as tepo_reference
from tests.truncated import kept, reference, rows
from tests.worlds import run_world

ROWS, VOCAB, TRUNCATION = 23, 70, Truncation(20, 0.9)


def given() -> tuple[torch.Tensor, torch.Tensor, list[set[int]]]:
    """Logits, labels, masks. The second row's mask is on one rank alone, and its label is outside of what is recomputed."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, VOCAB, generator=generator, dtype=torch.float64) * 4
    logits[0] += 1000
    logits[1, 15:] -= 500
    labels = torch.where(torch.arange(ROWS) % 2 == 0, logits.argmax(1), torch.randint(0, VOCAB, (ROWS,), generator=generator))
    return logits, labels, [kept(z, 0.7, TRUNCATION) | {int(y)} for z, y in zip(logits, labels, strict=True)]


def on_rank(rank: int, size: int) -> dict[str, Any]:
    dist.init_process_group("gloo")
    from tepo_megatron.models.ops import padded_vocab_size
    from tepo_megatron.ops.vocab_parallel import token_stats

    logits, labels, masks = given()
    padded = torch.nn.functional.pad(logits, (0, padded_vocab_size(VOCAB, size) - VOCAB), value=float("nan"))
    leaf = padded.chunk(size, dim=1)[rank].clone().requires_grad_()
    local, out = leaf * 1, {}
    counts: Counter = Counter()
    with pytest.MonkeyPatch.context() as patch:
        counting(counts, patch)
        stats = token_stats(local, labels, 0.7, dist.group.WORLD, VOCAB, mask_RK=rows(masks), recompute=TRUNCATION)
        out["forward"] = dict(counts)
        counts.clear()
        (stats.logprob_R.sum() - 2 * stats.entropy_R.square().sum()).backward()
        out["backward"] = dict(counts)
    assert stats.recomputed is not None and leaf.grad is not None
    out |= {"stats": (stats.logprob_R.detach(), stats.entropy_R.detach(), *stats.recomputed), "grad": leaf.grad}
    return out | {"in_place": torch.equal(local, leaf.grad), "differ": stats.recomputed.differ(rows(masks)).tolist()}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_truncated_statistics_over_tensor_parallel_ranks(size: int) -> None:
    ranks = run_world(size, on_rank, size)
    logits, labels, masks = given()
    z = logits.clone().requires_grad_()
    logprob, entropy = reference(z, labels, 0.7, masks)
    (logprob.sum() - 2 * entropy.square().sum()).backward()
    for r in ranks:
        assert all(torch.equal(a, b) for a, b in zip(r["stats"], ranks[0]["stats"], strict=True))
        assert r["forward"] == ({"all_gather_into_tensor": 1} if size > 1 else {})
        assert r["backward"] == {} and r["in_place"] and not any(r["differ"])
    ours = ranks[0]["stats"]
    assert (ours[0] - logprob).abs().max() <= 1e-10 and (ours[1] - entropy).abs().max() <= 1e-10
    grad = torch.cat([r["grad"] for r in ranks], dim=1)
    assert z.grad is not None and (grad[:, :VOCAB] - z.grad).abs().max() <= 1e-10
    assert torch.equal(grad[:, VOCAB:], torch.zeros_like(grad[:, VOCAB:]))
    outside = [int(y) not in kept(row, 0.7, TRUNCATION) for row, y in zip(logits, labels, strict=True)]
    assert ours[3].tolist() == outside and any(outside) and not all(outside)


@pytest.fixture(scope="module")
def truncated(tmp_path_factory: pytest.TempPathFactory) -> cases.Case:
    return cases.make_case(tmp_path_factory.mktemp("truncated"), tied=True, truncation=TRUNCATION)


def config(case: cases.Case, layout: dict[str, Any], max_tokens: int, **training: Any) -> Config:
    cfg = cases.run_config(case.model, layout, max_tokens, **training)
    return replace(cfg, rollout=replace(cfg.rollout, top_k=TRUNCATION.top_k, top_p=TRUNCATION.top_p))


@pytest.mark.parametrize(
    ("name", "training"),
    full_but(
        [("TP2+SP", {}), ("CP2 TP2", {"logits_budget_mib": 0})],
        [("PP2", {})],
        [*((name, {}) for name in cases.LAYOUTS), ("1 rank", {"logits_budget_mib": 0}), ("CP2 TP2", {"logits_budget_mib": 0})],
    ),
)
def test_steps_on_the_engines_masks_are_those_of_the_reference(truncated: cases.Case, name: str, training: dict) -> None:
    """Loss, gradients and weights of two optimizer steps, with the KL mask's entropies among them."""
    cfg = config(truncated, cases.LAYOUTS[name], 90, **training)
    ranks = run_world(cfg.parallel.world_size, cases.train_steps, cfg, truncated.batches)
    cases.compare(ranks, truncated.steps, partial(cases.reference_steps, truncated.model, truncated.batches, torch.float32))


def passes(rank: int, cfg: Config, batch: TrainBatch) -> dict[str, Any]:
    """Attach masks, old and reference log-probs; take the first update, which compares the masks."""
    from tepo_megatron.losses import build_objective

    actor = open_actor(cfg)
    actor.keep_reference()
    batch, metrics = actor.masks.attach(batch)
    batch = actor.attach_ref_logprobs(actor.attach_old_stats(batch))
    order = [3, 0, 5]
    part = actor.attach_old_stats(batch.select(order, update=0))
    measured = actor.update(batch, build_objective(cfg.objective)).metrics
    last = actor.groups.is_last_stage
    return {
        "stats": (batch.old_logprobs_N, batch.old_entropies_N, batch.ref_logprobs_N) if last else None,
        "part": (part.old_logprobs_N, batch.select(order, 0).old_logprobs_N) if last else None,
        "masks": known_mask(batch) if last else None,
        "metrics": metrics,
        "measured": {name: measured[name] for name in TRUNCATION_METRICS},
    }


def without_masks(batch: TrainBatch) -> TrainBatch:
    batch = replace(batch, old_logprobs_N=None, old_entropies_N=None, update=0)
    return replace(batch, rollouts=tuple(replace(r, sampling_mask=None) for r in batch.rollouts))


def own_masks(case: cases.Case, batch: TrainBatch) -> tuple[list[set[int]], list[bool], list[torch.Tensor]]:
    """Return the model's own masks, whether each token is outside of what it keeps, and the statistics over the masks."""
    model, masks, outside, stats = tepo_reference.load(case.model), [], [], []
    for r in batch.rollouts:
        with torch.no_grad():
            logits = model(r.token_ids_L[None]).logits[0, :-1][r.response_mask_L[1:]]
            labels = r.token_ids_L[r.response_mask_L].tolist()
            own = [kept(z, cases.TEMPERATURE, TRUNCATION) for z in logits]
            outside += [y not in mask for y, mask in zip(labels, own, strict=True)]
            mine = [mask | {y} for y, mask in zip(labels, own, strict=True)]
            masks += mine
            found = tepo_reference.statistics(model, r.token_ids_L, r.response_mask_L, cases.TEMPERATURE, mine)
            stats.append(torch.stack(found))
    return masks, outside, [*torch.cat(stats, dim=1)]


@pytest.mark.parametrize(
    "name", full_but(["DP2 TP2", "CP2 PP2"], [], ["1 rank", "TP2+SP", "PP2 VPP2", "CP4", "DP2 TP2", "CP2 PP2"])
)
def test_recomputed_masks_are_those_of_the_model_on_every_layout(truncated: cases.Case, name: str) -> None:
    batch = without_masks(truncated.batches[0])
    cfg = config(truncated, cases.LAYOUTS[name], 90)
    masks, outside, (logprob, entropy) = own_masks(truncated, batch)
    for r in run_world(cfg.parallel.world_size, passes, cfg, batch):
        assert r["metrics"]["truncation/recomputed"] == 1 and r["metrics"]["truncation/cut"] == 0
        assert r["metrics"]["truncation/outside"] == pytest.approx(sum(outside) / len(outside)) and any(outside)
        assert r["metrics"]["truncation/kept_mean"] == pytest.approx(sum(map(len, masks)) / len(masks))
        assert r["measured"] == dict.fromkeys(TRUNCATION_METRICS, (0.0, 0.0))
        if r["stats"] is not None:
            assert [set(m.ids_M.tolist()) for m in r["masks"].split([1] * len(masks))] == masks
            for found, expected in zip(r["stats"], (logprob, entropy, logprob), strict=True):
                assert (found - expected).abs().max() <= 2e-5
            assert (r["part"][0] - r["part"][1]).abs().max() <= 2e-5
