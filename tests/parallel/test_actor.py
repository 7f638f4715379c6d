"""The actor beyond its updates: old statistics, precision, what reaches the output layer, and losses that are not finite."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel import cases
from tests.reference import tepo as reference
from tests.tiny import tiny_qwen3
from tests.worlds import run_world

LAYOUTS = [{}, {"tp": 2, "sequence_parallel": True}, {"pp": 2, "vpp": 2}, {"cp": 2, "tp": 2}, {"dp": 2}]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> cases.Case:
    return cases.make_case(tmp_path_factory.mktemp("case"), tied=True)


def start(cfg: Any) -> Any:
    from tepo_megatron import parallel
    from tepo_megatron.actor.actor import Actor
    from tepo_megatron.platform import activate

    return Actor(cfg, parallel.initialize(cfg.parallel, activate("cpu"), 0))


def old_stats(rank: int, cfg: Any, batch: Any) -> dict[str, Any]:
    actor = start(cfg)
    rows: list[int] = []
    output_layer = getattr(actor.chunks[-1].module, "output_layer", None)
    if actor.groups.is_last_stage:
        output_layer.register_forward_hook(lambda m, args, out: rows.append(out[0].size(0)))
    batch = actor.attach_old_stats(batch)
    mismatch = actor.mismatch(batch)
    return {
        "stats": (batch.old_logprobs_N, batch.old_entropies_N) if actor.groups.is_last_stage else None,
        "mismatch": mismatch,
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


def bf16_step(rank: int, cfg: Any, batch: Any) -> dict[str, Any]:
    from tepo_megatron.losses import build_objective

    actor = start(cfg)
    batch = actor.attach_old_stats(batch)
    actor.start_step()
    result = actor.update(batch, build_objective(cfg.objective))
    master = {type(p).__name__ + str(p.dtype) for g in actor.optimizer.param_groups for p in g["params"]}
    return {
        "old": batch.old_logprobs_N if actor.groups.is_last_stage else None,
        "grad_norm": result.metrics["actor/grad_norm"][0],
        "dtypes": {b.parameter.dtype for b in actor.bindings},
        "master": master,
        "dtype": batch.old_logprobs_N.dtype,
    }


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}, {"dp": 2}], ids=str)
def test_bf16_follows_fp32(case: cases.Case, layout: dict) -> None:
    """Weights in bf16, statistics and masters in fp32; log-probs and gradient norm within bf16's rounding of fp32's."""
    exact = run_world(1, bf16_step, cases.run_config(case.model, {}), case.batches[0])[0]
    cfg = cases.run_config(case.model, layout)
    cfg = replace(cfg, model=replace(cfg.model, precision="bf16"))
    for r in run_world(cfg.parallel.world_size, bf16_step, cfg, case.batches[0]):
        assert r["dtypes"] == {torch.bfloat16} and r["dtype"] == torch.float32
        assert all("float32" in m for m in r["master"])
        assert r["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.15)
        if r["old"] is not None:
            assert (r["old"] - exact["old"]).abs().mean() <= 0.05 * exact["old"].abs().mean()


def poisoned_update(rank: int, cfg: Any, batch: Any) -> tuple[str, dict[str, Any]]:
    from tepo_megatron.errors import NumericalError
    from tepo_megatron.losses import build_objective

    actor = start(cfg)
    before = {b.name: b.parameter.detach().clone() for b in actor.bindings}
    actor.start_step()
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
        assert "loss is nan in update 0" in message and unchanged


def wrong_world(rank: int, cfg: Any) -> None:
    start(cfg)


def test_world_of_the_wrong_size(tmp_path: Path) -> None:
    tiny_qwen3(tmp_path, layers=4)
    with pytest.raises(AssertionError, match=r"tp\*pp\*cp\*dp = 2\*1\*1\*1 = 2 ranks, but 1 were started"):
        run_world(1, wrong_world, cases.run_config(tmp_path, {"tp": 2}))
