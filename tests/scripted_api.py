"""The client side of an engine that speaks with `scripted_server.py`."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tepo_megatron.base.exchange import HttpAnswer
from tepo_megatron.base.types import Rollout
from tepo_megatron.config import ServerConfig
from tepo_megatron.engines.engine import EnginePart, GenerationRequest
from tepo_megatron.engines.engine_api import Exchange, LaunchSpec, Send, ServerInfo, StaleWeights, served_label
from tepo_megatron.engines.samples import checked_rollout, parsed
from tepo_megatron.wire.broadcast_group import GroupSpec, UnchangedTensors
from tepo_megatron.wire.bucket_format import Bucket, Source
from tests.scripted_server import KEY


class ScriptedApi:
    """The `engine_api.EngineApi` of the scripted server.

    Attributes:
        takes_broadcasts: Whether it receives weights by broadcast too, and not only names of files.
    """

    name = "the scripted server"

    def __init__(self, takes_broadcasts: bool = False) -> None:
        self.takes_broadcasts = takes_broadcasts

    def command(self, cfg: ServerConfig, launch: LaunchSpec, port: int) -> list[str]:
        command = [sys.executable, "-m", "tests.scripted_server", str(port), launch.host, *cfg.extra_args]
        return [*command, str(cfg.tp), str(launch.model_path)] if self.takes_broadcasts else command

    def environment(self, cfg: ServerConfig, launch: LaunchSpec, inherited: Mapping[str, str], key: str) -> dict[str, str]:
        return {**inherited, KEY: key, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}

    async def server_info(self, send: Send) -> ServerInfo:
        return ServerInfo("1.0", served_label((await send("GET", "/about", None))["version"]), max_model_len=64)

    async def prepare(self, send: Send) -> None: ...

    async def generate(self, send: Send, exchange: Exchange, ask: GenerationRequest, version: int) -> HttpAnswer:
        sampling = ask.sampling
        body = {"prompt": ask.prompt.id, "seed": ask.seed, "samples": sampling.samples, "max_tokens": sampling.max_tokens}
        return await exchange("POST", "/generate", body, "*/*")

    def decode(self, answer: HttpAnswer, ask: GenerationRequest, version: int) -> list[Rollout]:
        def rollouts(answer: HttpAnswer) -> list[Rollout]:
            given = answer.json()
            if given["version"] != version:
                raise StaleWeights(f"served version {given['version']} instead of {version}")
            return [
                checked_rollout(ask.prompt, ids, [-1.0] * len(ids), given["stop_reason"], ask.sampling, version)
                for ids in given["samples"]
            ]

        return parsed(answer, ask.prompt, self.name, rollouts)

    async def interrupt(self, send: Send) -> None:
        await send("POST", "/interrupt", {})

    async def begin_update(self, send: Send, broken_off: bool) -> None:
        await send("POST", "/begin", {"broken_off": broken_off})

    async def join_groups(self, send: Send, spec: GroupSpec) -> None:
        await send("POST", "/join", asdict(spec))

    async def keep_unchanged(self, send: Send, unchanged: UnchangedTensors) -> None:
        await send("POST", "/keep", asdict(unchanged))

    async def load(self, send: Send, sources: Sequence[Source]) -> None:
        files = [source.name for source in sources if isinstance(source, Path)]
        buckets = [source.to_json() for source in sources if isinstance(source, Bucket)]
        await send("POST", "/load", {"files": files, "buckets": buckets})

    async def finish_update(self, send: Send, version: int) -> None:
        await send("POST", "/update", {"version": version})

    async def checksums(self, send: Send) -> Mapping[str, str] | None:
        return await send("POST", "/checksums", {})

    async def sleep(self, send: Send) -> None:
        await send("POST", "/sleep", {})

    async def wake(self, send: Send, part: EnginePart) -> None:
        await send("POST", f"/wake/{part}", {})
