"""The actor's weights of a hybrid reach a real vLLM over every transport of a CPU: it then serves what the actor has."""

import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tepo_megatron.base.types import Rollout
from tepo_megatron.config import GroupTransportConfig, IpcTransportConfig, ShmTransportConfig
from tests.parallel import cases
from tests.server.hybrids import hybrid_with_vision, tiny_hybrid
from tests.server.served import SAMPLING, WORLD_SECONDS, logprob_diff, make_prompts, serve
from tests.worlds import run_world

pytestmark = pytest.mark.server
NOISE = 5e-5  # nats, as in test_hybrid.py
GROUP = GroupTransportConfig(type="group", timeout_seconds=20.0)
TRANSPORTS: dict[str, Any] = {
    "shm": ShmTransportConfig(), "ipc": IpcTransportConfig(type="ipc"), "group": GROUP
}  # fmt: skip
LAYER = "decoder.layers.1."  # has the gated delta rule


def change(actor: Any, version: int, share: float = 0.05) -> None:
    """Change about `share` of the elements of all parameters but the embedding, the same on every rank that has them."""
    for binding in actor.bindings:
        if "embedding" in binding.name:
            continue
        parameter = binding.parameter.data
        generator = torch.Generator().manual_seed(zlib.crc32(f"{binding.name} {version}".encode()))
        chosen = torch.rand(parameter.shape, generator=generator) < share
        parameter.mul_(torch.where(chosen, 1 + 2.0**-7, 1.0).to(parameter.dtype))


def push(
    rank: int, transport: str, delta: str, tp: int, make: Callable[[Path], Any], folder: Path
) -> tuple[dict[str, Tensor], list[Rollout], list[Any]]:
    """Push three versions, each verified by checksums; return the weights, samples of the last one, and what was sent.

    In the last version only one layer changed.
    """
    from tepo_megatron.models.gather import iterate_hf
    from tepo_megatron.sync.push import make_weight_sync

    with serve("vllm", folder, make=make, tp=tp) as served:
        cfg = cases.run_config(folder / "model", {})
        sync = replace(cfg.sync, delta=delta, transport=TRANSPORTS[transport], bucket_mib=1, verify_every=1)
        actor = cases.open_actor(replace(cfg, sync=sync))
        sent = []
        with make_weight_sync(sync, actor.bindings, actor.arch, actor.groups, served.engine) as pushes:
            for version in range(3):
                if version == 1:
                    change(actor, version, share=0.5)
                if version == 2:
                    for binding in actor.bindings:
                        if binding.name.startswith(LAYER):
                            binding.parameter.data.mul_(1.01)
                pushes.push(version)
                sent.append(pushes.pushed)
        rollouts = served.engine.generate(make_prompts(8, seed=3), SAMPLING, seed=5)
        weights = dict(iterate_hf(actor.bindings, actor.arch, actor.groups.tp))
    return {name: tensor.clone() for name, tensor in weights.items()}, rollouts, sent


@pytest.mark.parametrize(
    ("transport", "delta", "tp", "make"),
    [
        pytest.param("group", "layers", 1, tiny_hybrid, marks=pytest.mark.full),
        pytest.param("ipc", "none", 1, tiny_hybrid, marks=pytest.mark.full),
        pytest.param("shm", "layers", 1, tiny_hybrid, marks=pytest.mark.full),
        pytest.param("group", "none", 2, tiny_hybrid, marks=pytest.mark.full),
        pytest.param("shm", "layers", 1, hybrid_with_vision, marks=pytest.mark.full),
    ],
)
def test_the_server_serves_what_the_actor_has(
    transport: str, delta: str, tp: int, make: Callable[[Path], Any], tmp_path: Path
) -> None:
    """The last case is of files with a vision tower, of which both sides have the text model."""
    weights, rollouts, sent = run_world(1, push, transport, delta, tp, make, tmp_path, timeout=WORLD_SECONDS)[0]
    model = tiny_hybrid(tmp_path / "text")
    weights = {name.replace("model.language_model.", "model."): tensor for name, tensor in weights.items()}
    before = logprob_diff(model, rollouts, SAMPLING.temperature)
    missing, unknown = model.load_state_dict(weights, strict=False)
    assert not missing and not unknown
    diff = logprob_diff(model, rollouts, SAMPLING.temperature)
    print(f"{transport}, delta={delta}, tp={tp}: largest log-prob difference {diff:.1e}, before the updates {before:.1e}")
    assert diff <= NOISE and before > 100 * NOISE
    if delta != "none":
        assert sent[2].sent < 0.4 * sent[2].full == 0.4 * sent[0].sent
