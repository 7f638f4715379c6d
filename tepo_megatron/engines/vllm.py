"""Adapter for vLLM's OpenAI-compatible server: token ids in, token ids and processed log-probs out.

Facts about vLLM are of 0.32; timings are of a 0.6 M-parameter model on 2 CPU cores. Nothing here imports vLLM: the server is a
separate process. In it run, of `wire/receiver`, `vllm_plugin.py`, which loads weights, and `vllm_middleware.py`, which requires
the key and answers in binary.
"""

import base64
import io
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tepo_megatron.base.errors import RolloutError, SyncError, excerpt
from tepo_megatron.base.exchange import HttpAnswer
from tepo_megatron.base.types import MASK_TIES, Prompt, Rollout, SamplingParams
from tepo_megatron.config import ServerConfig
from tepo_megatron.dist.rendezvous_store import is_loopback
from tepo_megatron.engines.engine import EnginePart, GenerationRequest
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
)
from tepo_megatron.engines.servers.environment import devices, on_this_machine, server_threads, without_torchrun
from tepo_megatron.engines.servers.process import LOOPBACK
from tepo_megatron.wire.broadcast_group import GroupSpec, UnchangedTensors
from tepo_megatron.wire.bucket_format import Source
from tepo_megatron.wire.receiver.binary_answer import CONTENT_TYPE
from tepo_megatron.wire.receiver.vllm_middleware import API_KEY_VARIABLE

SERVED_NAME = "policy"  # of the model
BACKEND = "tepo_shm"  # name under which vllm_plugin.py registers the backend inside the server
# the last is asked first
MIDDLEWARE = tuple(f"tepo_megatron.wire.receiver.vllm_middleware.{name}" for name in ("BinaryCompletions", "RequireKey"))
VLLM_LOGPROBS = 20  # most log-probs per token that vLLM returns by default
CPU_BLOCK_TOKENS = "32"  # of the cache; the least that vLLM's attention takes
CPU_BATCH_TOKENS = 8192  # most prompt tokens in one step
ONEDNN_KERNELS = "64"  # capacity of oneDNN's cache of compiled kernels on CPU
_ABANDONED = "abandoned"  # label of weights after an update whose sender is gone


