"""Partial rollouts: keep the tokens of aborted requests and resubmit prompt + partial response under the new weights.

An aborted request returns the tokens sampled so far, with their log-probs. The remaining response is requested with prompt +
partial response as the prompt. The new weights alone sample it, with a new KV cache, and each token has its weight version.
Both engines can also resume requests after a pause, but only SGLang reports which token came from which weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tepo_megatron.base.seeding import derive_seed
from tepo_megatron.base.types import Prompt, Rollout, SamplingMask, SamplingParams

ABORTED = "abort"  # stop reason of an aborted response, in both engines


@dataclass(frozen=True)
class GenerationRequest:
    """A generation request: `sampling.samples` responses to a prompt."""

    prompt: Prompt
    sampling: SamplingParams
    seed: int


def continuation(aborted: Rollout, prompt: Prompt, sampling: SamplingParams, seed: int) -> GenerationRequest:
    """Return the request that continues an aborted response, with one sample."""
    tokens = tuple(aborted.token_ids_L.tolist())
    longer = replace(prompt, token_ids=tokens)
    remaining = sampling.max_tokens - (len(tokens) - len(prompt.token_ids))
    return GenerationRequest(longer, replace(sampling, samples=1, max_tokens=remaining), seed)


def continuations(
    group: Sequence[Rollout], prompt: Prompt, sampling: SamplingParams, seed: int
) -> dict[int, GenerationRequest]:
    """Return the requests that continue the aborted responses of a group, by their index in it."""
    return {
        place: continuation(r, prompt, sampling, derive_seed(seed, "rest", place, r.token_ids_L.numel()))
        for place, r in enumerate(group)
        if r.stop_reason == ABORTED
    }


def merge(aborted: Rollout, end: Rollout) -> Rollout:
    """Merge an aborted response and its continuation, which may have been aborted itself."""
    if not aborted.response_length:
        return end
    begun, versions, servers = aborted.token_ids_L.numel(), list(aborted.later_versions), aborted.servers
    newest = versions[-1][1] if versions else aborted.policy_version
    if end.response_length:
        versions += [change for change in [(begun, end.policy_version), *end.later_versions] if change[1] != newest]
        servers = continued(servers, [(begun if place == 0 else place, name) for place, name in end.servers])
    masks = [r.sampling_mask for r in (aborted, end) if r.sampling_mask is not None]
    return replace(
        end,
        response_mask_L=torch.cat([aborted.response_mask_L, end.response_mask_L[begun:]]),
        rollout_logprobs_L=torch.cat([aborted.rollout_logprobs_L, end.rollout_logprobs_L[begun:]]),
        policy_version=aborted.policy_version,
        later_versions=tuple(versions),
        servers=servers,
        sampling_mask=SamplingMask.cat(masks) if len(masks) == 2 else None,
    )


def continued(servers: Sequence[tuple[int, str]], more: Sequence[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
    """Return `Rollout.servers` of a sequence: that of its first tokens, extended by that of its later tokens."""
    all_of_them = list(servers)
    for place, name in more:
        if not all_of_them or all_of_them[-1][1] != name:
            all_of_them.append((place, name))
    return tuple(all_of_them)
