"""Weights that stay in the memory of their owners, read by a fleet of real processes, one of which dies in the midst of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parallel import cases
from tests.parallel.test_broadcast import config_of, fleet, got, is_model
from tests.parallel.test_weights import left_of, sync_of, tensors
from tests.tiny import tiny_qwen3
from tests.unit.rollout.test_fleet import behave
from tests.waiting import until
from tests.worlds import run_world


def push_and_lose(rank: int, cfg: Any, folder: Path) -> dict[str, Any]:
    if rank > 0:
        with sync_of(cfg, None) as pushing:
            for version in (1, 2, 2):
                pushing.push(version)
            return {"left": left_of(pushing)}
    with fleet(folder, Path(cfg.model.path), servers=2, tp=2) as servers, sync_of(cfg, servers) as pushing:
        received = []
        for i in range(2):
            behave(servers, i, save=str(folder))
        pushing.push(1)
        received.append(got(folder))
        behave(servers, 1, save=str(folder), broadcast="die")
        pushing.push(2)
        received.append(got(folder))
        until(lambda: servers.needs_weights)
        behave(servers, 1, save=str(folder))
        pushing.push(2)
        received.append(got(folder))
        assert servers.version == 2 and not servers.needs_weights
        return {"received": received, "left": left_of(pushing), "rounds": pushing.rounds}


@pytest.mark.full
def test_every_rank_of_every_server_that_lives_gets_the_model(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny_qwen3(model, layers=4, vocab_size=cases.VOCAB)
    ranks = run_world(2, push_and_lose, config_of(model, {"pp": 2}, transport="ipc", verify_every=1), tmp_path)
    assert [len(received) for received in ranks[0]["received"]] == [4, 2, 2]  # all servers, the one left, the one back
    expected = tensors(model)
    assert all(is_model(r, expected) for received in ranks[0]["received"] for r in received)
    assert ranks[0]["rounds"] > 2 and [rank["left"] for rank in ranks] == [[], []]
