"""A real server of either engine on the CPU, with a tiny random model, and what the tests ask of it."""

import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, Qwen3ForCausalLM

from tepo_megatron.base.types import Prompt, Rollout, SamplingMask, SamplingParams, Truncation
from tepo_megatron.config import RolloutConfig, ServerConfig, UrlServerConfig
from tepo_megatron.engines.engine_api import LaunchSpec
from tepo_megatron.engines.engines import build_engine, layers_of
from tepo_megatron.engines.servers.fleet import Fleet
from tepo_megatron.engines.servers.process import LOOPBACK
from tepo_megatron.engines.servers.rendezvous import KEY_VARIABLE
from tepo_megatron.engines.servers.server import LocalServer
from tests.direct_requests import ask
from tests.tiny import VOCAB_SIZE, tiny_qwen3
from tests.truncated import kept

EOS = 2
MAX_MODEL_LEN = 256
MAX_LOGPROB_DIFF = 1e-4
SAMPLING = SamplingParams(samples=4, temperature=0.7, max_tokens=20, stop_token_ids=(EOS,))
WORLD_SECONDS = 300 + ServerConfig().ready_seconds  # of a world in which servers are started


@dataclass
class Served:
    """An engine, the model whose weights it serves, and its log."""

    name: str
    engine: Fleet
    model: PreTrainedModel
    log_path: Path
    tp: int


@dataclass
class TruncatedDiff:
    """The largest difference of a log-prob in nats, the share of tokens with another mask, and the mean size of a mask."""

    largest: float
    other_masks: float
    mean_size: float


@contextmanager
def serve(
    name: str,
    folder: Path,
    *,
    make: Callable[[Path], PreTrainedModel] = tiny_qwen3,
    generation_config: Mapping[str, Any] | None = None,
    servers: int = 1,
    host: str = LOOPBACK,
    precision: str = "fp32",
    **server: Any,
) -> Iterator[Served]:
    """Yield ready servers of engine `name`, whose failures are final."""
    model = make(folder / "model")
    if generation_config is not None:
        (folder / "model" / "generation_config.json").write_text(json.dumps(generation_config))
    settings = {"kv_cache_gib": 0.25, "restarts": 0} | server
    cfg = RolloutConfig(engine=name, servers=servers, server=ServerConfig(**settings))
    settings = {"platform": "cpu", "precision": precision, "most_masked": VOCAB_SIZE, **layers_of(folder / "model")}
    launch = LaunchSpec(folder / "model", MAX_MODEL_LEN, seed=0, host=host, **settings)
    log_path = folder / "server.log"
    keys = mock.patch("tepo_megatron.engines.servers.server.secrets.token_urlsafe", lambda size: "-" + secrets.token_hex(size))
    with keys, build_engine(cfg, launch, log_path) as engine:  # one key in 64 begins like an option
        engine.start()
        engine.wait_ready()
        yield Served(name, engine, model, log_path, cfg.server.tp)


@contextmanager
def another_engine(served: Served, **rollout: Any) -> Iterator[Fleet]:
    """Yield a second engine, ready, that knows the first server by its URL.

    After updates by the second engine, the first engine has to update again.
    """
    address = served.engine.endpoints[0].address
    assert address is not None
    server = UrlServerConfig(urls=[address.url], tp=served.tp, restarts=0)
    cfg = RolloutConfig(engine=served.name, server=server, **rollout)
    launch = LaunchSpec(served.log_path.parent / "model", MAX_MODEL_LEN, platform="cpu", precision="fp32", seed=0)
    with mock.patch.dict(os.environ, {KEY_VARIABLE: address.key}), build_engine(cfg, launch, served.log_path) as engine:
        engine.start()
        engine.wait_ready()
        yield engine


