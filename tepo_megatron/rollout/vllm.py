"""vLLM's OpenAI-compatible server as a RolloutEngine: token ids in, token ids and processed log-probs out, over HTTP.

Facts about vLLM are of 0.32. Nothing here imports it: the server is a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import httpx
import torch

from tepo_megatron.config import RolloutConfig, ServerConfig
from tepo_megatron.errors import RolloutError, SyncError
from tepo_megatron.rollout.engine import INITIAL_VERSION
from tepo_megatron.rollout.server import LOOPBACK, ServerProcess, choose_port
from tepo_megatron.rollout.vllm_auth import API_KEY_VARIABLE
from tepo_megatron.types import Prompt, Rollout, SamplingParams

SERVED_NAME = "policy"
BACKEND = "tepo_shm"  # registered inside the server by vllm_plugin.py
MIDDLEWARE = "tepo_megatron.rollout.vllm_auth.RequireKey"
# The server closes a connection idle for 5 s. Ours must be dropped before, or a request after a long training step goes down
# with it.
KEEP_ALIVE_SECONDS = 2.0
CONNECT_SECONDS = 10.0
# A dead engine closes its connections first and ends a moment later; waiting for that makes the error name the cause.
DEATH_SECONDS = 1.0
LARGEST_SEED = 2**63 - 1

# What torchrun tells its workers is not meant for a server that one of them starts.
_TORCHRUN = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
}


class VllmEngine:
    """A vLLM server on the loopback interface, as `engine.RolloutEngine` describes it.

    model_path: Hugging Face directory that the server loads first; max_model_len: prompt and response tokens of a sequence
    at most; log_path: the server's log; seed: of the server itself (every request brings its own).
    """

    def __init__(
        self,
        cfg: RolloutConfig,
        *,
        model_path: str | Path,
        max_model_len: int,
        platform: Literal["cpu", "cuda"],
        log_path: Path,
        seed: int,
    ) -> None:
        self._cfg = cfg.server
        self._model_path = str(model_path)
        self._max_model_len = max_model_len
        self._platform = platform
        self._log_path = log_path
        self._seed = seed
        self._version = INITIAL_VERSION
        self._broken = ""  # why the served weights can no longer be trusted
        self._server: ServerProcess | None = None
        self._client: httpx.Client | None = None
        self._pool: ThreadPoolExecutor | None = None

    @property
    def version(self) -> int:
        """The version of the weights last accepted; INITIAL_VERSION before."""
        return self._version

    def start(self) -> None:
        """Start the server; returns at once. Raises RolloutError (busy port, unwritable log)."""
        if self._server is not None:
            raise RolloutError("the inference server was already started; close the engine first")
        url = f"http://{LOOPBACK}:{choose_port(self._cfg.port)}"
        key = secrets.token_urlsafe(32)
        server = ServerProcess(
            server_command(self._cfg, self._model_path, self._max_model_len, self._platform, self._seed, url),
            env=server_environment(os.environ, key, self._platform),
            health_url=f"{url}/health",
            log_path=self._log_path,
            ready_seconds=self._cfg.ready_seconds,
        )
        server.start()
        self._server = server
        self._client = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(self._cfg.request_seconds, connect=CONNECT_SECONDS),
            limits=httpx.Limits(keepalive_expiry=KEEP_ALIVE_SECONDS),
            trust_env=False,  # no proxy stands between us and the loopback interface
        )
        self._pool = ThreadPoolExecutor(self._cfg.concurrency, thread_name_prefix="rollout")

    def wait_ready(self) -> None:
        """Return when the server takes requests and weights. Raises RolloutError."""
        self._started().wait_ready()
        self._call("POST", "/init_weight_transfer_engine", {"init_info": {}})

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> list[Rollout]:
        """See `RolloutEngine.generate`: one request per prompt, `rollout.server.concurrency` of them at once.

        A failed request fails the whole call at once; none is repeated. Raises RolloutError, SyncError after a failed update.
        """
        self._require_trust()
        assert self._pool is not None
        groups = [self._pool.submit(self._sample, prompt, sampling, seed) for prompt in prompts]
        try:
            done, _ = wait(groups, return_when=FIRST_EXCEPTION)
            _raise_first(done)
        finally:
            for group in groups:
                group.cancel()
        return [rollout for group in groups for rollout in group.result()]

    def update_weights(self, files: Sequence[Path], version: int) -> None:
        """See `RolloutEngine.update_weights`. Raises SyncError; the engine is unusable from then on."""
        self._require_trust()
        # Holds until the last line: vLLM stays healthy and keeps its old version after an update that failed half-way.
        self._broken = f"the update to version {version} failed"
        try:
            self._call("POST", "/start_weight_update")
            self._call(
                "POST",
                "/update_weights",
                {"update_info": {"paths": [str(file.absolute()) for file in files]}},
            )
            self._call("POST", "/finish_weight_update", {"weight_version": str(version)})
            cleared = self._call("POST", "/reset_prefix_cache")
            served = self._call("GET", "/weight_info")
        except RolloutError as e:
            raise SyncError(f"weights of version {version}: {e}") from None
        if cleared != {"success": True}:
            raise SyncError(
                f"weights of version {version}: vLLM could not drop the prefix cache of the old weights"
            )
        if served != {"weight_version": str(version)}:
            raise SyncError(f"sent weights of version {version}, but vLLM reports {served}")
        self._version = version
        self._broken = ""

    def close(self) -> None:
        """End the server and its processes, bounded in time. May be called again, and before `start`."""
        if self._server is not None:
            self._server.stop()
        if self._pool is not None:  # requests under way ended with the server
            self._pool.shutdown(cancel_futures=True)
        if self._client is not None:
            self._client.close()
        self._server = self._client = self._pool = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _started(self) -> ServerProcess:
        if self._server is None:
            raise RolloutError("the inference server is not running; call start() and wait_ready() first")
        return self._server

    def _require_trust(self) -> None:
        self._started()
        if self._broken:
            raise SyncError(
                f"{self._broken}, and vLLM can no longer be used; close the engine and start a new one"
            )

    def _sample(self, prompt: Prompt, sampling: SamplingParams, seed: int) -> list[Rollout]:
        request = completion_request(prompt, sampling, seed)
        answer = self._call("POST", "/v1/completions", request)
        return parse_completion(answer, prompt, sampling, self._version)

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON answer to one request. Never repeated: it may have had its effect. Raises RolloutError."""
        server = self._started()
        assert self._client is not None
        try:
            response = self._client.request(method, path, json=body)
            if response.status_code == httpx.codes.OK:
                return response.json()
            reason = f"answered {path} with {response.status_code}: {_message(response)}"
            if response.is_client_error:
                raise RolloutError(f"the inference server {reason}")
        except httpx.TimeoutException:
            reason = (
                f"did not answer {path} within {self._cfg.request_seconds:g} s; raise rollout.server.request_seconds "
                "if it was busy"
            )
        except httpx.TransportError as e:
            reason = f"broke off {path} ({str(e) or type(e).__name__})"
        except json.JSONDecodeError:
            reason = f"answered {path} with something other than JSON"
        server.ends_within(DEATH_SECONDS)
        raise server.failure(reason)


