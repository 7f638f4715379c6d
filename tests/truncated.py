"""An independent reference of truncated sampling, token by token in plain Python floats and dense fp64 tensors."""

import torch

from tepo_megatron.base.types import NO_TOKEN, Truncation


def kept(logits_V: torch.Tensor, temperature: float, truncation: Truncation) -> set[int]:
    """Return the ids that truncated sampling can choose, without ties."""
    p = torch.softmax(logits_V.double() / temperature, 0).tolist()
    order = sorted(range(len(p)), key=lambda i: -p[i])
    if truncation.top_k > 0:
        order = order[: truncation.top_k]
    whole = sum(p[i] for i in order) if truncation.renormalizes else 1.0
    found, before = set[int](), 0.0
    for i in order:
        if found and truncation.top_p < 1 and before >= truncation.top_p * whole:
            break
        found.add(i)
        before += p[i]
    return found


def rows(masks: list[set[int]]) -> torch.Tensor:
    """Return masks as rows filled up with NO_TOKEN, in an order that is not sorted."""
    widest = max(map(len, masks))
    return torch.tensor([[*sorted(mask, key=lambda i: i * 7919 % 101), *[NO_TOKEN] * (widest - len(mask))] for mask in masks])


def reference(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, masks: list[set[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs and entropies of the renormalized distributions, differentiable, row by row."""
    logprobs, entropies = [], []
    for z, label, mask in zip(logits, labels.tolist(), masks, strict=True):
        ids = sorted(mask)
        logp = torch.log_softmax(z[ids] / temperature, 0)
        logprobs.append(logp[ids.index(label)])
        entropies.append(-(logp.exp() * logp).sum())
    return torch.stack(logprobs), torch.stack(entropies)