def call(served: Served, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Send one request with the key, past the engine, and return the answer.

    Raises:
        RequestFailed: The server refused.
    """
    return ask(served.engine, 0, method, path, body)


def make_prompts(count: int, seed: int) -> list[Prompt]:
    """Return prompts of different lengths, with ids that are not their positions."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, VOCAB_SIZE, (count, 12), generator=generator).tolist()
    return [Prompt(id=1000 + 7 * i, token_ids=tuple(ids[: 3 + i % 10]), answer=str(i)) for i, ids in enumerate(tokens)]


def sampled_by(rollouts: list[Rollout], version: int) -> list[Rollout]:
    """Return the rollouts that have tokens of a version of the weights, with only these tokens as the response."""
    found = []
    for r in rollouts:
        mask_L, masks = r.response_mask_L & (r.versions_L == version), r.sampling_mask
        if masks is not None:
            parts = zip(masks.split([1] * r.response_length), mask_L[r.response_mask_L].tolist(), strict=True)
            masks = SamplingMask.cat([part for part, chosen in parts if chosen])
        if mask_L.any():
            found.append(replace(r, response_mask_L=mask_L, sampling_mask=masks))
    return found


@torch.no_grad()
def truncated_diff(
    model: Qwen3ForCausalLM, rollouts: list[Rollout], temperature: float, truncation: Truncation
) -> TruncatedDiff:
    """Compare log-probs and sampling masks of truncated sampling with those of transformers in fp64, token by token."""
    largest, tokens, other, sizes = 0.0, 0, 0, 0
    for rollout in rollouts:
        assert rollout.sampling_mask is not None
        logits = model(rollout.token_ids_L[None]).logits[0, :-1].double()
        place_N = rollout.response_mask_L.nonzero()[:, 0]
        masks = rollout.sampling_mask.split([1] * len(place_N))
        for place, mask in zip(place_N.tolist(), masks, strict=True):
            ids, z = sorted(mask.ids_M.tolist()), logits[place - 1]
            logp = torch.log_softmax(z[ids] / temperature, 0)[ids.index(int(rollout.token_ids_L[place]))]
            largest = max(largest, abs(float(logp - rollout.rollout_logprobs_L[place])))
            tokens, other, sizes = tokens + 1, other + (set(ids) != kept(z, temperature, truncation)), sizes + len(ids)
    return TruncatedDiff(largest, other / tokens, sizes / tokens)


@torch.no_grad()
def logprob_diff(model: Qwen3ForCausalLM, rollouts: list[Rollout], temperature: float) -> float:
    """Return the largest |engine - transformers| of a response token, in nats."""

    def padded(rows: list[torch.Tensor]) -> torch.Tensor:  # on the right, where causal attention does not look
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    tokens = padded([r.token_ids_L for r in rollouts])
    logprobs = (model(tokens).logits[:, :-1].double() / temperature).log_softmax(-1)
    expected = logprobs.gather(2, tokens[:, 1:, None]).squeeze(2)
    given = padded([r.rollout_logprobs_L for r in rollouts])[:, 1:].double()
    chosen = padded([r.response_mask_L for r in rollouts])[:, 1:]
    return (given - expected)[chosen].abs().max().item()


def responses(rollouts: list[Rollout]) -> dict[int, list[list[int]]]:
    """Return prompt id -> the responses, in order."""
    groups: dict[int, list[list[int]]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.prompt_id, []).append(rollout.response_ids)
    return groups


def save_weights(model: Qwen3ForCausalLM, folder: Path, files: int) -> list[Path]:
    """Write the model's tensors, without the tied output layer, distributed over several files."""
    names = [name for name, _ in model.named_parameters()]
    weights = model.state_dict()
    paths = [folder / f"{i}.safetensors" for i in range(files)]
    for i, path in enumerate(paths):
        save_file({name: weights[name].clone() for name in names[i::files]}, path)
    return paths


def server_processes(engine: Fleet, server: int = 0) -> list[psutil.Process]:
    """Return the guard, the server's first process and those that it started."""
    behind = engine.endpoints[server].server
    assert isinstance(behind, LocalServer)
    assert behind.process is not None and behind.process.guard_pid is not None
    guard = psutil.Process(behind.process.guard_pid)
    return [guard, *guard.children(recursive=True)]
