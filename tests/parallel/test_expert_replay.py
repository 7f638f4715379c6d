"""Training with the experts that an engine chose: on every layout the gradient of the network with those experts, as an
independent model in fp64 has it; and with the router's own choices, bit for bit what the router does.
"""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig

from tepo_megatron.base.types import NO_EXPERT, Rollout, TrainBatch
from tepo_megatron.monitor import run_dir
from tepo_megatron.monitor.metrics import Metrics
from tepo_megatron.rollout import record
from tests.marks import full_but
from tests.parallel import cases
from tests.parallel.cases import open_actor
from tests.parallel.test_families import EIGHT_HEADS, EP2, EXPERTS, TOLERANCE, TP_SP, in_file_names, rewarded_batch, shaped
from tests.reference import tepo
from tests.tiny import tiny_model
from tests.worlds import run_world

NUMBER, PER_TOKEN = EXPERTS["num_experts"], EXPERTS["num_experts_per_tok"]
SPARSE = (0, 2, 3)  # layers with experts, out of four; under VPP2 one chunk has no router
LAYOUTS = [{}, TP_SP, {"pp": 2}, {"cp": 2}, EP2]
FULL = [
    {"pp": 2, "vpp": 2}, {"dp": 2}, {"ep": 2, "cp": 2}, {"cp": 2} | TP_SP, EP2 | {"pp": 2}, EP2 | TP_SP, {"pp": 2, "cp": 2},
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay") / "model"
    config = shaped(Qwen3MoeConfig, EIGHT_HEADS, EXPERTS, num_hidden_layers=4, norm_topk_prob=True, mlp_only_layers=[1])
    tiny_model(path, config, seed=1, scale=8.0)
    return path


def replaying(model: Path, layout: dict[str, Any]) -> Any:
    cfg = cases.run_config(model, layout, max_tokens=50, objective={"name": "reinforce"})
    return replace(cfg, rollout=replace(cfg.rollout, replay_experts=True))


def with_experts(batch: TrainBatch, experts: list[Tensor]) -> TrainBatch:
    rollouts = tuple(replace(r, experts_LKT=e) for r, e in zip(batch.rollouts, experts, strict=True))
    return replace(batch, rollouts=rollouts)


def random_experts(rollout: Rollout, generator: torch.Generator) -> Tensor:
    """None of them the router's: of six experts, two of each token by chance, in any order; none of the last token."""
    order = torch.rand(rollout.token_ids_L.numel(), len(SPARSE), NUMBER, generator=generator).argsort(dim=-1)
    experts_LKT = order[..., :PER_TOKEN].to(torch.int16)
    experts_LKT[-1] = NO_EXPERT
    return experts_LKT


@pytest.fixture(scope="module")
def given() -> TrainBatch:
    batch, generator = rewarded_batch(), torch.Generator().manual_seed(11)
    return with_experts(batch, [random_experts(r, generator) for r in batch.rollouts])


def replayed_experts(model: Path, given: TrainBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return fp64 log-probs [N] and gradients of -sum A log pi / N of transformers' model with the given experts."""
    network = tepo.load(model)
    chosen: dict[int, Tensor] = {}

    def gate(layer: int, module: Any) -> Any:
        def forward(hidden_LH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = torch.nn.functional.linear(hidden_LH, module.weight)
            return logits, logits.gather(1, chosen[layer]).softmax(-1), chosen[layer]

        return forward

    for layer in SPARSE:
        router = network.model.layers[layer].mlp.gate
        router.forward = gate(layer, router)
    logprobs = []
    for rollout in given.rollouts:
        assert rollout.experts_LKT is not None
        experts_LKT = rollout.experts_LKT[:-1].long()
        chosen.update({layer: experts_LKT[:, k] for k, layer in enumerate(SPARSE)})
        ids = rollout.token_ids_L
        logp = torch.log_softmax(network(ids[None, :-1]).logits[0] / cases.TEMPERATURE, dim=-1)
        logprobs.append(logp.gather(1, ids[1:, None]).squeeze(1)[rollout.response_mask_L[1:]])
    advantages_N = given.advantages_B.double()[given.sequence_N(given.advantages_B.device)]
    (-(advantages_N * torch.cat(logprobs)).sum() / given.num_tokens).backward()
    gradients = in_file_names("qwen3_moe", {n: p.grad.clone() for n, p in network.named_parameters()})
    return torch.cat(logprobs).detach(), gradients


@pytest.fixture(scope="module")
def expected(model: Path, given: TrainBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return replayed_experts(model, given)


def old_pass_and_gradients(rank: int, cfg: Any, batch: TrainBatch, machines: bool = False) -> dict[str, Any]:
    from tepo_megatron.losses import build_objective

    actor = open_actor(cfg)
    actor.start_step(1)
    if machines:
        batch = received(actor, batch)
    last_first = actor.logprobs(batch.select([len(batch) - 1, 0], update=0))  # before all experts are there
    old = actor.attach_old_stats(batch)
    actor.backward(old, build_objective(cfg.objective))
    out = {
        "last first": actor.groups.broadcast_from_last_stage(last_first.clone()),
        "logprobs": actor.groups.broadcast_from_last_stage(old.old_logprobs_N.clone()),
        "gradients": cases.full_gradients(actor),
    }
    return out


def received(actor: Any, batch: TrainBatch) -> TrainBatch:
    """Return the batch as each rank receives it on a machine of its own, where the experts come when they are packed."""
    from tepo_megatron.dist.objects import broadcast_object
    from tepo_megatron.service.batch_memory import BatchMemory
    from tepo_megatron.trainer.batch_receiver import BatchReceiver

    groups, memory = actor.groups, BatchMemory()
    receiver = BatchReceiver.open(groups, machine=groups.rank)
    actor.packer.fetch_experts = receiver.fetch_experts
    header = broadcast_object(memory.write(batch.rollouts, {}, {}) if groups.is_main else None, groups.host)
    rollouts = receiver.receive(header)
    assert groups.is_main or not any(r.experts_LKT.any() for r in rollouts if r.experts_LKT is not None)
    return replace(batch, rollouts=tuple(rollouts))


@pytest.mark.parametrize("layout", full_but([{"dp": 2}], [], [{"dp": 2}, {"dp": 2, "pp": 2}, EP2 | {"pp": 2}]), ids=str)
def test_experts_that_come_from_another_machine(
    model: Path, given: TrainBatch, expected: tuple[Tensor, dict[str, Tensor]], layout: dict[str, Any]
) -> None:
    cfg = replaying(model, layout)
    here, apart = (
        run_world(cfg.parallel.world_size, old_pass_and_gradients, cfg, given, machines) for machines in (False, True)
    )
    for one, other in zip(here, apart, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in ("last first", "logprobs"))
        assert one["gradients"].keys() == other["gradients"].keys()
        assert all(torch.equal(one["gradients"][name], other["gradients"][name]) for name in one["gradients"])
    assert (apart[0]["logprobs"] - expected[0]).abs().max() <= TOLERANCE * expected[0].abs().max()


def run_on_machines(rank: int, cfg: Any, apart: bool) -> None:
    """Take a run's steps on recorded rollouts; if `apart`, each rank is on a machine of its own."""
    from tepo_megatron.trainer.batch_receiver import BatchReceiver
    from tests.services import train_here

    if apart:
        BatchReceiver.open = functools.partial(BatchReceiver.open, machine=rank)  # type: ignore[method-assign]
    train_here(cfg)


@pytest.mark.full
def test_a_whole_run_on_two_machines_equals_that_on_one(model: Path, given: TrainBatch, tmp_path: Path) -> None:
    graded = [replace(r, prompt_id=i // 2, score=i % 2.0, reward=i % 2.0) for i, r in enumerate(given.rollouts)]
    record.write(tmp_path / "recorded", 1, graded, Metrics())
    steps = []
    for apart in (False, True):
        cfg = replaying(model, {"dp": 2})
        rollout = replace(cfg.rollout, replay=str(tmp_path / "recorded"), prompts_per_step=len({r.prompt_id for r in graded}))
        training = replace(cfg.training, steps=1, epochs=2, minibatch_prompts=2)
        sync = replace(cfg.sync, max_logprob_diff=1e9)  # the log-probs of this batch are not those of an engine
        cfg = replace(cfg, name=f"apart-{apart}", output=str(tmp_path), rollout=rollout, training=training, sync=sync)
        run_dir.prepare(cfg)
        run_world(2, run_on_machines, cfg, apart)
        steps.append(json.loads((cfg.run_dir / "metrics.jsonl").read_text()))
    names = ("actor/entropy", "actor/grad_norm", "loss/total")
    assert [steps[0][name] for name in names] == [steps[1][name] for name in names] and steps[0]["actor/grad_norm"] > 0


@pytest.mark.parametrize("layout", full_but([{}, EP2], LAYOUTS, LAYOUTS + FULL), ids=str)
def test_given_experts_on_every_layout(
    model: Path, given: TrainBatch, expected: tuple[Tensor, dict[str, Tensor]], layout: dict[str, Any]
) -> None:
    cfg = replaying(model, layout)
    ranks = run_world(cfg.parallel.world_size, old_pass_and_gradients, cfg, given)
    logprobs, gradients = expected
    for rank in ranks:
        assert (rank["logprobs"] - logprobs).abs().max() <= TOLERANCE * logprobs.abs().max()
    merged = {n: t for rank in ranks for n, t in rank["gradients"].items()}
    assert merged.keys() == gradients.keys()
    assert all(gradients[n].norm() > 0 for n in gradients if "gate.weight" in n)  # routers learn
    worst = max(gradients, key=lambda n: cases.distance(merged[n], gradients[n]) if gradients[n].norm() else 0.0)
    found = cases.distance(merged[worst], gradients[worst])
    assert found <= TOLERANCE, f"the gradient of {worst} differs by {found:.1e}"


def own_choices(actor: Any, batch: TrainBatch) -> list[Tensor]:
    """[L, K, T] of each sequence, as the routers of the only rank choose them."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    experts: list[Tensor] = []

    def keep(microbatch: Any, output: Tensor) -> None:
        experts.append(torch.stack(RouterReplay.get_recorded_data(), dim=1).to(torch.int16))

    for i in range(len(batch)):
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        one = batch.select([i], 0)
        actor.schedule.forward(actor.packer.pack(one, [[[0]]], replays=False), keep)
        assert [e.shape for e in experts[i:]] == [(one.lengths[0], len(actor.arch.sparse_layers), PER_TOKEN)]
    return experts


def own_and_others(rank: int, cfg: Any, batch: TrainBatch) -> dict[str, Tensor]:
    """Log-probs of free routers, of their choices replayed, of those with one changed, of free routers again, and those of a
    reference policy, which is the policy.
    """
    actor = open_actor(cfg)
    actor.keep_reference()
    experts = own_choices(actor, batch)
    changed = [e.clone() for e in experts]
    first = changed[0][0, 1]  # the first token in the second sparse layer
    first[0] = next(e for e in range(NUMBER) if e not in first)
    out = {
        "free": actor.logprobs(batch, replays=False),
        "own": actor.logprobs(with_experts(batch, experts)),
        "changed": actor.logprobs(with_experts(batch, changed)),
        "free again": actor.logprobs(with_experts(batch, changed), replays=False),
    }
    out["reference"] = actor.attach_ref_logprobs(with_experts(batch, changed)).ref_logprobs_N
    return out


def test_own_choices_are_replayed_bit_for_bit_and_another_one_shows(model: Path) -> None:
    batch = rewarded_batch()
    (out,) = run_world(1, own_and_others, replaying(model, {}), batch)
    assert torch.equal(out["own"], out["free"]) and torch.equal(out["free again"], out["free"])
    assert torch.equal(out["reference"], out["free"])  # its routers choose by themselves
    first = batch.response_lengths[0]
    difference_N = (out["changed"] - out["free"]).abs()
    assert difference_N[:first].min() > 1e-5  # every response token has seen the first token
    assert difference_N[first:].max() <= 1e-5
