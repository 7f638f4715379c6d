"""The actor beyond its updates: old statistics, precision, what reaches the output layer, and losses that are not finite."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.marks import slow_but
from tests.parallel import cases
from tests.parallel.cases import open_actor
from tests.reference import tepo as reference
from tests.worlds import run_world

LAYOUTS = [{}, {"tp": 2, "sequence_parallel": True}, {"pp": 2, "vpp": 2}, {"cp": 2, "tp": 2}, {"dp": 2}]


def old_stats(rank: int, cfg: Any, batch: Any) -> dict[str, Any]:
    from tepo_megatron.actor.accumulator import mismatch

    actor = open_actor(cfg)
    rows: list[int] = []
    output_layer = getattr(actor.chunks[-1].module, "output_layer", None)
    if actor.groups.is_last_stage:
        output_layer.register_forward_hook(lambda m, args, out: rows.append(out[0].size(0)))
    batch = actor.attach_old_stats(batch)
    found = mismatch(batch, actor.groups)
    return {
        "stats": (batch.old_logprobs_N, batch.old_entropies_N) if actor.groups.is_last_stage else None,
        "mismatch": found,
        "rows": rows,
        "first_tp": actor.groups.tp.rank == 0,
    }


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_old_statistics_equal_transformers_on_every_layout(case: cases.Case, layout: dict) -> None:
    batch = case.batches[0]
    model = reference.load(case.model)
    with torch.no_grad():
        pairs = [reference.statistics(model, r.token_ids_L, r.response_mask_L, cases.TEMPERATURE) for r in batch.rollouts]
    logprob, entropy = (torch.cat(x) for x in zip(*pairs, strict=True))
    cfg = cases.run_config(case.model, layout, max_tokens=100)
    ranks = run_world(cfg.parallel.world_size, old_stats, cfg, batch)
    for r in ranks:
        if r["stats"] is not None:
            assert (r["stats"][0] - logprob).abs().max() <= 2e-5 and (r["stats"][1] - entropy).abs().max() <= 2e-5
        expected = logprob.abs().mean().item()  # the case's rollout log-probs are 0
        assert r["mismatch"]["rollout/logprob_diff_mean"] == pytest.approx(expected, rel=1e-5)
        assert r["mismatch"]["actor/entropy"] == pytest.approx(entropy.mean().item(), rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_only_response_rows_reach_the_output_layer(case: cases.Case, layout: dict) -> None:
    cfg = cases.run_config(case.model, layout, max_tokens=100)
    ranks = run_world(cfg.parallel.world_size, old_stats, cfg, case.batches[0])
    assert sum(sum(r["rows"]) for r in ranks if r["first_tp"]) == sum(cases.RESPONSES)


def low_precision_step(rank: int, cfg: Any, batch: Any) -> dict[str, Any]:
    from tepo_megatron.losses import build_objective

    actor = open_actor(cfg)
    batch = actor.attach_old_stats(batch)
    masters = [p for group in actor.optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in masters]
    actor.start_step(1)
    result = actor.update(batch, build_objective(cfg.objective))
    return {
        "old": batch.old_logprobs_N if actor.groups.is_last_stage else None,
        "grad_norm": result.metrics["actor/grad_norm"][0],
        "gradients": cases.full_gradients(actor),
        "dtypes": {b.parameter.dtype for b in actor.bindings},
        "masters": {p.dtype for p in masters},
        "still": sum(bool(torch.equal(p, q)) for p, q in zip(masters, before, strict=True)),
    }


@pytest.fixture(scope="module")
def in_fp32(case: cases.Case) -> dict[str, Any]:
    return run_world(1, low_precision_step, cases.run_config(case.model, {}), case.batches[0])[0]


@pytest.mark.parametrize(
    "layout", slow_but([{}], [{}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}, {"cp": 2}, {"dp": 2}]), ids=str
)
def test_bf16_follows_fp32(case: cases.Case, in_fp32: dict[str, Any], layout: dict) -> None:
    """Weights in bf16, statistics and masters in fp32; every gradient within bf16's rounding of fp32's.

    A layer rounds 11 tensors forward (two norms, the projection to q, k and v, their norm and rotation, attention, its
    projection, three of the MLP, two residuals) and two gradients for each backward, independently and by at most half of eps.
    The derivatives of norms and softmax increase that, by less than 2.
    """
    cfg = cases.run_config(case.model, layout)
    cfg = replace(cfg, model=replace(cfg.model, precision="bf16"))
    ranks = run_world(cfg.parallel.world_size, low_precision_step, cfg, case.batches[0])
    gradients = {name: g for r in ranks for name, g in r["gradients"].items()}
    assert gradients.keys() == in_fp32["gradients"].keys()
    worst = max(cases.distance(g, in_fp32["gradients"][name]) for name, g in gradients.items())
    layers = json.loads((case.model / "config.json").read_text())["num_hidden_layers"]
    assert worst <= torch.finfo(torch.bfloat16).eps * (33 * layers) ** 0.5, worst
    for r in ranks:
        assert r["dtypes"] == {torch.bfloat16} and r["masters"] == {torch.float32} and r["still"] == 0
        assert r["grad_norm"] == pytest.approx(in_fp32["grad_norm"], rel=5e-3)
        if r["old"] is not None:
            assert r["old"].dtype == torch.float32
            assert (r["old"] - in_fp32["old"]).abs().mean() <= 0.02 * in_fp32["old"].abs().mean()


def warm_up(rank: int, cfg: Any) -> list[float]:
    actor = open_actor(cfg)
    rates = []
    for step in range(1, 6):
        actor.start_step(step)
        rates.append(actor.optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize(("steps", "shares"), [(0, [1, 1, 1, 1, 1]), (1, [1, 1, 1, 1, 1]), (4, [0.25, 0.5, 0.75, 1, 1])])
def test_learning_rate_warms_up_linearly_from_the_first_step(case: cases.Case, steps: int, shares: list[float]) -> None:
    cfg = cases.run_config(case.model, {})
    cfg = replace(cfg, optimizer=replace(cfg.optimizer, warmup_steps=steps))
    assert run_world(1, warm_up, cfg)[0] == pytest.approx([cfg.optimizer.lr * s for s in shares])


def poisoned_update(rank: int, cfg: Any, batch: Any) -> tuple[str, dict[str, Any]]:
    from tepo_megatron.base.errors import NumericalError
    from tepo_megatron.losses import build_objective

    actor = open_actor(cfg)
    before = {b.name: b.parameter.detach().clone() for b in actor.bindings}
    actor.start_step(1)
    try:
        actor.update(batch, build_objective(cfg.objective))
    except NumericalError as e:
        return str(e), all(torch.equal(b.parameter, before[b.name]) for b in actor.bindings)
    return "no error", False


@pytest.mark.parametrize("layout", [{}, {"pp": 2}, {"cp": 2}, {"dp": 2}], ids=str)
def test_a_loss_that_is_not_finite_stops_every_rank_before_the_step(case: cases.Case, layout: dict) -> None:
    batch = case.batches[0]
    advantages = batch.advantages_B.clone()
    advantages[4] = float("nan")
    cfg = cases.run_config(case.model, layout)
    for message, unchanged in run_world(cfg.parallel.world_size, poisoned_update, cfg, replace(batch, advantages_B=advantages)):
        assert "loss is nan in step 1, update 1" in message and unchanged
