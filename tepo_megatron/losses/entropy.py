"""Entropy in the objective: as a term of its own, or inside the advantage. Per response row (_R)."""

from __future__ import annotations

import torch
from torch import Tensor


def advantage_with_entropy(advantage_R: Tensor, entropy_R: Tensor, alpha: float, kappa: float) -> Tensor:
    """A + min(alpha sg[H], |A| / kappa): uncertain tokens learn more, never with the other sign if kappa > 1.

    (arXiv 2506.14758.) No gradient through the entropy. What it returns differs from token to token of a sequence.
    """
    return advantage_R + torch.minimum(alpha * entropy_R.detach(), advantage_R.abs() / kappa)
