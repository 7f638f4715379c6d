"""An engine's own outputs become samples of a binary answer. No engine and no server: only the fields that are read."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI

from tepo_megatron.errors import RolloutError
from tepo_megatron.inference.vllm import VllmApi
from tepo_megatron.weight_sync.receiver import sglang_answers, sglang_before_0_5_21, vllm_answers, vllm_before_0_32
from tepo_megatron.weight_sync.receiver.binary_answer import ids_crc


def vllm_output(versions: list[str], chosen: int = 1) -> Any:
    """Return an output of three tokens with `chosen` log-probs at each, that of the sampled token first."""
    ids = [token for sampled in (5, 6, 7) for token in (sampled, 99)[:chosen]]
    logprobs = [value for sampled in (-0.5, -20000.0, -0.25) for value in (sampled, -0.1)[:chosen]]

    class Flat(list[Any]):
        """vLLM's flat log-probs: a sequence of one entry for each position."""

    flat: Any = Flat(range(3))
    flat.token_ids, flat.logprobs, flat.start_indices = ids, logprobs, range(0, 3 * chosen, chosen)
    spans = [SimpleNamespace(version=version) for version in versions]
    return SimpleNamespace(
        token_ids=[5, 6, 7], logprobs=flat, finish_reason="length", weight_versions=spans, routed_experts=np.zeros((4, 1, 2))
    )


@pytest.mark.parametrize("chosen", [1, 2])
def test_a_vllm_output_becomes_a_sample(chosen: int) -> None:
    output = vllm_output(["3"], chosen)
    assert vllm_answers.is_plain(output)
    sample = vllm_answers.to_sample(output, [8, 9], experts=False)
    assert sample.ids_T.tolist() == [5, 6, 7] and sample.logprobs_T.tolist() == [-0.5, vllm_answers.LEAST_LOGPROB, -0.25]
    masks = None if sample.masks is None else [part.tolist() for part in sample.masks]
    assert masks == (None if chosen == 1 else [[5, 99, 6, 99, 7, 99], [2, 2, 2]])
    assert (sample.label, sample.finish_reason, sample.experts) == ("3", "length", None)
    assert (sample.prompt_tokens, sample.prompt_crc) == (2, ids_crc([8, 9]))
    assert vllm_answers.to_sample(output, [8, 9], experts=True).experts is output.routed_experts


def test_a_vllm_output_of_several_versions_names_all_of_them() -> None:
    assert vllm_answers.to_sample(vllm_output(["3", "4"]), [8], experts=False).label == "3+4"
    assert vllm_answers.to_sample(vllm_output([]), [8], experts=False).label == ""


def test_an_output_of_vllm_before_0_32_has_the_labels_of_its_request_and_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine client in the place of vLLM's: the routes of an update call these two methods."""

    class AsyncLLM:
        async def update_weights(self, request: object) -> None: ...

        async def finish_weight_update(self, weight_version: str | None) -> None: ...

    @dataclass
    class CompletionOutput:
        token_ids: list[int]

    for name, found in (("vllm.outputs", CompletionOutput), ("vllm.v1.engine.async_llm", AsyncLLM)):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**{found.__name__: found}))
    vllm_before_0_32.follow()
    output, engine = vllm_output(["ignored"]), AsyncLLM()
    del output.weight_versions

    async def labels(*during: str) -> str:
        vllm_before_0_32.request_arrives()
        for version in during:
            await engine.update_weights(None)
            await engine.finish_weight_update(version)
        return vllm_answers.to_sample(output, [8], experts=False).label

    assert asyncio.run(labels()) == "default"
    assert asyncio.run(labels("0")) == "default+0" and asyncio.run(labels()) == "0"
    assert asyncio.run(labels("0")) == "0+0"  # the same version again may be other weights
    output.token_ids = []
    assert asyncio.run(labels("1")) == ""


def test_vllm_before_0_32_is_asked_whether_it_sleeps() -> None:
    asleep = True

    async def send(method: str, path: str, body: None) -> object:
        return {"is_sleeping": asleep} if (method, path) == ("GET", "/is_sleeping") else ""

    asyncio.run(VllmApi().sleep(send))
    asyncio.run(VllmApi().wake(send, "weights"))
    with pytest.raises(RolloutError, match="should have said that it is awake"):
        asyncio.run(VllmApi().wake(send, "kv_cache"))
    asleep = False
    asyncio.run(VllmApi().wake(send, "kv_cache"))


def test_sglang_before_0_5_21_gets_routes_and_arguments_that_it_knows() -> None:
    argv, app = ["--host", "h", "--sampling-mask-max-tokens", "64", "--port", "1"], FastAPI()
    assert sglang_before_0_5_21.known_arguments(argv, (0, 5, 20)) == argv
    assert sglang_before_0_5_21.known_arguments(argv, (0, 5, 19)) == ["--host", "h", "--port", "1"]
    sglang_before_0_5_21.add_session_routes(app, (0, 5, 21))
    assert not app.openapi()["paths"]
    app.openapi_schema = None
    sglang_before_0_5_21.add_session_routes(app, (0, 5, 20))
    assert app.openapi()["paths"].keys() == {"/begin_weight_update", "/end_weight_update"}


def sglang_answer(ids: list[int]) -> dict[str, Any]:
    entries = [(-0.5, 5, None), (-0.25, 6, None)]
    meta = {"output_token_logprobs": entries, "finish_reason": {"type": "length"}, "weight_version": "3", "prompt_tokens": 2}
    return {"output_ids": ids, "meta_info": meta}


def test_an_sglang_answer_becomes_a_sample() -> None:
    sample = sglang_answers.to_sample(sglang_answer([5, 6]), experts=False)
    assert sample is not None and sample.ids_T.tolist() == [5, 6] and sample.logprobs_T.tolist() == [-0.5, -0.25]
    assert (sample.label, sample.prompt_tokens, sample.finish_reason) == ("3", 2, "length")


def test_log_probs_of_other_tokens_are_no_sample() -> None:
    for ids in ([5, 7], [6, 5], [5], [5, 6, 7]):
        assert sglang_answers.to_sample(sglang_answer(ids), experts=False) is None
