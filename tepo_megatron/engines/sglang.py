"""Adapter for SGLang's own server: `/generate` with token ids and log-probs, weights through its custom loader.

Facts about SGLang are of 0.5.23. Nothing here imports SGLang: it runs in a separate environment (its pins conflict with
vLLM's), started by `wire/receiver/sglang_server.py`, which must be importable there.
"""

import base64
import functools
import itertools
import json
import math
import os
import pickle
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from tepo_megatron.base.errors import ConfigError, SyncError, excerpt
from tepo_megatron.base.exchange import HttpAnswer
from tepo_megatron.base.types import Prompt, Rollout, SamplingParams
from tepo_megatron.config import ServerConfig
from tepo_megatron.dist.rendezvous_store import is_loopback
from tepo_megatron.engines.engine import ENGINE_PARTS, EnginePart, GenerationRequest
from tepo_megatron.engines.engine_api import (
    DTYPES,
    Exchange,
    LaunchSpec,
    Send,
    ServerInfo,
    describe,
    even_if_refused,
    serialize,
)
from tepo_megatron.engines.samples import (
    RETURN_EXPERTS,
    accepted,
    answer_values,
    binary_rollouts,
    check_label,
    checked_rollout,
    engine_sampling_params,
    parsed,
    prompt_seed,
    require_masks,
)
from tepo_megatron.engines.servers.environment import (
    cache_tokens,
    devices,
    new_file,
    on_this_machine,
    server_threads,
    without_torchrun,
)
from tepo_megatron.engines.servers.process import LOOPBACK
from tepo_megatron.wire.broadcast_group import GroupSpec, UnchangedTensors
from tepo_megatron.wire.bucket_format import Source
from tepo_megatron.wire.receiver.binary_answer import CONTENT_TYPE
from tepo_megatron.wire.receiver.sglang_loader import BEGIN, FINISH, JOIN, KEEP, LOADER, MODEL_VARIABLE
from tepo_megatron.wire.receiver.sglang_server import CPU_VARIABLE, KEY_VARIABLE

ENVIRONMENT = ".venv-sglang"  # next to this environment; `make sglang` makes it
SERVER = "tepo_megatron.wire.receiver.sglang_server"
CPU_KV_CACHE_GIB = 1.0
MAX_REQUESTS = 256  # sequences sampled at once
# Not a limit: it turns off a watchdog that counts from the last batch, and so may end a server that slept. We check the health.
WATCHDOG_SECONDS = "1e9"
IDLE_SECONDS = 60  # limit since the requests were aborted: the scheduler drops them in its next step; then the update fails


