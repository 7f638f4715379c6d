"""Each rank of a server is sent its part of each tensor, and nothing else; what every rank needs is sent to all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.config import GroupTransportConfig
from tests.marks import full_but
from tests.parallel import cases
from tests.parallel.test_element_deltas import broadcast_often, bytes_of
from tests.parallel.test_weights import ROUNDS, tiny_moe
from tests.tiny import hybrid_config, tiny_model, tiny_qwen3
from tests.worlds import run_world

SERVER_RANKS = 2
WAYS = [("none", ""), ("elements", "damaged"), ("none", "midst")]  # sync.delta, what happens in the third push


def part_of(name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the part that an engine's rank loads, by the rules of vLLM's and SGLang's layers."""
    row = any(part in name for part in ("o_proj", "down_proj", "out_proj"))
    if "in_proj_qkv" in name or "conv1d" in name:  # a rank cuts its queries, keys and values out of the whole
        return tensor
    if "norm" in name or name.endswith("mlp.gate.weight") or (tensor.size(0) % 64 and ("embed" in name or "lm_head" in name)):
        return tensor
    return tensor.chunk(SERVER_RANKS, int(row))[rank]


def config(model: Path, name: str, delta: str) -> Any:
    if name.startswith("hybrid"):
        tiny_model(model, hybrid_config(vocab_size=cases.VOCAB))
    else:
        (tiny_moe if name == "EP2" else lambda path: tiny_qwen3(path, layers=4, vocab_size=cases.VOCAB))(model)
    cfg = cases.run_config(model, ROUNDS.get(name.removeprefix("hybrid").removesuffix("bf16").strip(), {}))
    if name.endswith("bf16"):
        cfg = replace(cfg, model=replace(cfg.model, precision="bf16"))
    transport = GroupTransportConfig(type="group", timeout_seconds=5.0, slices=True)
    return replace(cfg, sync=replace(cfg.sync, delta=delta, bucket_mib=1, transport=transport))


@pytest.mark.parametrize(
    ("name", "delta", "fault"),
    full_but(
        [("PP2", "elements", "forgotten"), ("TP2", "none", "")],
        [],
        [
            (name, delta, fault)
            for name in ("1 rank", *ROUNDS)
            for delta, fault in (("none", ""), ("elements", "damaged"), ("none", "midst"))
        ]
        + [("hybrid", "none", ""), ("hybrid TP2", "none", ""), ("hybrid PP2 bf16", "elements", "damaged")],
    ),
)
def test_each_rank_gets_its_part(tmp_path: Path, name: str, delta: str, fault: str) -> None:
    cfg = config(tmp_path / "model", name, delta)
    ranks = run_world(cfg.parallel.world_size, broadcast_often, cfg, tmp_path, {3: fault}, timeout=240)
    rank0 = ranks[0]
    whole = rank0["whole"]
    assert len(rank0["received"]) == 2 * SERVER_RANKS
    seen = set()
    for received in rank0["received"]:
        unchanged = {"model.embed_tokens.weight"} if delta == "elements" else set()
        assert received.keys() == whole.keys() - unchanged
        fits = [
            all(bytes_of(part_of(n, t, rank)) == bytes_of(part_of(n, whole[n], rank)) for n, t in received.items())
            for rank in range(SERVER_RANKS)
        ]
        assert sum(fits) == 1, "a rank has its own part and no other"
        mine = fits.index(True)
        seen.add(mine)
        for n, tensor in received.items():
            if part_of(n, tensor, mine).numel() < tensor.numel():
                assert part_of(n, tensor, 1 - mine).isnan().all(), n
    assert seen == {0, 1}
    if cfg.parallel.tp == SERVER_RANKS:
        tables = [t.nbytes for n, t in whole.items() if "embed" in n or "lm_head" in n]  # the vocabulary is no multiple of 64
        fused = [n for n in whole if "in_proj_qkv" in n or "conv1d" in n]
        gathered = len(tables) + len(fused)
        assert all(len(r["gathered"]) <= 5 * gathered for r in ranks), "decoder layers are sent from the ranks' own shards"
        assert sum(r["sent"] > 0 for r in ranks) == cfg.parallel.world_size
    elif cfg.parallel.tp == 1:
        assert not any(r["gathered"] for r in ranks)
    parts = [sum(part_of(n, t, rank).nbytes for n, t in whole.items()) for rank in range(SERVER_RANKS)]
    if delta == "none":
        pushes = 6 if fault == "midst" else 5
        sent = sum(r["sent"] for r in ranks)
        assert sent >= pushes * sum(parts)
        assert fault == "midst" or sent == pushes * sum(parts)  # what is sent to all counts for each rank
    else:
        assert [push.refused > 0 for push in rank0["pushed"]] == [False, False, True, False, False]
        assert rank0["pushed"][0].sent == sum(parts) and rank0["pushed"][1].sent < 0.2 * sum(parts)
