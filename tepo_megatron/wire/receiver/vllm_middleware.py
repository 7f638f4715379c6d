"""Middlewares that run inside the vLLM server through its `--middleware` option: the key for every route, and binary answers.

vLLM 0.32 requires its API key only under /v1 and a few other prefixes. Anyone who reaches the port could still pause the engine
or replace its weights, and a loopback port can be reached by all users of the machine.

`/v1/completions` is answered in binary. vLLM builds its JSON answer from objects of one token each, 4 CPU seconds per million
tokens. Here the ids and log-probs go from the engine's lists into arrays, and tokens are not turned into text. Facts are of
vLLM 0.32.
"""

import functools
import hmac
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tepo_megatron.wire.receiver.binary_answer import (
    App,
    BinaryAnswers,
    Message,
    Receive,
    Sample,
    Send,
    current,
    encode,
    ids_crc,
)

API_KEY_VARIABLE = "VLLM_API_KEY"
OPEN_PATHS = frozenset({"/health"})


class RequireKey:
    """Answer 401 to every HTTP request without `Authorization: Bearer $VLLM_API_KEY`, except OPEN_PATHS. Refuse websockets."""

    def __init__(self, app: App) -> None:
        self._app = app
        if not (key := os.environ.get(API_KEY_VARIABLE)):
            raise RuntimeError(f"{API_KEY_VARIABLE} is not set: without a key anyone could replace the weights")
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "http" and not self._admits(scope):
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})
        else:
            await self._app(scope, receive, send)

    def _admits(self, scope: Message) -> bool:
        if scope["path"] in OPEN_PATHS:
            return True
        return hmac.compare_digest(dict(scope["headers"]).get(b"authorization", b""), self._expected)


LEAST_LOGPROB = -9999.0  # vLLM's JSON has this instead of lower log-probs


class BinaryCompletions(BinaryAnswers):
    """`BinaryAnswers` for `/v1/completions` of one prompt, with log-probs and not streamed. Others are answered in JSON."""

    def __init__(self, app: App) -> None:
        super().__init__(app)
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion as Serving
        from vllm.v1.engine.output_processor import RequestState

        CompletionRequest.to_sampling_params = _without_text(CompletionRequest.to_sampling_params)
        Serving.request_output_to_completion_response = _in_binary(Serving.request_output_to_completion_response)
        RequestState.from_new_request = _timed(RequestState.from_new_request)


def _binary(request: Any) -> bool:
    plain = not (request.stream or request.echo or request.stop or request.use_beam_search)
    return current.get() is not None and plain and request.logprobs is not None


def _without_text(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def to_sampling_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        params = upstream(self, *args, **kwargs)
        if _binary(self):
            params.detokenize, params.flat_logprobs = False, True
        return params

    return to_sampling_params


def _timed(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """Note when the first token of a request is there, if its client asks. vLLM itself does so only with its statistics."""

    def from_new_request(*args: Any, **kwargs: Any) -> Any:
        state, exchange = upstream(*args, **kwargs), current.get()
        if exchange is not None and exchange.timed:

            def first_output(*arguments: Any, **how: Any) -> Any:
                exchange.first = time.monotonic() if exchange.first is None else exchange.first
                del state.make_request_output  # the further tokens are the class's again
                return state.make_request_output(*arguments, **how)

            state.make_request_output = first_output
        return state

    return from_new_request


def _in_binary(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def response(self: Any, results: list[Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        exchange = current.get()
        outputs = results[0].outputs if len(results) == 1 else []
        # an error and odd log-probs are left to vLLM
        if exchange is not None and _binary(request) and all(map(is_plain, outputs)):
            exchange.body = encode([to_sample(output, results[0].prompt_token_ids, exchange.experts) for output in outputs])
            results[0].outputs = []  # the JSON then has no choices
        return upstream(self, results, request, *args, **kwargs)

    return response


def _first(flat: Any, values: list[Any]) -> list[Any]:
    return values if len(values) == len(flat) else [values[start] for start in flat.start_indices]


def is_plain(output: Any) -> bool:
    """Return whether an output is whole, with the log-probs of its own tokens."""
    ids, flat = output.token_ids, output.logprobs
    return output.finish_reason != "error" and (len(ids) == 0 or list(ids) == _first(flat, flat.token_ids))


def to_sample(output: Any, prompt: list[int], experts: bool) -> Sample:
    """Return a finished output with its flat log-probs."""
    ids, flat = np.asarray(output.token_ids, np.int32), output.logprobs
    logprobs = np.asarray(_first(flat, flat.logprobs) if ids.size else [], np.float32)
    masked = ids.size and len(flat.logprobs) > len(flat)
    return Sample(
        finish_reason=str(output.finish_reason),
        label=weight_labels(output) if ids.size else "",
        prompt_tokens=len(prompt),
        prompt_crc=ids_crc(prompt),
        ids_T=ids,
        logprobs_T=np.maximum(logprobs, np.float32(LEAST_LOGPROB)),
        experts=output.routed_experts if experts else None,
        masks=sampling_masks(flat) if masked else None,
    )


def weight_labels(output: Any) -> str:
    """Return the labels of all weights that sampled an output."""
    return "+".join(span.version for span in output.weight_versions or ())


def sampling_masks(flat: Any) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the sampling masks in vLLM's flat log-probs after truncation, as `Sample.masks`: the ids above minus infinity.

    The sampled token is the first of each position, and may come again among the most likely ones.
    """
    ids, kept = np.asarray(flat.token_ids, np.int32), np.asarray(flat.logprobs) > LEAST_LOGPROB
    starts = np.asarray(flat.start_indices)
    position = np.repeat(np.arange(starts.size), np.diff(np.append(starts, ids.size)))
    kept &= ids != ids[starts][position]
    kept[starts] = True
    return ids[kept], np.bincount(position[kept], minlength=starts.size).astype(np.int32)
