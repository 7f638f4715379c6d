"""Responses that new weights interrupt: what was sampled of them stays, and the new weights go on.

A request that is ended before its time answers with the tokens that it has, and their log-probs. The rest is asked for as the
response to prompt and tokens so far: it is sampled, cache and all, by the new weights alone, and each token knows its version.
Both engines can also go on by themselves after a pause, but only SGLang's answers tell which token is of which weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tepo_megatron.seeding import derive_seed
from tepo_megatron.types import Prompt, Rollout, SamplingParams

CUT = "abort"  # the stop reason of such a response, in both engines


@dataclass(frozen=True)
class Ask:
    """One request: `sampling.samples` responses to a prompt."""

    prompt: Prompt
    sampling: SamplingParams
    seed: int


def rest(cut: Rollout, prompt: Prompt, sampling: SamplingParams, seed: int) -> Ask:
    """What a response lacks, the only sample of its request. seed: of its prompt, its place in the group and the tokens so far,
    for no random number may serve twice.
    """
    tokens = tuple(cut.token_ids_L.tolist())
    longer = replace(prompt, token_ids=tokens)
    left = sampling.max_tokens - (len(tokens) - len(prompt.token_ids))
    return Ask(longer, replace(sampling, samples=1, max_tokens=left), seed)


def rests(group: Sequence[Rollout], prompt: Prompt, sampling: SamplingParams, seed: int) -> dict[int, Ask]:
    """What the group's cut responses lack, by their places in it."""
    return {
        place: rest(r, prompt, sampling, derive_seed(seed, "rest", place, r.token_ids_L.numel()))
        for place, r in enumerate(group)
        if r.stop_reason == CUT
    }


def joined(cut: Rollout, end: Rollout) -> Rollout:
    """A response and what followed it, itself cut off perhaps."""
    if not cut.response_length:
        return end
    begun, versions = cut.token_ids_L.numel(), list(cut.later_versions)
    newest = versions[-1][1] if versions else cut.policy_version
    if end.response_length:
        versions += [change for change in [(begun, end.policy_version), *end.later_versions] if change[1] != newest]
    servers = cut.servers
    if end.response_length:
        servers = continued(servers, [(begun if place == 0 else place, name) for place, name in end.servers])
    return replace(
        end,
        response_mask_L=torch.cat([cut.response_mask_L, end.response_mask_L[begun:]]),
        rollout_logprobs_L=torch.cat([cut.rollout_logprobs_L, end.rollout_logprobs_L[begun:]]),
        policy_version=cut.policy_version,
        later_versions=tuple(versions),
        servers=servers,
    )


def continued(servers: Sequence[tuple[int, str]], more: Sequence[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
    """Return `Rollout.servers` of a sequence whose first tokens are from `servers` and whose later ones are from `more`."""
    all_of_them = list(servers)
    for place, name in more:
        if not all_of_them or all_of_them[-1][1] != name:
            all_of_them.append((place, name))
    return tuple(all_of_them)
