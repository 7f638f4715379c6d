"""Options that save memory or hide communication change no bit of the training, and have their effect."""

import itertools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tepo_megatron.actor.precision import alignment
from tepo_megatron.config import Config, MegatronConfig, ModelConfig
from tepo_megatron.config.io import plain, validate
from tests.marks import full_but
from tests.parallel import cases
from tests.parallel.cases import open_actor
from tests.worlds import run_world

UPDATES = 2


def config(
    case: cases.Case,
    parallel: dict[str, Any] | None = None,
    max_tokens: int = 4096,
    ddp: dict[str, Any] | None = None,
    **sections: dict[str, Any],
) -> Config:
    tree = plain(cases.run_config(case.model, parallel or {}, max_tokens))
    for name, keys in sections.items():
        tree[name] |= keys
    tree["megatron"]["ddp"] |= ddp or {}
    return validate(tree)


def agree(actor: Any) -> bool:
    """Return whether the ranks that hold the same part of the model have the same parameters."""
    axis = actor.groups.dp_cp
    mine = torch.cat([b.parameter.detach().flatten() for b in actor.bindings])
    theirs = [torch.empty_like(mine) for _ in range(axis.size)]
    dist.all_gather(theirs, mine, group=axis.group)
    return all(torch.equal(mine, other) for other in theirs)


def trained(rank: int, cfg: Config, case: cases.Case, settle: bool = False, multiple: int | None = None) -> dict[str, Any]:
    """Take some updates, one after another, then compute old statistics."""
    from tepo_megatron.losses import build_objective

    actor, objective = open_actor(cfg), build_objective(cfg.objective)
    if actor.activations is not None:
        actor.activations.least_bytes = 1
    if multiple is not None:
        actor.packer.alignment = replace(actor.packer.alignment, total=multiple)
    actor.start_step(1)
    results = []
    for i in range(UPDATES):
        results.append(actor.update(case.batches[i % len(case.batches)], objective))
        if settle:
            actor.finish_step()
    whole = [agree(actor)]
    old = actor.attach_old_stats(replace(case.batches[0], update=0, old_logprobs_N=None, old_entropies_N=None))
    whole.append(agree(actor))
    out = {
        "norms": [r.metrics["actor/grad_norm"][0] for r in results],
        "losses": [r.metrics["loss/total"][0] for r in results],
        "old": old.old_logprobs_N if actor.groups.is_last_stage else None,
        "weights": [b.parameter.detach().clone() for b in actor.bindings],
        "whole": whole,
        "buckets": [len(chunk.bucket_groups) for chunk in actor.chunks],
        "moved": actor.activations.moved if actor.activations is not None else 0,
    }
    return out


def same(here: list[dict[str, Any]], there: list[dict[str, Any]], norms: float = 0.0) -> None:
    """Assert that two results are equal bit for bit, except for gradient norms."""
    for a, b in zip(here, there, strict=True):
        assert a["norms"] == pytest.approx(b["norms"], rel=norms) and a["losses"] == b["losses"]
        assert all(torch.equal(x, y) for x, y in zip(a["weights"], b["weights"], strict=True))
        assert (a["old"] is None and b["old"] is None) or torch.equal(a["old"], b["old"])


OVERLAPS: dict[str, dict[str, Any]] = {
    "DP2": {"dp": 2},
    "CP2": {"cp": 2},
    "DP2 TP2+SP": {"dp": 2, "tp": 2, "sequence_parallel": True},
    "DP2 PP2": {"dp": 2, "pp": 2},
    "DP2 PP2 VPP2": {"dp": 2, "pp": 2, "vpp": 2},
}


@pytest.mark.parametrize(("layout", "gather"), full_but([], [], itertools.product(OVERLAPS, (False, True))))
def test_overlapped_communication_trains_the_same_bits(case: cases.Case, layout: str, gather: bool) -> None:
    parallel = OVERLAPS[layout]
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": gather, "bucket_size": 20_000}
    # buckets change which rank adds up which part of the gradient norm: without clipping, nothing depends on that
    unclipped = {"optimizer": {**cases.run_config(case.model, parallel).megatron.optimizer, "clip_grad": 0}}
    plain_cfg, cfg = (config(case, parallel, 96, ddp, megatron=unclipped) for ddp in ({}, overlap))
    size = cfg.parallel.world_size
    straight = run_world(size, trained, plain_cfg, case)
    overlapped = run_world(size, trained, cfg, case)
    assert overlapped[0]["buckets"][0] > straight[0]["buckets"][0] + 1, "there is something to overlap"
    assert all(rank["whole"] == [not gather, True] for rank in overlapped)
    same(overlapped, straight, norms=1e-6)
    if gather:
        same(run_world(size, trained, cfg, case, True), straight, norms=1e-6)


