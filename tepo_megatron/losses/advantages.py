"""Group-relative advantages: each response is compared with the other responses to the same prompt."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from tepo_megatron.base.errors import DataError
from tepo_megatron.base.types import Rollout, SamplingMask, split_samples

_STD_EPS = 1e-6
# The rewards of each group -> their advantages. In `PER_TERM` the rewards are [n, K], and K weights come with them.
AdvantageFunction = Callable[..., list[Tensor]]


def split_groups(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Return the rollouts grouped by prompt_id, in order. The rollouts of a prompt must be next to each other.

    Raises ValueError if a prompt_id comes back after another one. Its mean would be taken over a part of its group.
    """
    groups = [list(run) for _, run in groupby(rollouts, key=lambda rollout: rollout.prompt_id)]
    seen: set[int] = set()
    for group in groups:
        prompt_id = group[0].prompt_id
        if prompt_id in seen:
            raise ValueError(f"the rollouts of prompt {prompt_id} are not next to each other; order them by prompt")
        seen.add(prompt_id)
    return groups


def group_advantages(rollouts: Sequence[Rollout], kind: str) -> Tensor:
    """Return one advantage for each rollout: [B] fp32, computed in fp64 from the shaped rewards of its group.

    Sequences of one sample (`Rollout.sample`) count as one, with the mean of their rewards, and share its advantage. Raises
    ValueError if a reward is not finite (the rollout was not graded), or the rollouts of a prompt are not next to each other.
    """
    for rollout in rollouts:
        if not math.isfinite(rollout.reward):
            raise ValueError(
                f"a rollout of prompt {rollout.prompt_id} has reward {rollout.reward} (status {rollout.status!r}); "
                f"grade the rollouts first"
            )
    groups = [split_samples(group) for group in split_groups(rollouts)]
    samples = [sample for group in groups for sample in group]
    if kind in PER_TERM:
        values_BK, weights_K = rewards_by_term([r for sample in samples for r in sample])
        values = torch.stack([part.mean(0) for part in values_BK.split([len(sample) for sample in samples])])
        advantages = PER_TERM[kind](list(values.split([len(group) for group in groups])), weights_K)
    else:
        rewards = [[math.fsum(r.reward for r in sample) / len(sample) for sample in group] for group in groups]
        advantages = ADVANTAGES[kind]([torch.tensor(group, dtype=torch.float64) for group in rewards])
    of_samples = torch.cat([torch.empty(0, dtype=torch.float64), *advantages]).float().tolist()
    shared = {id(r): advantage for sample, advantage in zip(samples, of_samples, strict=True) for r in sample}
    return torch.tensor([shared[id(r)] for r in rollouts], dtype=torch.float32)


def rewards_by_term(rollouts: Sequence[Rollout]) -> tuple[Tensor, Tensor]:
    """Return the rewards of B rollouts by term, [B, K] fp64, and the terms' weights, [K] fp64.

    What shaping added to the sum of the terms (overlong penalty, KL in the reward) is one more term of weight 1. A rollout that
    was not graded by terms has its reward as its only term. Raises ValueError if the rollouts have different terms.
    """
    weights = [tuple(weight for weight, _ in r.terms) for r in rollouts]
    if len(set(weights)) > 1:
        raise ValueError(f"the rollouts were graded with different terms (weights {sorted(set(weights))}); grade them alike")
    weights_K = torch.tensor(weights[0] if weights else (), dtype=torch.float64)
    values_BK = torch.tensor([[value for _, value in r.terms] for r in rollouts], dtype=torch.float64)
    values_BK = values_BK.reshape(len(rollouts), weights_K.numel())
    rest_B = torch.tensor([r.reward for r in rollouts], dtype=torch.float64) - values_BK @ weights_K
    if weights_K.numel() and bool((rest_B.abs() < 1e-9).all()):
        return values_BK, weights_K
    return torch.cat((values_BK, rest_B[:, None]), 1), torch.cat((weights_K, weights_K.new_ones(1)))


def penalized(rollouts: Sequence[Rollout], penalty_B: Tensor) -> tuple[Rollout, ...]:
    """Return the rollouts with the penalty subtracted from their (shaped) rewards. `score` does not change.

    `penalty_B`: [B] in units of the reward.
    """
    return tuple(replace(r, reward=r.reward - float(p)) for r, p in zip(rollouts, penalty_B, strict=True))


