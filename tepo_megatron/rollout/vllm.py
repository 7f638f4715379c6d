"""vLLM's OpenAI-compatible server: token ids in, token ids and processed log-probs out.

Facts about vLLM are of 0.32; timings are of a 0.6 M-parameter model on 2 CPU cores. Nothing here imports it: the server is a
process of its own, in which `vllm_plugin.py` loads weights and `vllm_auth.py` asks for the key.
"""

from __future__ import annotations

import base64
import io
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tepo_megatron.channel import Kept, Meeting, Source
from tepo_megatron.config import ServerConfig
from tepo_megatron.errors import RolloutError, SyncError
from tepo_megatron.escaping import excerpt
from tepo_megatron.meeting_store import is_loopback
from tepo_megatron.rollout.engine import (
    About,
    EnginePart,
    Launch,
    Send,
    StaleWeights,
    in_words,
    longest_sequence,
    served_label,
)
from tepo_megatron.rollout.in_server.vllm_auth import API_KEY_VARIABLE
from tepo_megatron.rollout.samples import RETURN_EXPERTS, checked_rollout, neutral, parsed, prompt_seed
from tepo_megatron.rollout.servers.environment import devices, on_this_machine, without_torchrun
from tepo_megatron.rollout.servers.process import LOOPBACK
from tepo_megatron.types import Prompt, Rollout, SamplingParams

BACKEND = "tepo_shm"  # registered inside the server by vllm_plugin.py
SERVED_NAME = "policy"
MIDDLEWARE = "tepo_megatron.rollout.in_server.vllm_auth.RequireKey"
CPU_BATCH_TOKENS = 8192  # of prompts in one step
ONEDNN_KERNELS = "64"  # that a server on a CPU keeps
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


