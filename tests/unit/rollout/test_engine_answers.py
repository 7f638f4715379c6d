"""An engine's own outputs become samples of a binary answer. No engine and no server: only the fields that are read."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tepo_megatron.wire.receiver import sglang_server, vllm_middleware
from tepo_megatron.wire.receiver.binary_answer import ids_crc


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
    assert vllm_middleware.is_plain(output)
    sample = vllm_middleware.to_sample(output, [8, 9], experts=False)
    assert sample.ids_T.tolist() == [5, 6, 7] and sample.logprobs_T.tolist() == [-0.5, vllm_middleware.LEAST_LOGPROB, -0.25]
    masks = None if sample.masks is None else [part.tolist() for part in sample.masks]
    assert masks == (None if chosen == 1 else [[5, 99, 6, 99, 7, 99], [2, 2, 2]])
    assert (sample.label, sample.finish_reason, sample.experts) == ("3", "length", None)
    assert (sample.prompt_tokens, sample.prompt_crc) == (2, ids_crc([8, 9]))
    assert vllm_middleware.to_sample(output, [8, 9], experts=True).experts is output.routed_experts


def test_a_vllm_output_of_several_versions_names_all_of_them() -> None:
    assert vllm_middleware.to_sample(vllm_output(["3", "4"]), [8], experts=False).label == "3+4"
    assert vllm_middleware.to_sample(vllm_output([]), [8], experts=False).label == ""


def sglang_answer(ids: list[int]) -> dict[str, Any]:
    entries = [(-0.5, 5, None), (-0.25, 6, None)]
    meta = {"output_token_logprobs": entries, "finish_reason": {"type": "length"}, "weight_version": "3", "prompt_tokens": 2}
    return {"output_ids": ids, "meta_info": meta}


def test_log_probs_of_other_tokens_are_no_sample() -> None:
    for ids in ([5, 7], [6, 5], [5], [5, 6, 7]):
        assert sglang_server.to_sample(sglang_answer(ids), experts=False) is None
