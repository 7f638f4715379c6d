"""TrainBatch: minibatches of whole groups, with their old statistics."""

from dataclasses import replace

import torch

from tepo_megatron.base.types import Rollout, TrainBatch


def batch(groups: int = 7, samples: int = 3) -> TrainBatch:
    rollouts, n = [], 0
    for g in range(groups):
        for s in range(samples):
            length = 2 + (g + s) % 4
            rollouts.append(
                Rollout(
                    g, torch.arange(1 + length), torch.arange(1 + length) > 0, torch.full((1 + length,), float(g)), 0, "stop"
                )
            )
            n += length
    old = torch.arange(n, dtype=torch.float32)
    batch = TrainBatch.build(rollouts, torch.arange(groups * samples, dtype=torch.float32))
    return replace(batch, old_logprobs_N=old, old_entropies_N=-old)


def test_each_epoch_sees_every_sequence_once_in_even_minibatches_of_whole_groups() -> None:
    whole = batch()
    minibatches = list(whole.epochs(epochs=2, minibatch_prompts=3, seed=5))
    assert [m.update for m in minibatches] == [0, 1, 2, 3, 4, 5]
    for epoch in (minibatches[:3], minibatches[3:]):
        seen = torch.cat([m.advantages_B for m in epoch])
        assert sorted(seen.tolist()) == whole.advantages_B.tolist()
        for m in epoch:
            prompts = [r.prompt_id for r in m.rollouts]
            assert all(prompts.count(p) == 3 for p in prompts)
            assert len(set(prompts)) in (2, 3)
    assert [m.advantages_B.tolist() for m in minibatches[:3]] != [m.advantages_B.tolist() for m in minibatches[3:]]


def test_old_statistics_travel_with_their_sequence() -> None:
    whole = batch()
    starts = dict(zip(whole.advantages_B.tolist(), whole.first_tokens, strict=True))
    for m in whole.epochs(1, 2, seed=0):
        for advantage, first, length in zip(m.advantages_B.tolist(), m.first_tokens, m.response_lengths, strict=True):
            expected = torch.arange(starts[advantage], starts[advantage] + length, dtype=torch.float32)
            assert torch.equal(m.old_logprobs_N[first : first + length], expected)
            assert torch.equal(m.old_entropies_N[first : first + length], -expected)


def test_token_keys_are_the_sequence_in_the_rollout_batch_and_the_position() -> None:
    whole = batch(groups=2, samples=2)
    ids_N, position_N = whole.select([3, 0], update=0).token_keys_N(torch.device("cpu"))
    assert ids_N.tolist() == [3] * 4 + [0] * 2 and position_N.tolist() == [0, 1, 2, 3, 0, 1]
