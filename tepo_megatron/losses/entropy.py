"""The entropy term inside the advantage, per response row (_R). The entropy bonus is a line of `Objective.__call__`."""

import torch
from torch import Tensor


def advantage_with_entropy(advantage_R: Tensor, entropy_R: Tensor, alpha: float, kappa: float) -> Tensor:
    """Return A + min(alpha sg[H], |A| / kappa), which favours tokens of high entropy (arXiv 2506.14758).

    No gradient passes through the entropy. The result differs from token to token of a sequence.

    Args:
        advantage_R: Advantage A.
        entropy_R: Entropy H in nats.
    """
    return advantage_R + torch.minimum(alpha * entropy_R.detach(), advantage_R.abs() / kappa)
