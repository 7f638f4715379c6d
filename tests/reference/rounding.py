"""Tell the rounding of fp32 from a bug of the same size.

A draw is the reference in fp32, from weights within a rounding of the model's. Where one direction of the weights is far more
curved than all others, every draw errs along it, now little and now much more than 1e-5 of a gradient (14 draws of a hybrid of
the gate, update 1: -2.4e-5 to 3.1e-5; the rounding of two tokens' log-probs decides it), and by little apart from it. An error
apart from the draws', and larger than twice what they err apart from each other, is no rounding.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

DRAWS = range(8)  # seeds of nudges (`reference.tepo.load`); with three, all may err too little along the direction to show it
ALONG = 2.0  # times the largest draw's error along the direction is rounding
Errors = Mapping[str, Tensor]  # differences from the reference in fp64, by `relative`; all of one update


def most_beyond_rounding(error: Errors, draws: Sequence[Errors], tolerance: float) -> tuple[str, float, float]:
    """Return the tensor that errs most apart from the draws' errors, by how much (inf for NaN), and the bound of that.

    The bound is twice the most that a draw errs apart from the others, and at least `tolerance`. What exceeds ALONG times the
    longest draw counts too.
    """
    others = [[other for other in draws if other is not draw] for draw in draws]
    bound = max(2 * max(_apart(draw, rest).values()) for draw, rest in zip(draws, others, strict=True))
    apart = _apart(error, draws)
    name = max(apart, key=apart.__getitem__)
    return name, apart[name], max(tolerance, bound)


def _apart(error: Errors, draws: Sequence[Errors]) -> dict[str, float]:
    """Return the norm of each tensor's error without its part along the draws' errors."""
    flat = torch.stack([_flat(each, error.keys()) for each in (error, *draws)])
    directions = torch.linalg.qr(flat[1:].T).Q
    along = directions @ (directions.T @ flat[0])
    along *= (ALONG * flat[1:].norm(dim=1).max() / along.norm().clamp(min=1e-300)).clamp(max=1.0)
    rest = (flat[0] - along).split([tensor.numel() for tensor in error.values()])
    return {name: norm(part) for name, part in zip(error, rest, strict=True)}


def relative(tensor: Tensor, expected: Tensor) -> Tensor:
    """Return (tensor - expected) / ||expected||, in fp64."""
    return (tensor.double() - expected.double()) / expected.double().norm().clamp(min=1e-300)


def norm(tensor: Tensor) -> float:
    """Return the 2-norm; inf for NaN."""
    return tensor.norm().nan_to_num(nan=float("inf"), posinf=float("inf")).item()


def _flat(tensors: Mapping[str, Tensor], names: object) -> Tensor:
    assert tensors.keys() == names
    return torch.cat([tensors[name].double().flatten() for name in tensors])
