"""Weights over real gloo groups and exported memory to a fleet of real processes that die and freeze in the midst of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tepo_megatron.config import GroupTransportConfig
from tests.marks import marked
from tests.parallel import cases
from tests.parallel.test_weights import ROUNDS, left_of, sync_of, tensors, tiny_moe
from tests.tiny import tiny_qwen3
from tests.unit.rollout import test_fleet
from tests.unit.rollout.test_fleet import behave, process
from tests.waiting import until
from tests.worlds import run_world

SECONDS = 5.0  # of sync.transport.timeout_seconds


def fleet(folder: Path, model: Path, servers: int, **server: Any) -> Any:
    return test_fleet.fleet(folder, servers, model=model, takes_broadcasts=True, **server)


def config_of(model: Path, layout: dict[str, int], **sync: Any) -> Any:
    cfg = cases.run_config(model, layout)
    transport = GroupTransportConfig(type="group", timeout_seconds=sync.pop("timeout_seconds", SECONDS))
    settings = {"transport": transport, "bucket_mib": 1} | sync
    return replace(cfg, sync=replace(cfg.sync, **settings))


def got(folder: Path) -> list[dict[str, torch.Tensor]]:
    """Return the tensors that each rank of each server has received since the last call."""
    files = sorted(folder.glob("*.safetensors"))
    read = [{name: tensor.clone() for name, tensor in load_file(file).items()} for file in files]
    for file in files:
        file.unlink()
    return read


def is_model(received: dict[str, torch.Tensor], model: dict[str, torch.Tensor]) -> bool:
    return received.keys() == model.keys() and all(torch.equal(received[name], model[name]) for name in model)


def push_twice(rank: int, cfg: Any, folder: Path) -> dict[str, Any]:
    if rank > 0:
        with sync_of(cfg, None) as sync:
            sync.push(1)
            sync.push(2)
            return {"sent": sync.transport.sent_bytes}
    model = Path(cfg.model.path)
    with fleet(folder, model, servers=2, tp=2) as servers, sync_of(cfg, servers) as sync:
        for i in range(2):
            behave(servers, i, save=str(folder))
        received = []
        for version in (1, 2):
            sync.push(version)
            received.append(got(folder))
        assert servers.version == 2 and not servers.needs_weights
        return {
            "sent": sync.transport.sent_bytes,
            "rounds": sync.rounds,
            "formations": sync.transport.formations,
            "received": received,
        }


@pytest.mark.parametrize("name", [marked(name, pytest.mark.slow if name == "PP2" else pytest.mark.full) for name in ROUNDS])
def test_every_rank_of_every_server_gets_the_model_and_every_byte_is_broadcast_once(tmp_path: Path, name: str) -> None:
    model = tmp_path / "model"
    if name == "EP2":
        tiny_moe(model)
    else:
        tiny_qwen3(model, layers=4, vocab_size=cases.VOCAB)
    cfg = config_of(model, ROUNDS[name], verify_every=2)  # in the second push
    ranks = run_world(cfg.parallel.world_size, push_twice, cfg, tmp_path)
    expected = tensors(model)
    for received in ranks[0]["received"]:
        assert len(received) == 4 and all(is_model(r, expected) for r in received)
    assert sum(r["sent"] for r in ranks) == 2 * sum(t.nbytes for t in expected.values())
    senders = [r for r in ranks if r["sent"]]
    assert len(senders) == cfg.parallel.pp * cfg.parallel.ep
    assert ranks[0]["rounds"] > 2 and ranks[0]["formations"] == 1


def push_and_lose(rank: int, cfg: Any, folder: Path, fault: str) -> dict[str, Any]:
    if rank > 0:
        with sync_of(cfg, None) as sync:
            for version in (1, 2, 2):
                sync.push(version)
        return {}
    silent = 3.0 if fault == "freeze" else 20.0  # of seconds; a frozen one is to be noticed before a round is late
    with fleet(folder, Path(cfg.model.path), servers=3, heartbeat_timeout=silent) as servers, sync_of(cfg, servers) as sync:
        sync.push(1)
        pids = [process(servers, i).pid for i in range(3)]
        for i in range(3):
            behave(servers, i, save=str(folder), **({"broadcast": fault} if i == 1 else {}))
        sync.push(2)
        survivors = got(folder)
        until(lambda: servers.needs_weights)
        assert [process(servers, i).pid == pid for i, pid in enumerate(pids)] == [True, False, True]
        behave(servers, 1, save=str(folder))
        sync.push(2)
        assert not servers.needs_weights
        events = "\n".join(servers.take_events())
        formations = getattr(sync.transport, "formations", None)
        left = left_of(sync)
        return {"survivors": survivors, "again": got(folder), "events": events, "formations": formations, "left": left}


@pytest.mark.full
@pytest.mark.parametrize(("transport", "fault"), [("group", "die"), ("group", "midst"), ("group", "freeze"), ("ipc", "die")])
def test_the_servers_that_live_get_everything_and_go_on_when_one_is_lost(tmp_path: Path, transport: str, fault: str) -> None:
    """None of the others is restarted; the one that comes back gets the weights alone."""
    model = tmp_path / "model"
    tiny_qwen3(model, layers=4, vocab_size=cases.VOCAB)
    ipc = {"transport": "ipc", "verify_every": 1} if transport == "ipc" else {}
    rank0 = run_world(2, push_and_lose, config_of(model, {"pp": 2}, **ipc), tmp_path, fault)[0]
    expected = tensors(model)
    assert len(rank0["survivors"]) == 2 and all(is_model(r, expected) for r in rank0["survivors"])
    assert len(rank0["again"]) == 1 and is_model(rank0["again"][0], expected)
    assert "server 1 is started again (restart 1)" in rank0["events"] and "server 0" not in rank0["events"]
    assert ("it has ended with exit status 3" in rank0["events"]) == (fault != "freeze"), "it was lost in another way"
    assert rank0["formations"] == (3 if transport == "group" else None)  # of all, without the lost one, with that one alone
    assert rank0["left"] == []
