"""The minibatch inputs of a loss, by hand: no layout and no model hides a wrong length or an exchanged row."""

import torch

from tepo_megatron.actor import minibatch
from tepo_megatron.base.types import Rollout, TokenStats, TrainBatch
from tepo_megatron.losses.ratio import sequence_ratio

MASKS = ("0001111", "001101")  # the second response was written in two turns
OLD, ROLLOUT, CURRENT = ([-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0], 0.25, 0.5)


def batch() -> TrainBatch:
    """Old log-probs OLD; those of the engine are higher by ROLLOUT. Two responses, of four and of three tokens."""
    rollouts, start = [], 0
    for prompt, digits in enumerate(MASKS):
        mask = torch.tensor([digit == "1" for digit in digits])
        logprobs = torch.zeros(len(digits))
        logprobs[mask] = torch.tensor(OLD[start : start + int(mask.sum())]) + ROLLOUT
        start += int(mask.sum())
        rollouts.append(Rollout(prompt, torch.arange(len(digits)), mask, logprobs, 0, "stop"))
    old, entropy = torch.tensor(OLD), torch.arange(7.0)
    return TrainBatch(tuple(rollouts), torch.tensor([2.0, -1.0]), old, entropy, old - 1, update=1)


def test_the_whole_minibatch() -> None:
    """As a weighting sees it."""
    stats = TokenStats(torch.tensor(OLD) + CURRENT * torch.arange(7.0), torch.zeros(7))
    inputs = minibatch.MinibatchInputs(batch(), torch.device("cpu"), None, 9).whole(stats)
    assert inputs.advantage_R.tolist() == [2.0] * 4 + [-1.0] * 3
    assert inputs.old_logprob_R.tolist() == OLD and inputs.old_entropy_R.tolist() == list(range(7))
    assert inputs.rollout_logprob_R.tolist() == [x + ROLLOUT for x in OLD]
    assert inputs.ref_logprob_R is not None and inputs.ref_logprob_R.tolist() == [x - 1 for x in OLD]
    whole = inputs.whole
    counts = [float(x) for x in (whole.tokens, whole.sequences, whole.prompts, whole.max_response_tokens)]
    assert counts == [7, 2, 2, 9]
    assert inputs.group_tokens_R.tolist() == [4.0] * 4 + [3.0] * 3
    assert inputs.segments.position_R is not None and inputs.segments.position_R.tolist() == [0, 1, 2, 3, 0, 1, 2]
    ratio_R = sequence_ratio(stats.logprob_R - inputs.old_logprob_R, inputs.segments, True)
    means = [CURRENT * (0 + 1 + 2 + 3) / 4] * 4 + [CURRENT * (4 + 5 + 6) / 3] * 3
    torch.testing.assert_close(ratio_R, torch.tensor(means).exp())
