"""Answer like an SGLang server in a thread: a real model behind real HTTP, whose weights our own loader replaces.

`SglangThread` is the `Server` of an endpoint. So a run in one process samples and updates weights as it does with an SGLang
server, through the real client, adapter and loader.
"""

from __future__ import annotations

import base64
import json
import pickle
import sys
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from tepo_megatron.errors import RolloutError
from tepo_megatron.inference.engine import INITIAL_VERSION
from tepo_megatron.inference.engine_api import INITIAL_LABEL
from tepo_megatron.inference.servers.server import ServerAddress
from tepo_megatron.types import Prompt
from tepo_megatron.weight_sync.receiver import sglang_loader
from tests.e2e.scripted_service import ScriptedEngine


class ScriptedModel(ScriptedEngine):
    """The model behind the server, with the methods that the loader calls on SGLang's model."""

    @property
    def config(self) -> Any:
        return self._model.config

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return self._model.parameters()

    def load_weights(self, arrived: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = self._model.state_dict()
        for name, tensor in arrived:
            own[name].copy_(tensor)

    def answer(self, ids: list[int], seed: int, label: str) -> dict[str, Any]:
        """Return one sample, in the form of SGLang's answer; it is right if the seed is even."""
        self.version = INITIAL_VERSION if label == INITIAL_LABEL else int(label)
        made = self._sample(Prompt(0, tuple(ids), "7"), right=seed % 2 == 0)
        logprobs = made.rollout_logprobs_L[made.response_mask_L].tolist()
        meta = {
            "output_token_logprobs": [
                [logprob, token, None] for logprob, token in zip(logprobs, made.response_ids, strict=True)
            ],
            "prompt_tokens": len(ids),
            "finish_reason": {"type": "stop"},
            "weight_version": label,
        }
        return {"output_ids": made.response_ids, "meta_info": meta}


class SglangThread:
    name, restart_note, running, resident_bytes = "the scripted SGLang", "is not started again", True, 0

    def __init__(self, model: ScriptedModel) -> None:
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(model))

    def launch(self) -> None:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    async def wait_ready(self) -> ServerAddress:
        return ServerAddress(f"http://127.0.0.1:{self._http.server_port}", "key")

    async def failure(self, what: str) -> RolloutError:
        return RolloutError(f"{self.name} {what}")

    async def end(self) -> None: ...

    def stop(self) -> None:
        self._http.shutdown()

    def forget(self) -> None:
        self._http.server_close()


def _handler(model: ScriptedModel) -> type[BaseHTTPRequestHandler]:
    label, lock = [INITIAL_LABEL], threading.Lock()

    def sample(body: dict[str, Any]) -> list[dict[str, Any]]:
        sys.setprofile(None)  # the path that `flows.py` records begins with the answer
        asked = zip(body["input_ids"], body["sampling_params"], strict=True)
        with lock:
            return [model.answer(ids, params["sampling_seed"], label[0]) for ids, params in asked]

    def update(body: dict[str, Any]) -> dict[str, Any]:
        with lock:
            named = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))
            sglang_loader.load_sources(model, named)
            label[0] = body.get("weight_version", label[0])
        return {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            about = {"version": "0.5.23", "tp_size": 1, "weight_version": label[0], "data": [{"max_model_len": 4096}]}
            self.answer(about)

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"null")
            routes = {"/generate": sample, "/update_weights_from_tensor": update}
            self.answer(routes.get(self.path, lambda _: {})(body))

        def answer(self, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None: ...

    return Handler
