"""Serve a model of transformers: `python -m ...torch_server ARGUMENTS`. The server of `rollout.engine: torch`.

It needs PyTorch, transformers, safetensors, msgspec and aiohttp, and imports nothing of the trainer. One thread computes:
between two tokens of the batch it takes weights, checksums or a command to sleep. The event loop answers meanwhile.
"""

import argparse
import asyncio
import hmac
import os
import re
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tepo_megatron.dist.own_peers import guard_process_groups
from tepo_megatron.wire.broadcast_group import GroupSpec, UnchangedTensors
from tepo_megatron.wire.receiver import lifeline
from tepo_megatron.wire.receiver.binary_answer import CONTENT_TYPE, encode
from tepo_megatron.wire.receiver.receiver import NEVER_SENT, OUTPUT_LAYER, RankReceiver, tensor_shapes
from tepo_megatron.wire.receiver.torch_sampler import Job, RunningBatch, SampleRequest

KEY_VARIABLE = "TEPO_TORCH_KEY"
FIRST_LABEL, NO_LABEL = "default", "none"  # of the weights of the model directory; of weights that are not complete
MOST_BODY = 2**28  # bytes of a request
# names of Mixtral's tensors in checkpoints, in terms of transformers' other models
_MIXTRAL = (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"), (".mlp.", ".block_sparse_moe."))


class ModelServer:
    """The model, its batch, and the weights that it gets. All methods are called in one thread."""

    def __init__(self, path: str, dtype: str, device: str, cache_tokens: int) -> None:
        self._path, self._device = path, torch.device(device)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation="sdpa")
        self._model = model.to(self._device).eval().requires_grad_(False)
        self.sampler, self.label = RunningBatch(self._model, cache_tokens), FIRST_LABEL
        self._receiver = RankReceiver()
        self._shapes = {name: parameter.shape for name, parameter in self._model.named_parameters()}
        expected = {name for file in Path(path).glob("*.safetensors") for name in tensor_shapes(file)}
        missing = {name for name in expected - places(self._model).keys() if not NEVER_SENT.match(name)}
        if missing:
            raise SystemExit(f"{path}: rollout.engine=torch knows no place of tensor {min(missing)}; use vllm or sglang")

    def begin_update(self, broken_off: bool) -> None:
        """Begin an update, and forget what an earlier one gave."""
        if broken_off:
            self._receiver.leave()
        self._receiver.begin(self._path, self._model.config.tie_word_embeddings, self._device)
        self._places = places(self._model)

    def join_groups(self, **spec: Any) -> None:
        """Join the groups of a `GroupSpec`."""
        self._receiver.join_groups(GroupSpec(**spec), self._device, local_rank=0)

    def keep_unchanged(self, **unchanged: Any) -> None:
        """Note what an `UnchangedTensors` names."""
        self._receiver.keep_unchanged(UnchangedTensors(**unchanged))

    def load(self, sources: list[str]) -> None:
        """Copy the tensors of a round into the model. Raises as `RankReceiver.take`."""
        for name, tensor in self._receiver.take(sources) or ():
            self.label = NO_LABEL
            self._places[name].copy_(tensor)

    def finish_update(self, version: int) -> str:
        """Serve the loaded weights, and return their label. Raises ValueError if some are missing."""
        self._receiver.finish()
        self.label = str(version)
        return self.label

    def checksums(self) -> dict[str, str]:
        """Return the CRC-32 of each tensor in its served precision, by Hugging Face name."""
        return {
            f"rank0:{name}": f"{zlib.crc32(place.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy()):08x}"
            for name, place in places(self._model).items()
        }

    def sleep(self) -> None:
        """Release the memory of the weights."""
        self.label = NO_LABEL
        for parameter in self._model.parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=self._device)
        torch.cuda.empty_cache()  # does nothing on a CPU

    def wake(self, part: str) -> None:
        """Allocate the memory of the weights again, if `part` is "weights"."""
        if part == "weights":
            for name, parameter in self._model.named_parameters():
                parameter.data = torch.empty(self._shapes[name], dtype=parameter.dtype, device=self._device)


