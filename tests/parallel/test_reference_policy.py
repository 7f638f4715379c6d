"""The reference policy, the noise floor of dH, and the pass that a weighting costs, on the actor and several layouts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel import cases
from tests.parallel.cases import open_actor
from tests.reference import tepo as reference
from tests.tiny import change_tensors
from tests.worlds import run_world

LAYOUTS = [{}, {"cp": 2}, {"tp": 2, "pp": 2}]
BETA = 0.5


@pytest.fixture(scope="module")
def other(case: cases.Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second model of the same architecture: the reference policy."""
    import shutil

    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(case.model, folder)
    generator = torch.Generator().manual_seed(11)
    move = lambda w: w + 0.1 * w.abs().mean() * torch.randn(w.shape, generator=generator)  # noqa: E731
    change_tensors(folder, lambda weights: weights.update({n: move(w) for n, w in weights.items()}))
    return folder


def with_reference(rank: int, cfg: Any, batch: Any) -> dict[str, Any]:
    """Return the statistics of the reference policy, and whether the policy is unchanged afterwards."""
    from tepo_megatron.actor.accumulator import reference_divergence
    from tepo_megatron.losses import build_objective

    actor = open_actor(cfg)
    before = [b.parameter.detach().clone() for b in actor.bindings]
    actor.keep_reference()
    batch = actor.attach_ref_logprobs(batch)
    unchanged = all(torch.equal(b.parameter, old) for b, old in zip(actor.bindings, before, strict=True))
    result = actor.backward(batch, build_objective(cfg.objective)).reduce(actor.groups)
    out = {
        "unchanged": unchanged,
        "ref_logprobs_N": batch.ref_logprobs_N if actor.groups.is_last_stage else None,
        "divergence_B": reference_divergence(batch, "k1", actor.groups),
        "ref_kl": result.metrics["loss/ref_kl"],
        "loss": result.metrics["loss/total"][0],
        "gradients": cases.full_gradients(actor),
    }
    return out


@pytest.fixture(scope="module")
def outs(case: cases.Case, other: Path) -> list[list[dict[str, Any]]]:
    out = []
    for layout in LAYOUTS:
        cfg = cases.run_config(case.model, layout, 100, {"name": "grpo", "ref_kl": {"beta": BETA, "path": str(other)}})
        out.append(run_world(cfg.parallel.world_size, with_reference, cfg, case.batches[0]))
    return out


def _logprobs(path: Path, case: cases.Case) -> torch.Tensor:
    """Return the log-probs of the first batch's response tokens under a model, in fp64."""
    model = reference.load(path)
    with torch.no_grad():
        rollouts = case.batches[0].rollouts
        rows = [reference.statistics(model, r.token_ids_L, r.response_mask_L, cases.TEMPERATURE)[0] for r in rollouts]
    return torch.cat(rows)


@pytest.mark.slow
def test_reference_logprobs_are_those_of_the_other_model(case: cases.Case, other: Path, outs: list) -> None:
    expected = _logprobs(other, case)
    old, lengths = case.batches[0].old_logprobs_N.double(), case.batches[0].response_lengths
    for ranks in outs:
        for rank in ranks:
            assert rank["unchanged"]
            if rank["ref_logprobs_N"] is not None:
                assert cases.distance(rank["ref_logprobs_N"], expected) <= 1e-5
            sums = torch.stack([difference.sum() for difference in (old - expected).split(lengths)])
            assert cases.distance(rank["divergence_B"], sums) <= 1e-5


@pytest.mark.slow
def test_the_penalty_is_in_the_loss_on_every_layout(case: cases.Case, other: Path, outs: list) -> None:
    """The penalty is the mean of k3 of the two models in fp64."""
    alone = outs[0][0]
    numerator, denominator = alone["ref_kl"]
    policy, ref = (_logprobs(path, case) for path in (case.model, other))
    expected = (torch.exp(ref - policy) - (ref - policy) - 1).mean().item()
    assert denominator == pytest.approx(1.0, rel=1e-6) and numerator == pytest.approx(expected, rel=1e-5) and expected > 0.005
    plain = run_world(1, plain_step, cases.run_config(case.model, {}, 100, {"name": "grpo"}), case.batches[0])[0]
    assert alone["loss"] == pytest.approx(plain + BETA * numerator, rel=1e-5)
    for ranks in outs[1:]:
        merged = {n: g for rank in ranks for n, g in rank["gradients"].items()}
        assert ranks[0]["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert max(cases.distance(merged[n], g) for n, g in alone["gradients"].items()) <= 1e-5


def plain_step(rank: int, cfg: Any, batch: Any) -> float:
    from tepo_megatron.losses import build_objective

    actor = open_actor(cfg)
    result = actor.backward(batch, build_objective(cfg.objective)).reduce(actor.groups)
    return result.metrics["loss/total"][0]
