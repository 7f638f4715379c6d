"""How the vLLM server is started. Facts about vLLM are of 0.32; the timings are of a 0.6 M-parameter model on 2 CPU cores."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Literal

from tepo_megatron.config import ServerConfig
from tepo_megatron.rollout.server import LOOPBACK
from tepo_megatron.rollout.vllm_auth import API_KEY_VARIABLE
from tepo_megatron.rollout.vllm_completions import SERVED_NAME

Platform = Literal["cpu", "cuda"]
Precision = Literal["fp32", "bf16"]

BACKEND = "tepo_shm"  # registered inside the server by vllm_plugin.py
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
MIDDLEWARE = "tepo_megatron.rollout.vllm_auth.RequireKey"

# What torchrun tells its workers is not meant for a server that one of them starts.
_TORCHRUN = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
}


def server_command(
    cfg: ServerConfig, *, model_path: str, max_model_len: int, platform: Platform, precision: Precision, seed: int, port: int
) -> list[str]:
    """argv of the server. The `vllm` command is not used: that of the CPU wheel does not find its own package metadata."""
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--host", LOOPBACK, "--port", str(port), "--middleware", MIDDLEWARE]
    command += ["--model", model_path, "--served-model-name", SERVED_NAME]
    command += ["--dtype", _DTYPES[precision], "--max-model-len", str(max_model_len), "--seed", str(seed)]
    # The actor recomputes log-probs after temperature; the model's own sampling defaults must not interfere.
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    command += ["--weight-transfer-config", json.dumps({"backend": BACKEND})]
    command += ["--disable-uvicorn-access-log", "--disable-log-stats"]
    if cfg.kv_cache_gib is not None:
        command += ["--kv-cache-memory-bytes", str(int(cfg.kv_cache_gib * 2**30))]
    if platform == "cpu":
        # One process less: a faster start, and no spinning on shared memory, which slows generation and the trainer beside it.
        command += ["--enforce-eager", "--distributed-executor-backend", "uni"]
    return [*command, *cfg.extra_args]


def server_environment(inherited: Mapping[str, str], key: str, platform: Platform) -> dict[str, str]:
    """The server's environment: ours without torchrun's part, with the API key (argv can be read by everyone)."""
    env = {name: value for name, value in inherited.items() if name not in _TORCHRUN and not name.startswith("TORCHELASTIC_")}
    env[API_KEY_VARIABLE] = key
    env["VLLM_SERVER_DEV_MODE"] = "1"  # the weight routes answer 404 otherwise
    env |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if platform == "cpu":
        # Allows `uni`; the engine is a process of its own all the same.
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # One thread is the fastest for a small model, and leaves the trainer's ranks theirs.
        env |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        # Eager anyway; else one helper of the sampler is compiled at the first request (18 s and a C++ compiler).
        env["TORCH_COMPILE_DISABLE"] = "1"
    return env