def places(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return name in the checkpoint -> memory of that tensor in the model. transformers joins the experts of a layer."""
    by_name: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".")
        if not module.endswith(".experts"):
            by_name[name] = parameter
            continue
        for i, expert in enumerate(parameter):
            parts = expert.chunk(2) if kind == "gate_up_proj" else (expert,)
            for part, part_name in zip(parts, re.findall(r"gate(?=_up)|up|down", kind), strict=True):
                by_name[f"{module}.{i}.{part_name}_proj.weight"] = part
    if model.config.tie_word_embeddings:
        by_name[OUTPUT_LAYER] = model.get_input_embeddings().weight
    if model.config.model_type == "mixtral":
        for ours, theirs in _MIXTRAL:
            by_name = {name.replace(ours, theirs): place for name, place in by_name.items()}
    return by_name


def guard(key: str) -> Middleware:
    """Return the middleware that answers /health, and 401 to all other requests without the key, and 400 to wrong ones."""
    expected = f"Bearer {key}".encode()

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path == "/health":
            return web.json_response({})
        if not hmac.compare_digest(request.headers.get("Authorization", "").encode(), expected):
            return web.json_response({"message": "Unauthorized"}, status=401)
        try:
            return await handler(request)
        except (ValueError, TypeError, msgspec.DecodeError) as e:
            return web.json_response({"message": str(e)}, status=400)

    return guarded


class App:
    """The HTTP side. Its coroutines run in the event loop, what computes in the thread."""

    def __init__(self, model: ModelServer, max_model_len: int, key: str) -> None:
        self._model, self._max_model_len = model, max_model_len
        self._thread = ThreadPoolExecutor(1)
        self._work = asyncio.Event()
        self._answers: dict[Job, asyncio.Future[None]] = {}
        self.app = web.Application(client_max_size=MOST_BODY, middlewares=[guard(key)])
        routes = {"generate": self._generate, "abort": self._abort}
        controls = (model.begin_update, model.join_groups, model.keep_unchanged, model.load, model.finish_update)
        for control in (*controls, model.checksums, model.sleep, model.wake):
            routes[control.__name__] = partial(self._control, control)
        self.app.add_routes([web.post(f"/{name}", handler) for name, handler in routes.items()])
        self.app.add_routes([web.get("/info", self._info)])

    async def sample(self) -> None:
        """Sample whenever there is something to sample. Ends with the first error, and the server with it."""
        while True:
            await self._work.wait()
            self._answer(await self._computed(self._model.sampler.step))
            if not self._model.sampler.busy:
                self._work.clear()

    async def _computed(self, compute: Callable[..., Any], **arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(compute, **arguments))

    def _answer(self, jobs: list[Job]) -> None:
        for job in jobs:
            if (answer := self._answers.get(job)) is not None and not answer.done():
                answer.set_result(None)

    async def _info(self, request: web.Request) -> web.Response:
        about = {"version": torch.__version__, "weight_version": self._model.label, "max_model_len": self._max_model_len}
        return web.json_response(about)

    async def _control(self, control: Callable[..., Any], request: web.Request) -> web.Response:
        return web.json_response(await self._computed(control, **await request.json()))

    async def _generate(self, request: web.Request) -> web.Response:
        wanted = msgspec.json.decode(await request.read(), type=SampleRequest)
        if not wanted.prompt or len(wanted.prompt) + wanted.max_tokens > self._max_model_len:
            raise ValueError(f"{len(wanted.prompt)} + {wanted.max_tokens} tokens, max_model_len={self._max_model_len}")
        job = Job(wanted, self._model.label)
        answer = self._answers[job] = asyncio.get_running_loop().create_future()
        self._model.sampler.waiting.append(job)
        self._work.set()
        try:
            await answer
        finally:
            job.cancelled = True  # no effect on a job that is done
            del self._answers[job]
        if job.label != self._model.label:
            job.label += f"+{self._model.label}"
        return web.Response(body=encode(job.samples()), content_type=CONTENT_TYPE)

    async def _abort(self, request: web.Request) -> web.Response:
        self._answer(await self._computed(self._model.sampler.abort))
        return web.json_response({})


async def _serve(app: App, host: str, port: int) -> None:
    runner = web.AppRunner(app.app, access_log=None, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, host, port, reuse_address=True).start()
    try:
        await app.sample()
    finally:
        await runner.cleanup()  # else complaints of open connections follow the error in the log


def main() -> None:
    """Read the arguments and the key, and serve."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("host", "model", "dtype", "device"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("port", "max-model-len", "cache-tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    if not (key := os.environ.get(KEY_VARIABLE)):
        raise SystemExit(f"{KEY_VARIABLE} is not set: without a key anyone could replace the weights")
    lifeline.hold()
    guard_process_groups()
    args = parser.parse_args()
    model = ModelServer(args.model, args.dtype, args.device, args.cache_tokens)
    asyncio.run(_serve(App(model, args.max_model_len, key), args.host, args.port))


if __name__ == "__main__":
    main()
