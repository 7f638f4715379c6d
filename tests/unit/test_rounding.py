"""The bound of fp32 lets through what the reference's own roundings do, and no error of the same size."""

import pytest
import torch

from tests.reference.rounding import DRAWS, most_beyond_rounding

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def draws() -> list[dict[str, torch.Tensor]]:
    """As in the hybrid of the gate: 1e-5 to 2e-5 along one direction, 2e-6 apart from it."""
    generator = torch.Generator().manual_seed(0)
    direction = _random(generator, 2e-5)
    return [{n: (0.5 + 0.2 * i) * t + _random(generator, 2e-6)[n] for n, t in direction.items()} for i in DRAWS]


def _random(generator: torch.Generator, norm: float) -> dict[str, torch.Tensor]:
    flat = torch.randn(60, generator=generator, dtype=torch.float64)
    a, b = (flat * norm / flat.norm()).split([20, 40])
    return {"a": a, "b": b}


@pytest.mark.parametrize("times", [1, -2, 50])
def test_an_error_as_the_draws_is_rounding_unless_it_is_many_times_as_large(draws: list, times: int) -> None:
    error = {name: times * tensor for name, tensor in draws[0].items()}
    _, apart, bound = most_beyond_rounding(error, draws, TOLERANCE)
    assert bound == TOLERANCE and (apart > 5 * bound if times == 50 else apart < bound / 5)


def test_an_error_of_the_same_size_in_another_direction_is_found(draws: list) -> None:
    wrong = {"a": torch.zeros(20, dtype=torch.float64), "b": _random(torch.Generator().manual_seed(1), 4e-5)["b"]}
    name, apart, bound = most_beyond_rounding({n: draws[0][n] + wrong[n] for n in wrong}, draws, TOLERANCE)
    assert name == "b" and apart > 2e-5 > bound


def test_nan_is_the_largest_error(draws: list) -> None:
    assert most_beyond_rounding(draws[0] | {"a": torch.full((20,), torch.nan)}, draws, TOLERANCE)[1] == float("inf")
