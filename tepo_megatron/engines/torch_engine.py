"""Adapter for our own server, which samples with the model classes of transformers (`wire/receiver/torch_server.py`).

It is for debugging, for exactness, and for machines on which no engine installs: it needs the trainer's own packages alone.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tepo_megatron.base.errors import SyncError, excerpt
from tepo_megatron.base.exchange import HttpAnswer
from tepo_megatron.base.types import Prompt, Rollout, SamplingParams
from tepo_megatron.config import ServerConfig
from tepo_megatron.dist.rendezvous_store import is_loopback
from tepo_megatron.engines.engine import EnginePart, GenerationRequest
from tepo_megatron.engines.engine_api import DTYPES, Exchange, LaunchSpec, Send, ServerInfo, serialize
from tepo_megatron.engines.samples import accepted, binary_rollouts, prompt_seed
from tepo_megatron.engines.servers.environment import cache_tokens, devices, on_this_machine, server_threads, without_torchrun
from tepo_megatron.wire.broadcast_group import GroupSpec, UnchangedTensors
from tepo_megatron.wire.bucket_format import Source

SERVER = "tepo_megatron.wire.receiver.torch_server"
KEY_VARIABLE = "TEPO_TORCH_KEY"  # see torch_server.py, which the trainer does not import
KV_CACHE_GIB = {"cpu": 1.0, "cuda": 16.0}
MOST_TOKENS = 2**31  # of the KV cache


class TorchApi:
    """Implementation of `engine_api.EngineApi` for our own server. Its methods say what differs from there."""

    name = "the torch engine"

    def command(self, cfg: ServerConfig, launch: LaunchSpec, port: int) -> list[str]:
        memory = int((cfg.kv_cache_gib or KV_CACHE_GIB[launch.platform]) * 2**30)
        tokens = cache_tokens(launch.model_path, launch.precision, memory, MOST_TOKENS)
        command = [cfg.python or sys.executable, "-P", "-m", SERVER, "--host", launch.host, "--port", str(port)]
        command += ["--model", str(launch.model_path), "--dtype", DTYPES[launch.precision], "--device", launch.platform]
        command += ["--max-model-len", str(launch.max_model_len), "--cache-tokens", str(tokens)]
        return [*command, *cfg.extra_args]

    def environment(self, cfg: ServerConfig, launch: LaunchSpec, inherited: Mapping[str, str], key: str) -> dict[str, str]:
        """Return the environment. The key is in it and not in argv, which everyone on the machine can read."""
        env = without_torchrun(inherited) | on_this_machine(inherited, is_loopback(launch.host))
        env |= {KEY_VARIABLE: key, "HF_HUB_OFFLINE": "1"}
        if launch.platform == "cuda":
            return env | devices(inherited, launch.first_device, cfg.tp, launch.maps_memory)
        return env | server_threads(env, launch.model_path, launch.servers)

    async def server_info(self, send: Send) -> ServerInfo:
        """Ask for the versions of PyTorch and transformers, the label of the weights, and the longest sequence."""
        about = await send("GET", "/info", None)
        return ServerInfo(str(about["version"]), str(about["weight_version"]), int(about["max_model_len"]))

    async def prepare(self, send: Send) -> None:
        """Send nothing."""

    async def generate(self, send: Send, exchange: Exchange, ask: GenerationRequest, version: int) -> HttpAnswer:
        """Send one request for all samples. The answer has the label of the weights."""
        body = generate_request(ask.prompt, ask.sampling, ask.seed)
        return await exchange("POST", "/generate", body, accepted(ask.sampling))

    def decode(self, answer: HttpAnswer, ask: GenerationRequest, version: int) -> list[Rollout]:
        """Decode the answer, which is always binary."""
        return binary_rollouts(answer, ask, version, self.name)

    async def interrupt(self, send: Send) -> None:
        """Abort all requests, waiting and running, after the token that is being sampled."""
        await send("POST", "/abort", {})

    async def begin_update(self, send: Send, broken_off: bool) -> None:
        await send("POST", "/begin_update", {"broken_off": broken_off})

    async def join_groups(self, send: Send, spec: GroupSpec) -> None:
        """Send the groups."""
        await send("POST", "/join_groups", asdict(spec))

    async def keep_unchanged(self, send: Send, unchanged: UnchangedTensors) -> None:
        """Send the names of the unchanged tensors."""
        await send("POST", "/keep_unchanged", asdict(unchanged))

    async def load(self, send: Send, sources: Sequence[Source]) -> None:
        """Send the sources. Each tensor is copied into the model."""
        await send("POST", "/load", {"sources": serialize(sources)})

    async def finish_update(self, send: Send, version: int) -> None:
        """Finish the update. The server caches nothing between requests."""
        if (label := await send("POST", "/finish_update", {"version": version})) != str(version):
            raise SyncError(f"sent weights of version {version}, but {self.name} reports {excerpt(repr(label))}")

    async def checksums(self, send: Send) -> Mapping[str, str] | None:
        """Return the CRC-32 of all tensors in their served precision."""
        checksums: dict[str, str] = await send("POST", "/checksums", {})
        return checksums

    async def sleep(self, send: Send) -> None:
        """Release the weights, after ending requests that nobody waits for. An idle server has no KV cache."""
        await self.interrupt(send)
        await send("POST", "/sleep", {})

    async def wake(self, send: Send, part: EnginePart) -> None:
        """Allocate the weights; memory of the KV cache comes with the requests."""
        await send("POST", "/wake", {"part": part})


def generate_request(prompt: Prompt, sampling: SamplingParams, seed: int) -> dict[str, Any]:
    """Return the body of `/generate`."""
    first = prompt_seed(seed, prompt.id, sampling.samples)
    return asdict(sampling) | {"prompt": list(prompt.token_ids), "seed": first, "masks": sampling.returns_masks}
