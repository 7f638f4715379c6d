"""The benchmark of the training step tells when the sides do not compute the same."""

import pytest

from benchmarks import step


def test_updates_that_differ_are_reported() -> None:
    plain = [[(-0.5, 2.0), (-0.6, 3.0)]] * 2
    assert step.disagreement(plain, plain) == 0
    assert step.disagreement([[(-0.5, 2.0), (-0.6, 3.0003)], plain[1]], plain) == pytest.approx(1e-4)
    with pytest.raises(ValueError, match="longer"):
        step.disagreement([[(-0.5, 2.0)]] * 2, plain)  # an update is missing
