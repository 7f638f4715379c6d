"""Sampling masks on their way from an engine to a rollout, and configs that are refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tepo_megatron.actor.output_stats import truncation_of
from tepo_megatron.base.errors import ConfigError
from tepo_megatron.base.exchange import HttpAnswer
from tepo_megatron.base.types import Prompt, SamplingMask, SamplingParams, Truncation
from tepo_megatron.config import RolloutConfig
from tepo_megatron.engines.engine import ABORTED, GenerationRequest, merge
from tepo_megatron.engines.engines import check_truncation
from tepo_megatron.engines.samples import checked_rollout
from tepo_megatron.engines.sglang import SglangApi
from tepo_megatron.engines.vllm import VllmApi
from tepo_megatron.losses.advantages import without_truncated
from tepo_megatron.wire.receiver.binary_answer import CONTENT_TYPE, Sample, decode, encode, ids_crc

PROMPT = Prompt(id=7, token_ids=(4, 5, 6), answer="9")
SAMPLING = SamplingParams(samples=1, max_tokens=4, top_k=50, top_p=0.9)
MASKS = np.array([8, 3, 2, 9], np.int32), np.array([3, 1], np.int32)


def sample(masks: tuple[np.ndarray, np.ndarray] | None, **changes) -> Sample:
    ids, logprobs = np.array([2, 9], np.int32), np.array([-0.5, 0.0], np.float32)
    return replace(Sample("length", "0", 3, ids_crc(PROMPT.token_ids), ids, logprobs, masks=masks), **changes)


@pytest.mark.parametrize("api", [VllmApi(), SglangApi()], ids=lambda api: api.name)
def test_masks_travel_in_binary_answers(api: VllmApi | SglangApi) -> None:
    experts = np.arange(8, dtype=np.uint8).reshape(4, 1, 2)
    body = encode([sample(MASKS), sample(None), sample(MASKS, experts=experts)])
    first, second, third = decode(body, 3, 4)
    assert second.masks is None and third.experts is not None and np.array_equal(third.experts, experts)
    for got in (first, third):
        assert got.masks is not None
        assert np.array_equal(got.masks[0], MASKS[0]) and np.array_equal(got.masks[1], MASKS[1])
    ask = GenerationRequest(PROMPT, replace(SAMPLING, max_tokens=2), 0)
    (rollout,) = api.decode(HttpAnswer(200, CONTENT_TYPE, encode([sample(MASKS)])), ask, 0)
    assert rollout.sampling_mask is not None and rollout.sampling_mask.rows(torch.tensor([0])).tolist() == [[8, 3, 2]]
    unasked = GenerationRequest(PROMPT, replace(ask.sampling, top_k=-1), 0)
    assert api.decode(HttpAnswer(200, CONTENT_TYPE, encode([sample(MASKS)])), unasked, 0)[0].sampling_mask is None


@pytest.mark.parametrize(
    ("masks", "error"),
    [
        ((np.array([8, 3, 2], np.int32), np.array([3, 0], np.int32)), "empty sampling mask"),
        ((np.array([8, 3, 9], np.int32), np.array([2, 1], np.int32)), "lacks the sampled token"),
        ((np.array([2, 2, 9], np.int32), np.array([2, 1], np.int32)), "twice"),
        ((np.array([2, -3, 9], np.int32), np.array([2, 1], np.int32)), "below 0"),
        ((np.array([2, 9, 9], np.int32), np.array([1, 1], np.int32)), "another size"),
        ((np.arange(62, dtype=np.int32), np.array([2, 60], np.int32)), "of 60 ids, more than 59"),
        ((np.array([2, 9], np.int32), np.array([2**31 - 1, 3 - 2**31], np.int32)), "an empty sampling mask"),
        (([2, 2**40], [1, 1]), "out of bounds"),
    ],
)
def test_masks_that_do_not_fit_are_refused(masks: tuple[np.ndarray, np.ndarray], error: str) -> None:
    with pytest.raises((ValueError, OverflowError), match=error):
        checked_rollout(PROMPT, [2, 9], [-0.5, 0.0], "length", replace(SAMPLING, max_tokens=2), 0, None, masks)


def test_masks_are_joined_and_dropped_with_the_tokens() -> None:
    first = checked_rollout(PROMPT, [2, 9], [-0.5, 0.0], ABORTED, SAMPLING, 0, None, MASKS)
    longer = replace(PROMPT, token_ids=(*PROMPT.token_ids, 2, 9))
    rest = replace(SAMPLING, max_tokens=2)
    end = checked_rollout(longer, [1, 2], [-0.5, 0.0], "length", rest, 1, None, ([1, 5, 2], [2, 1]))
    whole = merge(first, end)
    assert whole.sampling_mask is not None
    assert whole.sampling_mask.ids_M.tolist() == [8, 3, 2, 9, 1, 5, 2] and whole.sampling_mask.counts_N.tolist() == [3, 1, 2, 1]
    assert merge(first, replace(end, sampling_mask=None)).sampling_mask is None
    nothing = checked_rollout(PROMPT, [], [], ABORTED, SAMPLING, 0)
    assert nothing.sampling_mask is not None and merge(nothing, first).sampling_mask is first.sampling_mask
    kept, masked = without_truncated([replace(end, stop_reason="stop"), end])
    assert kept.sampling_mask is end.sampling_mask
    assert masked.sampling_mask is not None and masked.sampling_mask.counts_N.numel() == 0
    with pytest.raises(ValueError, match="sampling masks of another number of tokens"):
        replace(end, sampling_mask=SamplingMask.cat([]))


def test_settings_that_cannot_be_matched_are_refused() -> None:
    assert truncation_of(RolloutConfig()) is None
    assert truncation_of(RolloutConfig(top_p=0.9)) == Truncation(-1, 0.9, renormalizes=True)
    assert truncation_of(RolloutConfig(engine="sglang", top_k=64)) == Truncation(64, 1.0, renormalizes=False)
    for top_k in (0, 1):
        with pytest.raises(ValueError, match=f"top_k={top_k}: nothing can be learned .*set top_k to 2 or more"):
            RolloutConfig(top_k=top_k)
    for keys in ({"top_p": 0.9}, {"top_k": 65}):
        with pytest.raises(ValueError, match=r"engine=sglang with top_k=.*set top_k to 2 \.\. 64, or engine to vllm"):
            RolloutConfig(engine="sglang", **keys)
        with pytest.raises(ValueError, match=r"max_staleness=1 with top_k=.*set top_k to 2 \.\. 64, or max_staleness to 0"):
            RolloutConfig(max_staleness=1, **keys)
        RolloutConfig(engine="sglang", max_staleness=1, replay="elsewhere", **keys)
    RolloutConfig(max_staleness=1, top_k=64, top_p=0.9)
    with pytest.raises(ValueError, match=r"top_k=257: the actor finds at most 256 tokens.*set top_k to 2 \.\. 256"):
        RolloutConfig(top_k=257)
    check_truncation(RolloutConfig(top_k=50), 58)
    check_truncation(RolloutConfig(top_k=65), 58)
    with pytest.raises(ConfigError, match=r"rollout\.top_k=50: .*lower it to 49, or set it to -1"):
        check_truncation(RolloutConfig(top_k=50), 57)