class SglangApi:
    """Implementation of `engine_api.EngineApi` for SGLang."""

    name = "SGLang 0.5.23"

    def __init__(self) -> None:
        self._tp = 1  # tensor-parallel size of the server

    def command(self, cfg: ServerConfig, launch: LaunchSpec, port: int) -> list[str]:
        """Return the argv. Raises ConfigError if there is no environment with SGLang."""
        command = [str(server_python(cfg)), "-P", "-m", SERVER]
        command += ["--host", launch.host, "--port", str(port)]
        command += ["--model-path", str(launch.model_path), "--dtype", DTYPES[launch.precision]]
        command += ["--context-length", str(launch.max_model_len), "--random-seed", str(launch.seed)]
        command += ["--tp-size", str(cfg.tp), "--skip-tokenizer-init", "--sampling-defaults", "openai"]
        command += ["--max-running-requests", str(MAX_REQUESTS), "--custom-weight-loader", LOADER]
        command += ["--log-level-http", "warning"] + ["--enable-memory-saver"] * (launch.sleeps and launch.platform == "cuda")
        command += [RETURN_EXPERTS] * launch.returns_experts
        command += ["--sampling-mask-max-tokens", str(launch.most_masked)] * bool(launch.most_masked)
        command += ["--watchdog-timeout", WATCHDOG_SECONDS]
        command += ["--load-format", "dummy"] * launch.in_fp8 + ["--enable-metrics"] * launch.counts
        if launch.platform == "cpu":
            # SGLang cannot estimate the KV cache size on CPU; without --sleep-on-idle an idle server would keep a core busy.
            memory, most = cfg.kv_cache_gib or CPU_KV_CACHE_GIB, MAX_REQUESTS * launch.max_model_len
            command += ["--device", "cpu", "--attention-backend", "torch_native", "--sleep-on-idle"]
            tokens = cache_tokens(launch.model_path, launch.precision, int(memory * 2**30), most)
            command += ["--max-total-tokens", str(tokens), "--enable-deterministic-inference"]
        return [*command, *cfg.extra_args]

    def environment(self, cfg: ServerConfig, launch: LaunchSpec, inherited: Mapping[str, str], key: str) -> dict[str, str]:
        """Return the environment. The key is in it and not in argv, which everyone on the machine can read."""
        env = without_torchrun(inherited) | on_this_machine(inherited, is_loopback(launch.host))
        env |= {
            KEY_VARIABLE: key,
            MODEL_VARIABLE: str(launch.model_path),
            "HF_HUB_OFFLINE": "1",
            # A health check generates a token, with a time limit of 20 s by default: less than a round of weights may take.
            "SGLANG_HEALTH_CHECK_TIMEOUT": str(math.ceil(cfg.heartbeat_timeout)),
            "SGLANG_WARMUP_TIMEOUT": str(cfg.ready_seconds),  # of its first request, which compiles; 600 s by default
        }
        # Its processes rendezvous through a private file instead of a store without a key that listens on all interfaces.
        # With AMX SGLang names the shared memory after MASTER_ADDR and MASTER_PORT, so they are set, too.
        env["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = "file://" + new_file(inherited, "sglang-dist")
        env |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(1024 + secrets.randbelow(60000))}
        env["SGLANG_USE_MESSAGE_QUEUE_BROADCASTER"] = "0"  # it is a TCP socket that any local user could listen to
        if launch.platform == "cuda":
            env |= devices(inherited, launch.first_device, cfg.tp, launch.maps_memory)
        if launch.platform == "cpu":
            env |= {CPU_VARIABLE: "1"} | server_threads(env, launch.model_path, launch.servers * cfg.tp)
            if cfg.tp > 1:  # by default it needs a NUMA node for each rank
                cores = sorted(os.sched_getaffinity(0))
                env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(cfg.tp))
            env["TORCH_COMPILE_DISABLE"] = "1"  # else a helper is compiled at the first request
        return env

    async def server_info(self, send: Send) -> ServerInfo:
        """Ask for SGLang's version, the label of its weights, and the longest sequence of its model."""
        server = await send("GET", "/server_info", None)
        served = await send("GET", "/model_info", None)
        return await describe(send, server["version"], served["weight_version"])

    async def prepare(self, send: Send) -> None:
        """Ask for the tensor-parallel size: an update names its sources once for each tensor-parallel rank."""
        self._tp = int((await send("GET", "/server_info", None))["tp_size"])

    async def generate(self, send: Send, exchange: Exchange, ask: GenerationRequest, version: int) -> HttpAnswer:
        """Send one request that holds the prompt once per sample: with `n` all samples would share one seed."""
        body = generate_request(ask.prompt, ask.sampling, ask.seed)
        return await exchange("POST", "/generate", body, accepted(ask.sampling))

    def decode(self, answer: HttpAnswer, ask: GenerationRequest, version: int) -> list[Rollout]:
        decoder = binary_rollouts if answer.content_type == CONTENT_TYPE else json_rollouts
        return require_masks(decoder(answer, ask, version, self.name), ask, self.name)

    async def interrupt(self, send: Send) -> None:
        """Abort all requests, waiting and running."""
        await send("POST", "/abort_request", {"abort_all": True})

    async def begin_update(self, send: Send, broken_off: bool) -> None:
        """Open a session of updates, and send BEGIN to our loader as an update without tensors."""
        if broken_off:
            await even_if_refused(send("POST", "/end_weight_update", {}))
        await send("POST", "/begin_weight_update", {"selector": "all"})
        await send("POST", "/update_weights_from_tensor", self._payload(BEGIN))

    async def join_groups(self, send: Send, spec: GroupSpec) -> None:
        """Send the groups as an update without tensors."""
        await send("POST", "/update_weights_from_tensor", self._payload(JOIN, json.dumps(asdict(spec))))

    async def keep_unchanged(self, send: Send, unchanged: UnchangedTensors) -> None:
        """Send the names of the unchanged tensors as an update without tensors."""
        await send("POST", "/update_weights_from_tensor", self._payload(KEEP, json.dumps(asdict(unchanged))))

    async def load(self, send: Send, sources: Sequence[Source]) -> None:
        """Send the names of the sources; the tensors themselves go another way."""
        await send("POST", "/update_weights_from_tensor", self._payload(*serialize(sources)))

    async def finish_update(self, send: Send, version: int) -> None:
        """Send FINISH as an update without tensors, end the session, and flush the prefix cache. Raises SyncError.

        The cache is flushed by a separate request, which waits until nothing is sampled. An update that flushes would fail
        while a request is running, and a health check is a request, too.
        """
        await send("POST", "/update_weights_from_tensor", self._payload(FINISH) | {"weight_version": str(version)})
        await send("POST", "/end_weight_update", {})
        await send("POST", f"/flush_cache?timeout={IDLE_SECONDS}", None)
        if (served := (await send("GET", "/model_info", None)).get("weight_version")) != str(version):
            raise SyncError(f"sent weights of version {version}, but SGLang reports {excerpt(repr(served))}")

    async def checksums(self, send: Send) -> Mapping[str, str] | None:
        """Return the checksums of all parameters. The server does not answer health requests meanwhile."""
        answer = await send("POST", "/weights_checker", {"action": "checksum"})
        return {
            f"rank{rank['parallelism_info'][0]['rank']}:{name}": checksum
            for rank in answer["ranks"]
            for name, checksum in rank["checksums"].items()
        }

    async def sleep(self, send: Send) -> None:
        """Stop taking requests, abort abandoned ones, flush the cache (which waits until idle), and release the memory.

        A server that releases memory while anything is in its scheduler dies. On CPU nothing is released.
        """
        await send("POST", "/pause_generation", {"mode": "abort"})
        await send("POST", f"/flush_cache?timeout={IDLE_SECONDS}", None)
        await send("POST", "/release_memory_occupation", {"tags": list(ENGINE_PARTS)})

    async def wake(self, send: Send, part: EnginePart) -> None:
        """Wake one part. SGLang dies if a part is resumed twice."""
        await send("POST", "/resume_memory_occupation", {"tags": [part]})
        if part == "kv_cache":
            await send("POST", "/continue_generation", {})

    def _payload(self, *names: str) -> dict[str, Any]:
        named = pickle.dumps([(name, torch.empty(0)) for name in names], protocol=4)  # SGLang unpickles only allowed types
        tensors = [base64.b64encode(named).decode()] * self._tp
        return {"serialized_named_tensors": tensors, "load_format": LOADER, "flush_cache": False}


