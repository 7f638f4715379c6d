"""Ask servers for the log-probs of canaries: the requests of vLLM and SGLang, and how their answers are read.

Two requests each, in this order. The first goes through the prefix cache: it asks for tokens after a prefix that an earlier
request of the same canary may have left there. The second computes every token. Both engines give log-probs of the whole
vocabulary at temperature 1, which the tests of both engines compare with the model in fp64.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tepo_megatron.inference.engine_api import Send
from tepo_megatron.types import Canaries, CanaryAnswer

SERVED_NAME = "policy"  # of the model in vLLM
CACHED_TOKENS = 4  # tokens of each canary that vLLM scores after a cached prefix, one request each


class VllmScorer:
    """Implementation of `engine_api.Scorer` for vLLM."""

    async def __call__(self, send: Send, canaries: Canaries) -> CanaryAnswer:
        """Ask a vLLM server for the log-probs of the canaries.

        A request for `prompt_logprobs` does not read the prefix cache, so cached prefixes are continued by one sampled token
        instead, with the log-probs of given ids.
        """
        common = {"model": SERVED_NAME, "max_tokens": 1, "temperature": 1.0}
        ends = list(_ends(canaries))
        ids = sorted({canaries.sequences[k][token] for k, token in ends})
        asked: dict[str, Any] = {"prompt": [list(canaries.sequences[k][:token]) for k, token in ends], "logprobs": 1}
        asked |= {"logprob_token_ids": ids, "return_tokens_as_token_ids": True}
        choices = _choices(await send("POST", "/v1/completions", common | asked), len(ends))
        cached = [
            choice["logprobs"]["top_logprobs"][0][f"token_id:{canaries.sequences[k][token]}"]
            for (k, token), choice in zip(ends, choices, strict=True)
        ]
        asked = {"prompt": [list(ids) for ids in canaries.sequences], "prompt_logprobs": 0}
        choices = _choices(await send("POST", "/v1/completions", common | asked), len(canaries.sequences))
        whole: list[float] = []
        for sequence, choice in zip(canaries.sequences, choices, strict=True):
            rows = choice["prompt_logprobs"][1:]
            whole += [row[str(token)]["logprob"] for token, row in zip(sequence[1:], rows, strict=True)]
        return CanaryAnswer(np.array(whole, np.float64), np.array(cached, np.float64), _targets(canaries, ends))


class SglangScorer:
    """Implementation of `engine_api.Scorer` for SGLang."""

    async def __call__(self, send: Send, canaries: Canaries) -> CanaryAnswer:
        """Ask an SGLang server for the log-probs of the canaries.

        SGLang reads the prefix cache up to `logprob_start_len`. The first log-prob from there on is null.
        """

        async def score(first: list[int]) -> list[float]:
            body = {
                "input_ids": [list(ids) for ids in canaries.sequences],
                "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": [token - 1 for token in first],
            }
            samples = await send("POST", "/generate", body)
            found: list[float] = []
            for ids, token, sample in zip(canaries.sequences, first, samples, strict=True):
                entries = sample["meta_info"]["input_token_logprobs"][1:]
                if [entry[1] for entry in entries] != list(ids[token:]):
                    raise ValueError("its log-probs are of other tokens than the canary's")
                found += [entry[0] for entry in entries]
            return found

        ends = [(k, i) for k, ids in enumerate(canaries.sequences) for i in range(canaries.cached_from[k], len(ids))]
        cached = await score(list(canaries.cached_from))
        whole = await score([1] * len(canaries.sequences))
        return CanaryAnswer(np.array(whole, np.float64), np.array(cached, np.float64), _targets(canaries, ends))


def _ends(canaries: Canaries) -> Iterator[tuple[int, int]]:
    """Yield (sequence, token) of the targets that vLLM scores after a cached prefix, evenly spaced."""
    for k, (ids, first) in enumerate(zip(canaries.sequences, canaries.cached_from, strict=True)):
        count = min(CACHED_TOKENS, len(ids) - first)
        places = itertools.pairwise(np.linspace(first, len(ids), count + 1).astype(int))
        yield from ((k, int(end) - 1) for _, end in places)


def _targets(canaries: Canaries, ends: list[tuple[int, int]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array([canaries.target(k, token) for k, token in ends], np.int64)


def _choices(answer: Mapping[str, Any], count: int) -> list[Mapping[str, Any]]:
    """Return the choices of a completion by index. Raises ValueError unless there are `count`."""
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    if [choice["index"] for choice in choices] != list(range(count)):
        raise ValueError(f"{len(choices)} answers instead of {count}")
    return choices
