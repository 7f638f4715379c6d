"""vLLM's OpenAI-compatible server as a RolloutEngine: token ids in, token ids and processed log-probs out, over HTTP.

Facts about vLLM are of 0.32. Nothing here imports it: the server is a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from tepo_megatron.config import RolloutConfig
from tepo_megatron.errors import RolloutError, SyncError
from tepo_megatron.rollout.engine import INITIAL_VERSION
from tepo_megatron.rollout.server import LOOPBACK, ServerProcess, choose_port
from tepo_megatron.rollout.vllm_completions import completion_request, parse_completion
from tepo_megatron.rollout.vllm_launch import Platform, Precision, server_command, server_environment
from tepo_megatron.types import Prompt, Rollout, SamplingParams

CONNECT_SECONDS = 10.0
# A dead engine closes its connections first and ends a moment later; waiting for that makes the error name the cause.
DEATH_SECONDS = 1.0
HEALTH_SECONDS = 1.0

Result = TypeVar("Result")


class VllmEngine:
    """A vLLM server on the loopback interface, as `engine.RolloutEngine` describes it.

    model_path: Hugging Face directory that the server loads first; max_model_len: prompt and response tokens of a sequence
    at most; precision: of the served weights; log_path: the server's log; seed: of the server (each request brings its own).
    """

    def __init__(
        self,
        cfg: RolloutConfig,
        *,
        model_path: str | Path,
        max_model_len: int,
        platform: Platform,
        precision: Precision,
        log_path: Path,
        seed: int,
    ) -> None:
        self._cfg = cfg.server
        self._model_path = str(model_path)
        self._max_model_len = max_model_len
        self._platform: Platform = platform
        self._precision: Precision = precision
        self._log_path = log_path
        self._seed = seed
        self._version = INITIAL_VERSION
        self._broken = ""  # why the served weights can no longer be trusted
        self._http: dict[str, Any] = {}
        self._server: ServerProcess | None = None

    @property
    def version(self) -> int:
        """The version of the weights last accepted; INITIAL_VERSION before."""
        return self._version

    def start(self) -> None:
        """Start the server; returns at once. Raises RolloutError (busy port, unwritable log)."""
        if self._server is not None:
            raise RolloutError("the inference server was already started; close the engine first")
        port = choose_port(self._cfg.port)
        url = f"http://{LOOPBACK}:{port}"
        key = secrets.token_urlsafe(32)
        command = server_command(
            self._cfg,
            model_path=self._model_path,
            max_model_len=self._max_model_len,
            platform=self._platform,
            precision=self._precision,
            seed=self._seed,
            port=port,
        )
        server = ServerProcess(
            command,
            env=server_environment(os.environ, key, self._platform),
            health_url=f"{url}/health",
            log_path=self._log_path,
            ready_seconds=self._cfg.ready_seconds,
        )
        server.start()
        self._server, self._version, self._broken = server, INITIAL_VERSION, ""
        self._http = {
            "base_url": url,
            "headers": {"Authorization": f"Bearer {key}"},
            "timeout": httpx.Timeout(self._cfg.request_seconds, connect=CONNECT_SECONDS, pool=None),
            "trust_env": False,  # no proxy stands between us and the loopback interface
            "verify": False,  # plain HTTP: no certificates to load
        }

    def wait_ready(self) -> None:
        """Return when the server takes requests and weights. Raises RolloutError."""
        self._started().wait_ready()
        self._call("POST", "/init_weight_transfer_engine", {"init_info": {}})

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> list[Rollout]:
        """See `RolloutEngine.generate`: one request per prompt, `rollout.server.concurrency` of them at once.

        A failed request fails the whole call at once; none is repeated. Raises RolloutError, SyncError after a failed update.
        """
        self._require_trust()
        slots = asyncio.Semaphore(self._cfg.concurrency)

        async def sample(client: httpx.AsyncClient, prompt: Prompt) -> list[Rollout]:
            async with slots:
                answer = await _send(client, "POST", "/v1/completions", completion_request(prompt, sampling, seed))
            return parse_completion(answer, prompt, sampling, self._version)

        async def sample_all(client: httpx.AsyncClient, tasks: asyncio.TaskGroup) -> list[list[Rollout]]:
            groups = [tasks.create_task(sample(client, prompt)) for prompt in prompts]
            return [await group for group in groups]

        return [rollout for group in self._run(sample_all) for rollout in group]

    def update_weights(self, files: Sequence[Path], version: int) -> None:
        """See `RolloutEngine.update_weights`. Raises SyncError; the engine is unusable from then on."""
        self._require_trust()
        # Holds until the last line: vLLM stays healthy and keeps its old version after an update that failed half-way.
        self._broken = f"the update to version {version} failed"
        update = {"paths": [str(file.absolute()) for file in files]}
        try:
            self._call("POST", "/start_weight_update")
            self._call("POST", "/update_weights", {"update_info": update})
            self._call("POST", "/finish_weight_update", {"weight_version": str(version)})
            cleared = self._call("POST", "/reset_prefix_cache")
            served = self._call("GET", "/weight_info")
        except RolloutError as e:
            raise SyncError(f"weights of version {version}: {e}") from None
        if cleared != {"success": True}:
            raise SyncError(f"weights of version {version}: vLLM could not drop the prefix cache of the old weights")
        if served != {"weight_version": str(version)}:
            raise SyncError(f"sent weights of version {version}, but vLLM reports {served}")
        self._version = version
        self._broken = ""

    def close(self) -> None:
        """End the server and its processes, bounded in time. May be called again, and before `start`."""
        if self._server is not None:
            self._server.stop()
        self._server = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _started(self) -> ServerProcess:
        if self._server is None:
            raise RolloutError("the inference server is not running; call start() and wait_ready() first")
        return self._server

    def _require_trust(self) -> None:
        self._started()
        if self._broken:
            raise SyncError(f"{self._broken}, and vLLM can no longer be used; close the engine and start a new one")

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON answer to one request. Never repeated: it may have had its effect. Raises RolloutError."""
        return self._run(lambda client, tasks: _send(client, method, path, body))

    def _run(self, work: Callable[[httpx.AsyncClient, asyncio.TaskGroup], Awaitable[Result]]) -> Result:
        """Do `work`; on its first failed request, RolloutError says what the server did and whether it died of it."""
        server = self._started()
        try:
            return asyncio.run(self._watched(work))
        except httpx.HTTPStatusError as e:
            reason = f"answered {e.request.url.path} with {e.response.status_code}: {_message(e.response)}"
            if e.response.is_client_error:
                raise RolloutError(f"the inference server {reason}") from None
        except httpx.TimeoutException as e:
            reason = (
                f"did not answer {e.request.url.path} within {self._cfg.request_seconds:g} s; raise "
                "rollout.server.request_seconds if it was busy"
            )
        except httpx.RequestError as e:
            reason = f"broke off {e.request.url.path} ({str(e) or type(e).__name__})"
        server.ends_within(DEATH_SECONDS)
        raise server.failure(reason)

    async def _watched(self, work: Callable[[httpx.AsyncClient, asyncio.TaskGroup], Awaitable[Result]]) -> Result:
        """`work` with a client and a group for its tasks, all of which a failure or Ctrl-C ends: no request stays behind.

        A vLLM that got SIGTERM waits for its open requests without ever answering them, so its health is watched beside.
        The connections are new each time: it closes those idle for 5 s, and a training step is longer.
        """
        limits = httpx.Limits(max_keepalive_connections=self._cfg.concurrency)
        try:
            async with httpx.AsyncClient(**self._http, limits=limits) as client, asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(_watch_health(client))
                result = await work(client, tasks)
                watch.cancel()
                return result
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None


async def _send(client: httpx.AsyncClient, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    response = (await client.request(method, path, json=body)).raise_for_status()
    try:
        return response.json()
    except json.JSONDecodeError:
        raise httpx.DecodingError("the answer is not JSON", request=response.request) from None


async def _watch_health(client: httpx.AsyncClient) -> None:
    """Raises httpx.HTTPError once the server is ill or takes no new connections; a slow answer is no illness."""
    while True:
        await asyncio.sleep(HEALTH_SECONDS)
        with contextlib.suppress(httpx.TimeoutException):
            (await client.get("/health")).raise_for_status()


def _message(response: httpx.Response) -> str:
    """What an error answer of vLLM says, on one line, at most 500 characters."""
    try:
        text = str(response.json()["error"]["message"])
    except (json.JSONDecodeError, KeyError, TypeError):
        text = response.text
    return " ".join(text.split())[:500]