def server_command(
    cfg: ServerConfig,
    model_path: str,
    max_model_len: int,
    platform: Literal["cpu", "cuda"],
    seed: int,
    url: str,
) -> list[str]:
    """argv of the server. The `vllm` command is not used: that of the CPU wheel does not find its own package metadata."""
    port = url.rpartition(":")[2]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--host", LOOPBACK, "--port", port, "--middleware", MIDDLEWARE]
    command += ["--model", model_path, "--served-model-name", SERVED_NAME]
    command += ["--dtype", cfg.dtype, "--max-model-len", str(max_model_len), "--seed", str(seed)]
    # The actor recomputes log-probs after temperature; the model's own sampling defaults must not interfere.
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    command += ["--weight-transfer-config", json.dumps({"backend": BACKEND})]
    command += ["--disable-uvicorn-access-log", "--disable-log-stats"]
    if cfg.kv_cache_gib is not None:
        command += ["--kv-cache-memory-bytes", str(int(cfg.kv_cache_gib * 2**30))]
    if platform == "cpu":
        # One process less to start and to talk to, and no spinning on shared memory beside the trainer's ranks.
        command += ["--enforce-eager", "--distributed-executor-backend", "uni"]
    return [*command, *cfg.extra_args]


def server_environment(
    inherited: Mapping[str, str], key: str, platform: Literal["cpu", "cuda"]
) -> dict[str, str]:
    """The server's environment: ours without torchrun's part, with the API key (argv can be read by everyone)."""
    env = {
        name: value
        for name, value in inherited.items()
        if name not in _TORCHRUN and not name.startswith("TORCHELASTIC_")
    }
    env[API_KEY_VARIABLE] = key
    env["VLLM_SERVER_DEV_MODE"] = "1"  # the weight routes answer 404 otherwise
    env |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if platform == "cpu":
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
            "0"  # allows `uni`; the engine is a process of its own all the same
        )
        # One thread is the fastest for small models, by far so while the trainer's ranks compute.
        env |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        # Eager anyway; else one helper of the sampler is compiled at the first request (18 s and a C++ compiler).
        env["TORCH_COMPILE_DISABLE"] = "1"
    return env


