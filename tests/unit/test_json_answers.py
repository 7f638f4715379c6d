"""JSON answers of engines that others start: large ones are read, and ones with more values than were asked for are refused."""

import json

import pytest

from tepo_megatron.base.errors import RolloutError
from tepo_megatron.base.exchange import LEAST_VALUES, HttpAnswer
from tepo_megatron.base.types import Prompt, SamplingParams
from tepo_megatron.engines.engine import GenerationRequest
from tepo_megatron.engines.sglang import json_rollouts as sglang_rollouts
from tepo_megatron.engines.vllm import json_rollouts as vllm_rollouts

TOKENS = 100_000  # of each of two samples: more values than any answer may hold, and short ones
PROMPT = Prompt(0, (1, 2, 3), "")
ASK = GenerationRequest(PROMPT, SamplingParams(samples=2, max_tokens=TOKENS, stop_token_ids=(2,)), 0)


def of_vllm(index: int) -> dict[str, object]:
    inner = {
        "text_offset": list(range(TOKENS)), "token_logprobs": [-0.5] * TOKENS, "tokens": ["[,"] * TOKENS,
        "top_logprobs": [{"a": -0.5}] * TOKENS,
    }  # fmt: skip
    return {
        "index": index, "token_ids": [7] * TOKENS, "prompt_token_ids": [1, 2, 3], "finish_reason": "length", "logprobs": inner,
    }  # fmt: skip


def answer_of(value: object) -> HttpAnswer:
    return HttpAnswer(200, "application/json", json.dumps(value, separators=(",", ":")).encode())


def test_a_large_answer_of_vllm_is_read() -> None:
    answer = answer_of({"choices": [of_vllm(0), of_vllm(1)]})
    assert answer.body.count(b",") + answer.body.count(b"[") > LEAST_VALUES > len(answer.body) // 16
    rollouts = vllm_rollouts(answer, ASK, 0, "vLLM")
    assert [rollout.response_length for rollout in rollouts] == [TOKENS, TOKENS]


def test_a_large_answer_of_sglang_is_read() -> None:
    meta = {
        "finish_reason": {"type": "length"}, "prompt_tokens": 3, "weight_version": "0",
        "output_token_logprobs": [[-0.5, 7, None]] * TOKENS, "output_top_logprobs": [[[-0.5, 7, None]]] * TOKENS,
    }  # fmt: skip
    answer = answer_of([{"output_ids": [7] * TOKENS, "meta_info": meta}] * 2)
    assert answer.body.count(b",") + answer.body.count(b"[") > LEAST_VALUES
    rollouts = sglang_rollouts(answer, ASK, 0, "SGLang")
    assert [rollout.response_length for rollout in rollouts] == [TOKENS, TOKENS]


def test_more_values_than_the_request_explains_are_refused_unread() -> None:
    few = GenerationRequest(PROMPT, SamplingParams(samples=2, max_tokens=100), 0)
    with pytest.raises(RolloutError, match=r"JSON of \d+ values in \d+ bytes, which no answer of this kind has"):
        vllm_rollouts(answer_of({"choices": [[]] * (2 * LEAST_VALUES)}), few, 0, "vLLM")
