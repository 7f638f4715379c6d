"""Let the SGLang server answer `/generate` in binary. Facts are of SGLang 0.5.23."""

import base64
from collections.abc import Callable
from typing import Any

import numpy as np

from tepo_megatron.wire.receiver.binary_answer import BinaryAnswers, Sample, current, encode


def install(http_server: Any) -> None:
    """Add the middleware to SGLang's app, and answer its lists of samples in binary where the client takes that."""
    http_server.orjson_response = _in_binary(http_server.orjson_response)
    http_server.app.add_middleware(BinaryAnswers)


def _in_binary(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def response(content: Any, *args: Any, **kwargs: Any) -> Any:
        exchange = current.get()
        if exchange is not None and isinstance(content, list):
            samples = [to_sample(each, exchange.experts) for each in content]
            if None not in samples:
                exchange.body = encode([sample for sample in samples if sample is not None])
                content = []
        return upstream(content, *args, **kwargs)

    return response


def to_sample(answer: Any, experts: bool) -> Sample | None:
    """Return a sample of SGLang's own answer. None: it lacks log-probs, so that the JSON answer says what it has.

    A sample aborted before its first token may lack all fields but its finish reason.
    """
    meta, ids = answer["meta_info"], answer["output_ids"]
    entries = (meta.get("output_token_logprobs") or []) if ids else []  # (log-prob, token id, text) of each token
    if [entry[1] for entry in entries] != ids or not isinstance(meta["finish_reason"], dict):
        return None
    encoded, rows = meta.get("routed_experts") if experts else None, meta.get("output_token_sampling_mask")
    logprobs, masks = [entry[0] for entry in entries], None
    if rows is not None and ids:
        if [len(rows), len(meta["output_token_sampling_logprobs"])] != [len(ids)] * 2:
            return None
        logprobs = meta["output_token_sampling_logprobs"]
        masks = np.asarray([i for row in rows for i in row], np.int32), np.asarray([len(row) for row in rows], np.int32)
    return Sample(
        finish_reason=meta["finish_reason"]["type"],
        label=str(meta.get("weight_version", "")),
        prompt_tokens=meta.get("prompt_tokens", 0),
        prompt_crc=None,
        ids_T=np.asarray(ids, np.int32),
        logprobs_T=np.asarray(logprobs, np.float32),
        experts=None if encoded is None else np.frombuffer(base64.b64decode(encoded), np.int32),
        masks=masks,
    )
