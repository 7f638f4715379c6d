"""Read SGLang's JSON answers to `/generate`. Facts about SGLang are of 0.5.23."""

import base64
import itertools
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tepo_megatron.inference.partial import GenerationRequest
from tepo_megatron.inference.samples import answer_values, check_label, checked_rollout, parsed
from tepo_megatron.types import Rollout
from tepo_megatron.utils.exchange import HttpAnswer


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
    """Return the rollouts in a JSON answer of `/generate`, by sample index.

    Args:
        answer: The answer.
        ask: The request.
        version: Weight version that the server had to serve.
        engine: Name of the engine, for messages.

    Raises:
        RolloutError: The answer is not what was asked for. StaleWeights if other weights were served.
    """
    prompt, sampling = ask.prompt, ask.sampling

    def experts(meta: _Meta) -> NDArray[Any] | None:
        if sampling.routing is None or meta.routed_experts is None:
            return None
        return np.frombuffer(base64.b64decode(meta.routed_experts, validate=True), "<i4")

    def rollout(sample: _Sample) -> Rollout:
        meta, ids = sample.meta_info, sample.output_ids
        given = meta.output_token_logprobs if ids else []
        if [entry.token_id for entry in given] != ids:
            raise ValueError("its log-probs are of other tokens than its response")
        if ids and meta.prompt_tokens != len(prompt.token_ids):
            raise ValueError("it changed the prompt's tokens")
        logprobs, masks = [entry.logprob for entry in given], None
        if sampling.returns_masks and (rows := meta.output_token_sampling_mask) is not None and ids:
            logprobs, masks = meta.output_token_sampling_logprobs, (list(itertools.chain(*rows)), [len(row) for row in rows])
        return checked_rollout(prompt, ids, logprobs, meta.finish_reason.type, sampling, version, experts(meta), masks)

    def rollouts(answer: HttpAnswer) -> list[Rollout]:
        samples = _DECODER.decode(answer.json_body(answer_values(prompt, sampling)))
        if len(samples) != sampling.samples:
            raise ValueError(f"{len(samples)} samples instead of {sampling.samples}")
        made = [rollout(sample) for sample in samples]
        check_label({sample.meta_info.weight_version for sample in samples}, version, engine)
        return made

    return parsed(answer, prompt, engine, rollouts)
