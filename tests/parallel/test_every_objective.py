"""Every row of the table gives the same loss and gradients on every layout and packing."""

import math
from typing import Any

import pytest

from tepo_megatron.losses import OBJECTIVES
from tests.marks import marked
from tests.parallel import cases
from tests.worlds import run_world

pytestmark = pytest.mark.slow

# a layout, and tokens of a microbatch
LAYOUTS = {
    "4 microbatches": ({}, 64),
    "PP2": ({"pp": 2}, 100),
    "CP2": ({"cp": 2}, 100),
    "CP4": ({"cp": 4}, 70),
    "DP2": ({"dp": 2}, 60),
}


def all_gradients(rank: int, cfg: Any, batch: Any) -> dict[str, Any]:
    """For each objective: the loss, and this stage's gradients after reduction."""
    from tepo_megatron import parallel
    from tepo_megatron.actor.actor import Actor
    from tepo_megatron.platform import activate

    actor = Actor(cfg, parallel.initialize(cfg.parallel, activate("cpu"), cfg.seed))
    out = {}
    for name, objective in OBJECTIVES.items():
        # coefficients that leave no part of a method in the rounding of another
        larger = {"beta": 0.5, "entropy_coefficient": 0.1, "advantage_alpha": 0.4}
        if objective.weighting != "none":
            larger |= {"cov_share": 0.2, "cov_low": 0.1}
        parts = {k: math.copysign(v, getattr(objective, k)) for k, v in larger.items() if getattr(objective, k)}
        objective = objective.replace(**parts)
        result = actor.backward(batch, objective).reduce(actor.groups)
        out[name] = (result.metrics["loss/total"][0], cases.full_gradients(actor))
    parallel.shutdown()
    return out


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> cases.Case:
    """The batch on a model with a layer for each of two stages: every objective goes through the whole model on each layout."""
    return cases.make_case(tmp_path_factory.mktemp("shallow"), tied=True, layers=2)


@pytest.fixture(scope="module")
def alone(shallow: cases.Case) -> dict[str, Any]:
    return run_world(1, all_gradients, cases.run_config(shallow.model, {}), shallow.batches[0])[0]


def test_the_methods_differ(alone: dict[str, Any]) -> None:
    """No two rows are the same method by accident. Left out are those that agree on this batch: `gpg` and `rloo` differ from
    `reinforce` in their advantages, which the batch brings along; `dapo` from `grpo` in sampling and rewards; `gspo` clips only
    more than `sequence_mean_token_mean` does.
    """
    names = [n for n in OBJECTIVES if n not in ("gpg", "rloo", "dapo", "gspo")]
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            grads_a, grads_b = alone[a][1], alone[b][1]
            assert max(cases.distance(grads_a[n], grads_b[n]) for n in grads_a) > 1e-4, (a, b)


@pytest.mark.parametrize("name", [marked(n, pytest.mark.full) if n == "CP4" else n for n in LAYOUTS])
def test_same_on_every_layout(shallow: cases.Case, alone: dict[str, Any], name: str) -> None:
    layout, max_tokens = LAYOUTS[name]
    cfg = cases.run_config(shallow.model, layout, max_tokens)
    ranks = run_world(cfg.parallel.world_size, all_gradients, cfg, shallow.batches[0])
    for objective, (loss, gradients) in alone.items():
        merged = {n: g for r in ranks for n, g in r[objective][1].items()}
        assert merged.keys() == gradients.keys()
        for r in ranks:
            assert r[objective][0] == pytest.approx(loss, rel=1e-5, abs=1e-7)
        worst = max(gradients, key=lambda n: cases.distance(merged[n], gradients[n]))
        assert cases.distance(merged[worst], gradients[worst]) <= 1e-5, f"{objective}: {worst}"
