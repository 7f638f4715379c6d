"""An update's metrics about its plan are those that its ranks computed."""

from typing import Any

import pytest

from tests.marks import slow_but
from tests.parallel import cases
from tests.parallel.cases import open_actor
from tests.worlds import run_world


def update(rank: int, cfg: Any, batch: Any) -> dict[str, Any]:
    """Take one update in a forked rank; return its metrics, and the tokens of the microbatches that this rank ran."""
    from tepo_megatron.losses import build_objective

    actor = open_actor(cfg)
    tokens: list[int] = []
    run = actor.schedule.forward_backward

    def counted(microbatches: Any, *args: Any) -> None:
        tokens.extend(m.tokens_S.numel() for m in microbatches)
        run(microbatches, *args)

    actor.schedule.forward_backward = counted  # type: ignore[method-assign]
    actor.start_step(1)
    result = actor.update(batch, build_objective(cfg.objective))
    return {"metrics": result.metrics, "tokens": tokens}


@pytest.mark.parametrize(
    ("layout", "copies"),  # stages that compute each token
    slow_but(
        [({"pp": 2, "vpp": 2}, 2)],
        [({"dp": 2, "cp": 2}, 1), ({"pp": 2, "tp": 2, "sequence_parallel": True}, 4), ({"pp": 2, "vpp": 2}, 2)],
    ),
    ids=str,
)
def test_an_update_reports_its_plan(case: cases.Case, layout: dict, copies: int) -> None:
    cfg = cases.run_config(case.model, layout, max_tokens=90)
    ranks = run_world(cfg.parallel.world_size, update, cfg, case.batches[0])
    computed = sum(sum(rank["tokens"]) for rank in ranks) / copies
    for rank in ranks:
        found = {name: n / d for name, (n, d) in rank["metrics"].items() if name.startswith("packing/")}
        assert found["packing/microbatches"] == len(rank["tokens"]) > 1
        assert found["packing/padding_share"] == pytest.approx(1 - sum(case.batches[0].lengths) / computed)
        assert 0.5 < found["packing/balance"] <= 1.0
        assert (found["packing/bubble_share"] > 0) == ("pp" in layout)
