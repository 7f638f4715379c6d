"""FP8 at the source: what is on its way is, bit for bit, what the FP8 export writes of the same weights, on every layout."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.config import SyncConfig
from tests.marks import full_but
from tests.parallel import cases
from tests.parallel.test_broadcast import fleet, got
from tests.parallel.test_relay import memory, simulated
from tests.parallel.test_weights import ROUNDS, Recorder, sync_of, tensors, tiny_moe
from tests.tiny import tiny_qwen3
from tests.unit.rollout.test_fleet import behave
from tests.worlds import run_world

MODELS: dict[str, Callable[[Path], Any]] = {
    "dense": lambda path: tiny_qwen3(path, tied=True, layers=8, vocab_size=cases.VOCAB),
    "MoE": tiny_moe,
}


@pytest.fixture(scope="module")
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, `hf`, and the FP8 export of it, `fp8`."""
    folder = tmp_path_factory.mktemp("exported")
    MODELS[request.param](folder / "hf")
    for words in (
        ("import", "--hf", folder / "hf", "--out", folder / "megatron"),
        ("export", "--megatron", folder / "megatron", "--out", folder / "fp8", "--fp8-blockwise"),
    ):
        assert run_world(1, convert, [str(word) for word in words]) == [0]
    return folder


def convert(rank: int, words: list[str]) -> int:
    from tools.convert import main

    return main(words)


def plain(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, torch.Size, torch.Tensor]]:
    """Return tensors that can be pickled, which tensors in FP8 cannot."""
    return {name: (t.dtype, t.shape, t.reshape(-1).view(torch.uint8)) for name, t in tensors.items()}


def push(rank: int, cfg: Any, sync: SyncConfig) -> dict[str, Any]:
    receiver = Recorder() if rank == 0 else None
    with sync_of(cfg, receiver, sync=sync) as pushing:
        pushing.push(1)
    return {} if receiver is None else {"received": plain(receiver.received), "bytes": receiver.data, "rounds": pushing.rounds}


def broadcast(rank: int, cfg: Any, sync: SyncConfig, folder: Path) -> dict[str, Any]:
    """Broadcast to a server that holds the FP8 model, whose receiver refuses other tensors."""
    if rank > 0:
        with sync_of(cfg, None, sync=sync) as pushing:
            pushing.push(1)
        return {"bytes": pushing.transport.sent_bytes}
    with fleet(folder, folder / "fp8", servers=1, tp=1) as servers, sync_of(cfg, servers, sync=sync) as pushing:
        behave(servers, 0, save=str(folder / "got"))
        pushing.push(1)
    return {"received": plain(got(folder / "got")[0]), "bytes": pushing.transport.sent_bytes, "rounds": pushing.rounds}


CASES = [
    (model, layout, transport)
    for model, layout in (("dense", "TP2"), ("dense", "PP2"), ("MoE", "EP2"))
    for transport in ("shm", "relay", "ipc", "group")
]
FAST = [("dense", "TP2", "shm"), ("MoE", "EP2", "ipc")]
SLOW = [("dense", "PP2", "ipc"), ("dense", "PP2", "group"), ("dense", "PP2", "relay")]


@pytest.mark.parametrize(("exported", "layout", "transport"), full_but(FAST, SLOW, CASES), indirect=["exported"])
def test_what_is_sent_is_what_the_export_writes(exported: Path, tmp_path: Path, layout: str, transport: str) -> None:
    """relay: the ranks are on two machines."""
    folder = exported
    cfg = cases.run_config(folder / "hf", ROUNDS[layout])
    way = "shm" if transport == "relay" else transport
    settings = {"type": way} | ({"timeout_seconds": 20} if way == "group" else {})
    sync = replace(cfg.sync, bucket_mib=1, transport=settings, quantize="fp8", verify_every=1)
    if transport == "group":
        (folder / "got").mkdir(exist_ok=True)
        ranks = run_world(2, broadcast, cfg, sync, folder, timeout=120)
    elif transport == "relay":
        for machine in (0, 1):
            memory(tmp_path, machine).mkdir()
        ranks = [result for result, _ in run_world(2, simulated, (0, 1), tmp_path, push, cfg, sync)]
    else:
        ranks = run_world(2, push, cfg, sync)
    expected, before = tensors(folder / "fp8"), tensors(folder / "hf")
    received, written = ranks[0]["received"], plain(expected)
    assert received.keys() == written.keys()
    for name, (dtype, shape, row) in written.items():
        assert received[name][:2] == (dtype, shape) and torch.equal(received[name][2], row), name
    linear = {n for n in before if n + "_scale_inv" in expected}
    assert len(linear) > 20 and all(expected[n].dtype == torch.float8_e4m3fn for n in linear)
    nbytes = sum(t.nbytes for t in expected.values())
    assert sum(rank.get("bytes", 0) for rank in ranks) == nbytes < 0.4 * sum(t.nbytes for t in before.values())  # size in fp32
    assert ranks[0]["rounds"] > 1