def prompt_seed(seed: int, prompt_id: int, samples: int) -> int:
    """The seed of a prompt's request: a stable hash of (seed, prompt id), a multiple of `samples`.

    vLLM gives sample k the seed + k, so that no two prompts share a stream unless their hashes are equal. One request for
    several prompts would give all of them the same seed. On CPU only the low 32 bits of a seed count (torch's Mersenne
    twister), so those must differ from prompt to prompt: room for k in the low bits of a shifted hash would waste them.
    """
    digest = hashlib.blake2b(f"{seed}/{prompt_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % (LARGEST_SEED // samples) * samples


def completion_request(prompt: Prompt, sampling: SamplingParams, seed: int) -> dict[str, Any]:
    """Body of `/v1/completions`; whatever would make the sampled distribution differ from the actor's is switched off."""
    return {
        "model": SERVED_NAME,
        "prompt": list(prompt.token_ids),
        "n": sampling.samples,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": prompt_seed(seed, prompt.id, sampling.samples),
        "logprobs": 0,  # of the sampled token alone
        "return_token_ids": True,
    }


def parse_completion(answer: Any, prompt: Prompt, sampling: SamplingParams, version: int) -> list[Rollout]:
    """The rollouts in an answer of `/v1/completions`, by sample index. Raises RolloutError where it is not what was asked for."""
    try:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if [choice["index"] for choice in choices] != list(range(sampling.samples)):
            raise ValueError(f"{len(choices)} choices instead of {sampling.samples}")
        return [_rollout(choice, prompt, sampling, version) for choice in choices]
    except (KeyError, TypeError, ValueError) as e:
        reason = f"{type(e).__name__}: {e}" if isinstance(e, KeyError) else str(e)
        raise RolloutError(
            f"prompt {prompt.id}: vLLM's answer is not what was asked for ({reason}); is this vLLM 0.32?"
        ) from None


def _rollout(choice: dict[str, Any], prompt: Prompt, sampling: SamplingParams, version: int) -> Rollout:
    ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    if choice["prompt_token_ids"] != list(prompt.token_ids):
        raise ValueError("it changed the prompt's tokens")
    if not 1 <= len(ids) <= sampling.max_tokens:
        raise ValueError(f"{len(ids)} response tokens, max_tokens={sampling.max_tokens}")
    if len(logprobs) != len(ids):
        raise ValueError(f"{len(ids)} tokens but {len(logprobs)} log-probs")
    if not all(math.isfinite(logprob) and logprob <= 1e-6 for logprob in logprobs):
        raise ValueError("a log-prob is positive or not finite")
    if choice["finish_reason"] not in ("stop", "length"):
        raise ValueError(f"finish_reason={choice['finish_reason']!r}")
    context = len(prompt.token_ids)
    return Rollout(
        prompt_id=prompt.id,
        token_ids_L=torch.tensor([*prompt.token_ids, *ids], dtype=torch.int64),
        response_mask_L=torch.arange(context + len(ids)) >= context,
        rollout_logprobs_L=torch.tensor([0.0] * context + logprobs, dtype=torch.float32),
        policy_version=version,
        stop_reason=choice["finish_reason"],
        answer=prompt.answer,
    )


def _raise_first(done: set[Future[list[Rollout]]]) -> None:
    for group in done:
        if error := group.exception():
            raise error


def _message(response: httpx.Response) -> str:
    """What an error answer of vLLM says, on one line, at most 500 characters."""
    try:
        text = str(response.json()["error"]["message"])
    except (json.JSONDecodeError, KeyError, TypeError):
        text = response.text
    return " ".join(text.split())[:500]