def check_some_are_whole(rollouts: Sequence[Rollout]) -> None:
    """Raise DataError if all rollouts of a step are cut off, so that `without_truncated` leaves nothing to learn from."""
    if rollouts and all(r.stop_reason == "length" for r in rollouts):
        raise DataError(
            "every response of a step was cut off at rollout.max_response_tokens, and objective.mask_truncated leaves nothing "
            "to learn from; raise the first or set the second to false"
        )


def without_truncated(rollouts: Sequence[Rollout]) -> tuple[Rollout, ...]:
    """Return the rollouts in order, without response tokens in those cut off at the length limit (overlong filtering of DAPO).

    They still count as sequences in means over sequences. Their tokens are in no other denominator.
    """
    return tuple(_masked(r) if r.stop_reason == "length" else r for r in rollouts)


def _masked(rollout: Rollout) -> Rollout:
    mask_L, logprobs_L = torch.zeros_like(rollout.response_mask_L), torch.zeros_like(rollout.rollout_logprobs_L)
    none = None if rollout.sampling_mask is None else SamplingMask.cat([])
    return replace(rollout, response_mask_L=mask_L, rollout_logprobs_L=logprobs_L, sampling_mask=none)


def _std(groups: list[Tensor]) -> list[Tensor]:
    """Return (r - mean) / (std + 1e-6), std with ddof 1: GRPO as in the TEPO paper."""
    return [(r - r.mean()) / (r.std(correction=1) + _STD_EPS) if r.numel() > 1 else r - r for r in groups]


def _mean(groups: list[Tensor]) -> list[Tensor]:
    """Return r - mean (Dr. GRPO, arXiv 2503.20783)."""
    return [r - r.mean() for r in groups]


def _leave_one_out(groups: list[Tensor]) -> list[Tensor]:
    """Return r - mean of the other n - 1 rewards, which is (r - mean) n / (n - 1) (RLOO, arXiv 2402.14740)."""
    return [(r - r.mean()) * r.numel() / max(1, r.numel() - 1) for r in groups]


def _gpg(groups: list[Tensor]) -> list[Tensor]:
    """Return alpha (r - mean) with alpha = B / (B - M) (GPG, arXiv 2504.02546).

    M of the B samples are in groups of equal rewards, which contribute nothing. GPG's public code counts the rewards that are
    not zero instead of M.
    """
    samples = sum(r.numel() for r in groups)
    silent = sum(r.numel() for r in groups if bool((r == r[0]).all()))
    alpha = samples / max(1, samples - silent)
    return [alpha * (r - r.mean()) for r in groups]


def _gdpo(groups: list[Tensor], weights_K: Tensor) -> list[Tensor]:
    """Return the batch-normalised sum over terms of w_k (r_k - mean r_k) / (std r_k + 1e-6) (GDPO, arXiv 2601.05242).

    Mean and deviation of a term are those of its group, so that a term with a small spread is not drowned by the others. The
    sum is then brought to mean 0 and deviation 1 over all samples of the rollout batch. `weights_K`: weights of the terms.
    """
    spread = [r.std(0, correction=1) if len(r) > 1 else torch.zeros_like(weights_K) for r in groups]
    sums = [((r - r.mean(0)) / (std_K + _STD_EPS)) @ weights_K for r, std_K in zip(groups, spread, strict=True)]
    if sum(map(len, sums)) < 2:
        return [torch.zeros_like(x) for x in sums]
    all_B = torch.cat(sums)
    return [(x - all_B.mean()) / (all_B.std(correction=1) + _STD_EPS) for x in sums]


def _none(groups: list[Tensor]) -> list[Tensor]:
    """Return 0: the reward has no part in the loss (distillation)."""
    return [r - r for r in groups]


ADVANTAGES: dict[str, AdvantageFunction] = {
    "std": _std, "mean": _mean, "leave_one_out": _leave_one_out, "gpg": _gpg, "none": _none,
}  # fmt: skip
# advantages from the terms of the reward; `losses/objective.py` offers both tables
PER_TERM: dict[str, AdvantageFunction] = {"gdpo": _gdpo}
# advantages that depend on the groups of the whole rollout batch; those of the others depend on their group alone
OF_WHOLE_BATCH = frozenset({"gpg", "gdpo"})
