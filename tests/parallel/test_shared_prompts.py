"""Passes other than updates share prompts too, and experts that are replayed keep prompts apart where they differ."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.base.types import Rollout, TrainBatch
from tests.marks import full_but
from tests.parallel import cases
from tests.parallel.cases import open_actor
from tests.parallel.test_expert_replay import model as model_with_experts  # noqa: F401  a fixture
from tests.parallel.test_expert_replay import old_pass_and_gradients, random_experts, replayed_experts, replaying, with_experts
from tests.parallel.test_families import TP_SP, rewarded_batch
from tests.reference import tepo as reference
from tests.worlds import run_world

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> cases.Case:
    return cases.make_case(tmp_path_factory.mktemp("shared"), tied=True, shared=True)


def other_passes(rank: int, cfg: Any, batch: TrainBatch) -> dict[str, Any]:
    """Return old and reference statistics, the noise floor, and the tokens of their forward passes, in a forked rank."""
    actor = open_actor(cfg)
    tokens: list[int] = []
    forward = actor.schedule.forward

    def counted(microbatches: Any, visit: Any) -> None:
        tokens.append(sum(m.tokens_S.numel() for m in microbatches))
        forward(microbatches, visit)

    actor.schedule.forward = counted  # type: ignore[method-assign]
    actor.keep_reference()
    batch = actor.attach_ref_logprobs(actor.attach_old_stats(batch))
    out = {"noise": actor.measure_noise(batch), "tokens": tokens}
    if actor.groups.is_last_stage:
        out["stats"] = torch.stack((batch.old_logprobs_N, batch.old_entropies_N, batch.ref_logprobs_N))
    return out


@pytest.mark.parametrize("layout", full_but([{}], [{"cp": 2}], [{}, {"cp": 2}, {"pp": 2}, {"dp": 2} | TP_SP]), ids=str)
def test_passes_without_gradient(shared: cases.Case, layout: dict[str, Any]) -> None:
    """The reference's numbers from fewer tokens, and repeated under another packing the same but for rounding."""
    model, sides = reference.load(shared.model), []
    with torch.no_grad():
        rows = [
            reference.statistics(model, r.token_ids_L, r.response_mask_L, cases.TEMPERATURE) for r in shared.batches[0].rollouts
        ]
    logprobs, entropies = (torch.cat(column) for column in zip(*rows, strict=True))
    expected = torch.stack((logprobs, entropies, logprobs))  # the reference policy is the policy itself
    for share in ("never", "always"):
        cfg = cases.run_config(shared.model, layout, max_tokens=200, share_prompts=share)
        sides.append(run_world(cfg.parallel.world_size, other_passes, cfg, shared.batches[0]))
    for plain, ours in zip(*sides, strict=True):
        assert len(ours["tokens"]) == 3 and all(a < b for a, b in zip(ours["tokens"][:2], plain["tokens"][:2], strict=True))
        assert 0 <= ours["noise"] <= 1e-4
        if "stats" in plain:
            assert (ours["stats"] - expected).norm() <= TOLERANCE * expected.norm()


def of_one_prompt() -> TrainBatch:
    """The responses of `rewarded_batch` to one prompt of 11 tokens."""
    batch, prompt, rollouts = rewarded_batch(), torch.arange(3, 14), []
    for r in batch.rollouts:
        ids = torch.cat((prompt, r.token_ids_L[r.response_mask_L]))
        mask = torch.arange(ids.numel()) >= prompt.numel()
        rollouts.append(Rollout(0, ids, mask, torch.zeros(ids.numel()), 0, "stop"))
    return replace(batch, rollouts=tuple(rollouts))


@pytest.mark.parametrize("layout", full_but([{}], [TP_SP], [{}, TP_SP, {"pp": 2}, {"cp": 2}]), ids=str)
def test_experts_of_a_prompt_are_replayed_once(model_with_experts: Path, layout: dict[str, Any]) -> None:  # noqa: F811
    """Two of the sequences have other experts in their prompt: they share with each other, and the rest among themselves.
    The reference computes each sequence by itself.
    """
    batch, generator = of_one_prompt(), torch.Generator().manual_seed(3)
    experts = [random_experts(r, generator) for r in batch.rollouts]
    for i, first in ((1, 0), (2, 0), (4, 3)):
        experts[i][:11] = experts[first][:11]
    batch = with_experts(batch, experts)
    assert batch.prompt_ids == [0, 0, 0, 1, 1] and batch.prompt_lengths == [11] * 5
    cfg = replaying(model_with_experts, layout)
    cfg = replace(cfg, training=replace(cfg.training, share_prompts="always", max_tokens_per_microbatch=90))
    logprobs, gradients = replayed_experts(model_with_experts, batch)
    ranks = run_world(cfg.parallel.world_size, old_pass_and_gradients, cfg, batch)
    for rank in ranks:
        assert (rank["logprobs"] - logprobs).norm() <= TOLERANCE * logprobs.norm()
    merged = {name: gradient for rank in ranks for name, gradient in rank["gradients"].items()}
    assert merged.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (merged[name] - gradient).norm() <= TOLERANCE * gradient.norm(), name