class VllmApi:
    """Implementation of `engine_api.EngineApi` for vLLM."""

    name = "vLLM 0.32"

    def command(self, cfg: ServerConfig, launch: LaunchSpec, port: int) -> list[str]:
        """Return the argv. It does not use the `vllm` command: that of the CPU wheel does not find its own package metadata."""
        command = [cfg.python or sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--host", launch.host, "--port", str(port)]
        command += [word for name in MIDDLEWARE for word in ("--middleware", name)]
        command += ["--model", str(launch.model_path), "--served-model-name", SERVED_NAME]
        command += ["--dtype", DTYPES[launch.precision], "--max-model-len", str(launch.max_model_len)]
        command += ["--seed", str(launch.seed), "--tensor-parallel-size", str(cfg.tp)]
        # The actor recomputes log-probs after temperature; the model's own sampling defaults must not interfere.
        command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
        command += ["--weight-transfer-config", json.dumps({"backend": BACKEND})]
        command += ["--disable-uvicorn-access-log"] + ["--disable-log-stats"] * (not launch.counts)
        if cfg.kv_cache_gib is not None:
            command += ["--kv-cache-memory-bytes", str(int(cfg.kv_cache_gib * 2**30))]
        if launch.sleeps and launch.platform == "cuda":
            # CUDA graphs are offloaded to the host, too; without that option a sleeping server keeps their memory.
            command += ["--enable-sleep-mode", "--sleep-mode-offload-cudagraph"]
        if launch.returns_experts:
            command += [RETURN_EXPERTS]
        if launch.most_masked > VLLM_LOGPROBS:
            command += ["--max-logprobs", str(launch.most_masked)]
        if launch.in_fp8:
            command += ["--load-format", "dummy"]
        if launch.text_only:
            command += ["--language-model-only"]
        if launch.platform == "cpu":
            # After the first chunk of a seeded prompt vLLM 0.32 rewinds its generator, which fails on CPU: use whole prompts.
            command += ["--enforce-eager", "--no-enable-chunked-prefill"]
            command += ["--max-num-batched-tokens", str(max(launch.max_model_len, CPU_BATCH_TOKENS))]
            if launch.linear_attention:  # vLLM caches its states per block, and requires chunked prefill for that
                command += ["--no-enable-prefix-caching"]
            else:  # by default 128 tokens: the samples of a group would not share a shorter prompt
                command += ["--block-size", CPU_BLOCK_TOKENS]
            if cfg.tp == 1:
                # One process less: a faster start, and no busy-waiting on shared memory, which slows sampling and training.
                command += ["--distributed-executor-backend", "uni"]
        return [*command, *cfg.extra_args]

    def environment(self, cfg: ServerConfig, launch: LaunchSpec, inherited: Mapping[str, str], key: str) -> dict[str, str]:
        """Return the environment. The key is in it and not in argv, which everyone on the machine can read."""
        env = without_torchrun(inherited) | on_this_machine(inherited, is_loopback(launch.host))
        env |= {
            API_KEY_VARIABLE: key,
            "VLLM_SERVER_DEV_MODE": "1",  # the weight routes answer 404 otherwise
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_HOST_IP": LOOPBACK,  # address of the sockets between its own processes
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",  # refuse pickles from sockets and routes
            # Else its front end gives the engine up after 10 minutes of loading, and the engine its ranks after 5 of a step.
            "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(cfg.ready_seconds)),
            "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(math.ceil(cfg.request_seconds)),
        }
        if launch.returns_experts:
            env["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # only this model runner returns experts
        if launch.platform == "cuda":
            env |= devices(inherited, launch.first_device, cfg.tp, launch.maps_memory)
        if launch.platform == "cpu":
            if cfg.tp == 1:
                env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # needed for `uni`; the server is a separate process anyway
            else:
                env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # by default it needs a NUMA node for each rank
            env |= server_threads(env, launch.model_path, launch.servers * cfg.tp)
            # oneDNN caches a compiled kernel for each number of tokens, 1024 by default: a small server grew by 0.4 GiB in
            # 80 steps, and went on growing because evictions fragment the memory.
            env.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", ONEDNN_KERNELS)
            # Else a helper of the sampler is compiled at the first request (18 s, C++ compiler), though the model is eager.
            env["TORCH_COMPILE_DISABLE"] = "1"
        return env

    async def server_info(self, send: Send) -> ServerInfo:
        """Ask for vLLM's version, the label of its weights, and the longest sequence of its model."""
        version = await send("GET", "/version", None)
        served = await send("GET", "/weight_info", None)
        return await describe(send, version["version"], served["weight_version"])

    async def prepare(self, send: Send) -> None:
        """Initialize the transfer backend. Files need no process group, but vLLM requires the call."""
        await send("POST", "/init_weight_transfer_engine", {"init_info": {}})

    async def generate(self, send: Send, exchange: Exchange, ask: GenerationRequest, version: int) -> HttpAnswer:
        """Send one request for all samples: vLLM gives sample k the request's seed + k."""
        body = completion_request(ask.prompt, ask.sampling, ask.seed)
        answer = await exchange("POST", "/v1/completions", body, accepted(ask.sampling))
        if answer.content_type != CONTENT_TYPE:  # vLLM's JSON does not contain the version
            served = await send("GET", "/weight_info", None)
            check_label({served["weight_version"]}, version, self.name)
        return answer

    def decode(self, answer: HttpAnswer, ask: GenerationRequest, version: int) -> list[Rollout]:
        decoder = binary_rollouts if answer.content_type == CONTENT_TYPE else json_rollouts
        return decoder(answer, ask, version, self.name)

    async def interrupt(self, send: Send) -> None:
        """Pause and resume. The pause aborts all requests and waits for the last step, which `/abort_requests` does not."""
        await send("POST", "/pause?mode=abort&clear_cache=false", None)
        await send("POST", "/resume", None)

    async def begin_update(self, send: Send, broken_off: bool) -> None:
        """Call vLLM's own update route; our plugin is behind it. An update that was broken off is finished first."""
        if broken_off:
            await send("POST", "/init_weight_transfer_engine", {"init_info": {"abandoned": True}})
            await even_if_refused(send("POST", "/finish_weight_update", {"weight_version": _ABANDONED}))
        await send("POST", "/start_weight_update", None)

    async def join_groups(self, send: Send, spec: GroupSpec) -> None:
        """Send the groups to `/init_weight_transfer_engine`, the route of `prepare`."""
        await send("POST", "/init_weight_transfer_engine", {"init_info": {"spec": asdict(spec)}})

    async def keep_unchanged(self, send: Send, unchanged: UnchangedTensors) -> None:
        """Use the route of `join_groups`: the route that begins an update takes no arguments."""
        await send("POST", "/init_weight_transfer_engine", {"init_info": {"unchanged": asdict(unchanged)}})

    async def load(self, send: Send, sources: Sequence[Source]) -> None:
        """Send the sources as one chunk of vLLM's update."""
        await send("POST", "/update_weights", {"update_info": {"sources": serialize(sources)}})

    async def finish_update(self, send: Send, version: int) -> None:
        """Finish the update and clear the prefix cache, which vLLM does not do by itself. Raises SyncError."""
        await send("POST", "/finish_weight_update", {"weight_version": str(version)})
        cleared = await send("POST", "/reset_prefix_cache", None)
        if cleared != {"success": True}:
            raise SyncError(f"weights of version {version}: vLLM could not drop the prefix cache of the old weights")
        served = await send("GET", "/weight_info", None)
        if served != {"weight_version": str(version)}:
            raise SyncError(f"sent weights of version {version}, but vLLM reports {excerpt(str(served))}")

    async def checksums(self, send: Send) -> Mapping[str, str] | None:
        """Return checksums of parameters, not of buffers. On CPU linear layers have none: their parameters are empty there."""
        checksums: dict[str, str] = (await send("POST", "/weight_checker", {"action": "checksum"}))["checksums"]
        return checksums

    async def sleep(self, send: Send) -> None:
        """Use sleep level 2: weights are not kept in host memory, because an update always follows.

        On CPU vLLM only stops sampling.
        """
        await self._switch(send, "/sleep?level=2", "sleeping")

    async def wake(self, send: Send, part: EnginePart) -> None:
        """Wake one part. vLLM samples again once both parts are awake."""
        await self._switch(send, f"/wake_up?tags={part}", "sleeping" if part == "weights" else "awake")

    async def _switch(self, send: Send, path: str, status: str) -> None:
        answer = await send("POST", path, None)
        if answer.get("status") != status:
            raise RolloutError(f"vLLM answered {path} with {excerpt(str(answer))} when it should have said that it is {status}")


def completion_request(prompt: Prompt, sampling: SamplingParams, seed: int) -> dict[str, Any]:
    """Return the body of `/v1/completions`."""
    return {
        "model": SERVED_NAME,
        "prompt": list(prompt.token_ids),
        "n": sampling.samples,
        "max_tokens": sampling.max_tokens,
        **engine_sampling_params(sampling),
        "seed": prompt_seed(seed, prompt.id, sampling.samples),
        # only the log-prob of the sampled token, or those of its sampling mask, whose other ids have minus infinity
        "logprobs": sampling.top_k + MASK_TIES if sampling.returns_masks else 0,
        "return_token_ids": True,
    }


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float]


class _Choice(msgspec.Struct):
    index: int
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str | None
    logprobs: _Logprobs | None = None
    routed_experts: str | None = None  # base64 of a .npy file with the narrowest integer type


class _Completion(msgspec.Struct):
    choices: list[_Choice]


_DECODER = msgspec.json.Decoder(_Completion)  # skips what the classes do not name, 90 % of an answer


def json_rollouts(answer: HttpAnswer, ask: GenerationRequest, version: int, engine: str) -> list[Rollout]:
    """Return the rollouts in a JSON answer of `/v1/completions`, by sample index."""
    prompt, sampling = ask.prompt, ask.sampling

    def logprobs(choice: _Choice) -> list[float]:  # empty if aborted before the first token
        if not choice.token_ids:
            return []
        if choice.logprobs is None:
            raise ValueError("it lacks log-probs")
        return choice.logprobs.token_logprobs

    def experts(choice: _Choice) -> NDArray[Any] | None:
        if sampling.routing is None or choice.routed_experts is None:
            return None
        file = io.BytesIO(base64.b64decode(choice.routed_experts, validate=True))
        array: NDArray[Any] = np.load(file, allow_pickle=False)
        return array

    def rollouts(answer: HttpAnswer) -> list[Rollout]:
        completion = _DECODER.decode(answer.json_body(answer_values(prompt, sampling)))
        choices = sorted(completion.choices, key=lambda choice: choice.index)
        indices = [choice.index for choice in choices]
        if indices != list(range(sampling.samples)):
            raise ValueError(f"samples {indices} instead of {sampling.samples}")
        if any(choice.prompt_token_ids != list(prompt.token_ids) for choice in choices):
            raise ValueError("it changed the prompt's tokens")
        return [
            checked_rollout(prompt, c.token_ids, logprobs(c), str(c.finish_reason), sampling, version, experts(c))
            for c in choices
        ]

    return parsed(answer, prompt, engine, rollouts)