class VllmApi:
    """See `engine.EngineApi`."""

    name = "vLLM 0.32"

    def command(self, cfg: ServerConfig, launch: Launch, port: int) -> list[str]:
        """The `vllm` command is not used: that of the CPU wheel does not find its own package metadata."""
        command = [cfg.python or sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--host", launch.host, "--port", str(port), "--middleware", MIDDLEWARE]
        command += ["--model", str(launch.model_path), "--served-model-name", SERVED_NAME]
        command += ["--dtype", _DTYPES[launch.precision], "--max-model-len", str(launch.max_model_len)]
        command += ["--seed", str(launch.seed), "--tensor-parallel-size", str(cfg.tp)]
        # The actor recomputes log-probs after temperature; the model's own sampling defaults must not interfere.
        command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
        command += ["--weight-transfer-config", json.dumps({"backend": BACKEND})]
        command += ["--disable-uvicorn-access-log", "--disable-log-stats"]
        if cfg.kv_cache_gib is not None:
            command += ["--kv-cache-memory-bytes", str(int(cfg.kv_cache_gib * 2**30))]
        if launch.sleeps and launch.platform == "cuda":
            # The graphs' memory goes to the host too, and comes back with the weights; without it a sleeping server keeps them.
            command += ["--enable-sleep-mode", "--sleep-mode-offload-cudagraph"]
        if launch.returns_experts:
            command += [RETURN_EXPERTS]
        if launch.in_fp8:
            command += ["--load-format", "dummy"]
        if launch.platform == "cpu":
            # After the first chunk of a seeded prompt vLLM 0.32 turns its generator back, which a CPU cannot do: whole prompts.
            command += ["--enforce-eager", "--no-enable-chunked-prefill"]
            command += ["--max-num-batched-tokens", str(max(launch.max_model_len, CPU_BATCH_TOKENS))]
            if cfg.tp == 1:
                # One process less: a faster start, and no spinning on shared memory, which slows generation and the trainer.
                command += ["--distributed-executor-backend", "uni"]
        return [*command, *cfg.extra_args]

    def environment(self, cfg: ServerConfig, launch: Launch, inherited: Mapping[str, str], key: str) -> dict[str, str]:
        """The key is in it and not in argv, which everyone on the machine can read."""
        env = without_torchrun(inherited) | on_this_machine(inherited, is_loopback(launch.host))
        env |= {
            API_KEY_VARIABLE: key,
            "VLLM_SERVER_DEV_MODE": "1",  # the weight routes answer 404 otherwise
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_HOST_IP": LOOPBACK,  # of its own sockets, which are for its own processes
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",  # nothing that comes over its sockets or routes may be a pickle
        }
        if launch.returns_experts:
            env["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the other returns none
        if launch.platform == "cuda":
            env |= devices(inherited, launch.first_device, cfg.tp, launch.maps_memory)
        if launch.platform == "cpu":
            if cfg.tp == 1:
                env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # allows `uni`; the engine is a process of its own all the same
            else:
                env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # left to itself it wants a NUMA node for each rank
            # One thread is the fastest for a small model, and leaves the trainer's ranks theirs.
            env |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
            # oneDNN keeps a compiled kernel for each number of tokens that it has met, 1024 by itself: a small server grew by
            # 0.4 GiB in 80 steps, and went on growing by what their coming and going fragments.
            env.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", ONEDNN_KERNELS)
            # Eager anyway; else one helper of the sampler is compiled at the first request (18 s and a C++ compiler).
            env["TORCH_COMPILE_DISABLE"] = "1"
        return env

    async def about(self, send: Send) -> About:
        """Three answers: its version, the model it serves, the label of its weights."""
        version = await send("GET", "/version", None)
        served = await send("GET", "/weight_info", None)
        length = await longest_sequence(send)
        return About(str(version["version"]), str(served["weight_version"]), length)

    async def prepare(self, send: Send) -> None:
        """Files need no rendezvous, but vLLM wants to be asked."""
        await send("POST", "/init_weight_transfer_engine", {"init_info": {}})

    async def generate(self, send: Send, prompt: Prompt, sampling: SamplingParams, seed: int, version: int) -> list[Rollout]:
        """One request: vLLM gives sample k the request's seed + k."""
        answer = await send("POST", "/v1/completions", completion_request(prompt, sampling, seed))
        rollouts = parse_completion(answer, prompt, sampling, version)
        await self._check_version(send, version)  # its answers do not hold it
        return rollouts

    async def interrupt(self, send: Send) -> None:
        """A pause that ends them, after which no step is under way (`/abort_requests` does not wait for the last one)."""
        await send("POST", "/pause?mode=abort&clear_cache=false", None)
        await send("POST", "/resume", None)

    async def begin_update(self, send: Send) -> None:
        """vLLM's own update routes, with our plugin behind them."""
        await send("POST", "/start_weight_update", None)

    async def join(self, send: Send, meeting: Meeting) -> None:
        """The same route again."""
        await send("POST", "/init_weight_transfer_engine", {"init_info": {"meeting": asdict(meeting)}})

    async def keep(self, send: Send, kept: Kept) -> None:
        """As `join`: the route that begins an update takes nothing."""
        await send("POST", "/init_weight_transfer_engine", {"init_info": {"kept": asdict(kept)}})

    async def load(self, send: Send, sources: Sequence[Source]) -> None:
        """One chunk of vLLM's."""
        await send("POST", "/update_weights", {"update_info": {"sources": in_words(sources)}})

    async def finish_update(self, send: Send, version: int) -> None:
        """The prefix cache does not follow by itself."""
        await send("POST", "/finish_weight_update", {"weight_version": str(version)})
        cleared = await send("POST", "/reset_prefix_cache", None)
        if cleared != {"success": True}:
            raise SyncError(f"weights of version {version}: vLLM could not drop the prefix cache of the old weights")
        served = await send("GET", "/weight_info", None)
        if served != {"weight_version": str(version)}:
            raise SyncError(f"sent weights of version {version}, but vLLM reports {excerpt(str(served))}")

    async def checksums(self, send: Send) -> Mapping[str, str] | None:
        """Of parameters, not of buffers; on CPU none of a linear layer, whose parameters are empty there."""
        checksums: dict[str, str] = (await send("POST", "/weight_checker", {"action": "checksum"}))["checksums"]
        return checksums

    async def sleep(self, send: Send) -> None:
        """Level 2: the weights are not kept in host memory, since an update follows each time. On CPU vLLM stops sampling and
        releases nothing.
        """
        await self._switch(send, "/sleep?level=2", "sleeping")

    async def wake(self, send: Send, part: EnginePart) -> None:
        """It samples again once both are back."""
        await self._switch(send, f"/wake_up?tags={part}", "sleeping" if part == "weights" else "awake")

    async def _switch(self, send: Send, path: str, status: str) -> None:
        answer = await send("POST", path, None)
        if answer.get("status") != status:
            raise RolloutError(f"vLLM answered {path} with {excerpt(str(answer))} when it should have said that it is {status}")

    async def _check_version(self, send: Send, version: int) -> None:
        served = await send("GET", "/weight_info", None)
        if served != {"weight_version": served_label(version)}:
            raise StaleWeights(
                f"vLLM served the weights of {excerpt(str(served))} when it should have served those of version {version}"
            )


def completion_request(prompt: Prompt, sampling: SamplingParams, seed: int) -> dict[str, Any]:
    """Body of `/v1/completions`."""
    return {
        "model": SERVED_NAME,
        "prompt": list(prompt.token_ids),
        "n": sampling.samples,
        "max_tokens": sampling.max_tokens,
        **neutral(sampling),
        "seed": prompt_seed(seed, prompt.id, sampling.samples),
        "logprobs": 0,  # of the sampled token alone
        "return_token_ids": True,
    }


def parse_completion(answer: Any, prompt: Prompt, sampling: SamplingParams, version: int) -> list[Rollout]:
    """The rollouts in an answer of `/v1/completions`, by sample index. Raises RolloutError if it is not what was asked for."""

    def logprobs(choice: Any) -> list[float]:  # none of one that was cut off before its first token
        return choice["logprobs"]["token_logprobs"] if choice["token_ids"] != [] else []

    def experts(choice: Any) -> Tensor | None:  # a file of numpy's, of the narrowest type
        given = choice.get("routed_experts")
        if sampling.routing is None or given is None:
            return None
        array = np.load(io.BytesIO(base64.b64decode(given, validate=True)), allow_pickle=False)
        return torch.from_numpy(array.astype(np.int32))

    def rollouts(answer: Any) -> list[Rollout]:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        indices = [choice["index"] for choice in choices]
        if indices != list(range(sampling.samples)):
            raise ValueError(f"samples {indices} instead of {sampling.samples}")
        if any(choice["prompt_token_ids"] != list(prompt.token_ids) for choice in choices):
            raise ValueError("it changed the prompt's tokens")
        return [
            checked_rollout(prompt, c["token_ids"], logprobs(c), c["finish_reason"], sampling, version, experts(c))
            for c in choices
        ]

    return parsed(answer, prompt, VllmApi.name, rollouts)