@pytest.mark.parametrize(
    ("layout", "recompute"),
    full_but(
        [("1 rank", "selective"), ("1 rank", "full")], [], itertools.product(["1 rank", "TP2+SP", "PP2"], ["selective", "full"])
    ),
)
def test_recomputed_activations_train_the_same_bits(case: cases.Case, layout: str, recompute: str) -> None:
    parallel = {"1 rank": {}, "TP2+SP": {"tp": 2, "sequence_parallel": True}, "PP2": {"pp": 2}}[layout]
    cfg = config(case, parallel, 96)
    again = config(case, parallel, 96, training={"recompute": recompute})
    same(run_world(cfg.parallel.world_size, trained, again, case), run_world(cfg.parallel.world_size, trained, cfg, case))


@pytest.mark.full
def test_activations_on_the_host_train_the_same_bits(case: cases.Case) -> None:
    cfg = config(case, {"cp": 2}, 96)
    straight = run_world(2, trained, cfg, case)
    moved = {}
    for recompute in ("none", "full"):
        away = config(case, {"cp": 2}, 96, training={"offload_activations": True, "recompute": recompute})
        ranks = run_world(2, trained, away, case)
        same(ranks, straight)
        moved[recompute] = ranks[0]["moved"]
    assert 0 < moved["full"] < 0.3 * moved["none"], "with recompute it is the layers' inputs that leave"


@pytest.mark.parametrize(
    ("layout", "precision"),
    full_but(
        [("1 rank", "fp8-current"), ("1 rank", "fp8-blockwise")],
        [],
        itertools.product(["1 rank", "CP2 TP2+SP"], ["fp8-current", "fp8-blockwise"]),
    ),
)
def test_tokens_that_fp8_pads_with_change_nothing(case: cases.Case, layout: str, precision: Any) -> None:
    parallel = {"1 rank": {}, "CP2 TP2+SP": {"cp": 2, "tp": 2, "sequence_parallel": True}}[layout]
    cfg = config(case, parallel, 128)
    multiple = alignment(ModelConfig(path="", precision=precision), cfg.parallel).total
    assert multiple >= 16 * cfg.parallel.tp
    straight = run_world(cfg.parallel.world_size, trained, cfg, case)
    padded = run_world(cfg.parallel.world_size, trained, cfg, case, False, multiple)
    for a, b in zip(padded, straight, strict=True):
        assert a["norms"] == pytest.approx(b["norms"], rel=1e-5) and a["losses"] == pytest.approx(b["losses"], rel=1e-5)
        assert max(cases.distance(x, y) for x, y in zip(a["weights"], b["weights"], strict=True)) < 1e-6


@pytest.mark.parametrize("layout", full_but([], ["PP2 VPP2"], ["CP2", "TP2+SP", "PP2 VPP2"]))
def test_microbatches_of_one_length_train_the_same(case: cases.Case, layout: str) -> None:
    parallel = {"CP2": {"cp": 2}, "TP2+SP": {"tp": 2, "sequence_parallel": True}, "PP2 VPP2": {"pp": 2, "vpp": 2}}[layout]
    straight = run_world(2, trained, config(case, parallel, 96), case)
    with mock.patch.object(MegatronConfig, "fixed_length", True):  # as on GPUs under megatron.transformer.tp_comm_overlap
        fixed = run_world(2, trained, config(case, parallel, 96), case)
    for a, b in zip(fixed, straight, strict=True):
        assert a["norms"] == pytest.approx(b["norms"], rel=1e-5) and a["losses"] == pytest.approx(b["losses"], rel=1e-5)
        assert max(cases.distance(x, y) for x, y in zip(a["weights"], b["weights"], strict=True)) < 1e-6