def generate_request(prompt: Prompt, sampling: SamplingParams, seed: int) -> dict[str, Any]:
    """Return the body of `/generate`."""
    first = prompt_seed(seed, prompt.id, sampling.samples)
    params = {"max_new_tokens": sampling.max_tokens, **engine_sampling_params(sampling)}
    return {
        "input_ids": [list(prompt.token_ids)] * sampling.samples,
        "sampling_params": [params | {"sampling_seed": first + k} for k in range(sampling.samples)],
        "return_logprob": True,
        "logprob_start_len": -1,  # only log-probs of the response
        "stream": False,
        "return_routed_experts": sampling.routing is not None,
        "return_sampling_mask": sampling.returns_masks,
    }


class _Finish(msgspec.Struct):
    type: str


class _Entry(msgspec.Struct, array_like=True, gc=False):  # the text, a third element, is skipped
    logprob: float
    token_id: int


class _Meta(msgspec.Struct):
    """Facts about a sample. One that is aborted before its first token may lack the fields with a default."""

    finish_reason: _Finish
    weight_version: str | None = None
    prompt_tokens: int = 0
    output_token_logprobs: list[_Entry] = []
    routed_experts: str | None = None  # base64 of int32, flat
    output_token_sampling_mask: list[list[int]] | None = None
    output_token_sampling_logprobs: list[float] = []


class _Sample(msgspec.Struct):
    output_ids: list[int]
    meta_info: _Meta


_DECODER = msgspec.json.Decoder(list[_Sample])


def json_rollouts(answer: HttpAnswer, ask: GenerationRequest, version: int, engine: str) -> list[Rollout]:
    """Return the rollouts in a JSON answer of `/generate`, by sample index."""
    prompt, sampling = ask.prompt, ask.sampling

    def experts(meta: _Meta) -> NDArray[Any] | None:
        if sampling.routing is None or meta.routed_experts is None:
            return None
        return np.frombuffer(base64.b64decode(meta.routed_experts, validate=True), "<i4")

    def rollout(sample: _Sample) -> Rollout:
        meta, ids = sample.meta_info, sample.output_ids
        entries = meta.output_token_logprobs if ids else []
        if [entry.token_id for entry in entries] != ids:
            raise ValueError("its log-probs are of other tokens than its response")
        if ids and meta.prompt_tokens != len(prompt.token_ids):
            raise ValueError("it changed the prompt's tokens")
        logprobs, masks = [entry.logprob for entry in entries], None
        if sampling.returns_masks and (rows := meta.output_token_sampling_mask) is not None and ids:
            logprobs, masks = meta.output_token_sampling_logprobs, (list(itertools.chain(*rows)), [len(row) for row in rows])
        return checked_rollout(prompt, ids, logprobs, meta.finish_reason.type, sampling, version, experts(meta), masks)

    def rollouts(answer: HttpAnswer) -> list[Rollout]:
        samples = _DECODER.decode(answer.json_body(answer_values(prompt, sampling)))
        if len(samples) != sampling.samples:
            raise ValueError(f"{len(samples)} samples instead of {sampling.samples}")
        checked = [rollout(sample) for sample in samples]
        check_label({sample.meta_info.weight_version for sample in samples}, version, engine)
        return checked

    return parsed(answer, prompt, engine, rollouts)


@functools.cache
def default_python() -> Path:
    """Return the Python of SGLang's servers where rollout.server.python is not set; the file may be missing."""
    if find_spec("sglang") is not None:
        return Path(sys.executable)
    return Path(sys.prefix).with_name(ENVIRONMENT) / "bin" / "python"


def server_python(cfg: ServerConfig) -> Path:
    """Return the Python of SGLang's servers. Raises ConfigError if it is missing."""
    python = Path(shutil.which(cfg.python) or cfg.python) if cfg.python else default_python()
    if not python.is_file():
        raise ConfigError(
            f"rollout.engine=sglang: no Python with SGLang at {python}; run `make sglang`, or give rollout.server.python "
            "that of an environment with SGLang and this package"
        )
    return python
