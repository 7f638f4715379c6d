"""Random numbers that belong to a token, not to its place in a batch."""

import pytest
import torch

from tepo_megatron.base import seeding
from tepo_megatron.base.seeding import derive_seed, hash_rows


def test_keys_are_distinct_uniform_and_depend_on_the_seed() -> None:
    rows = torch.cartesian_prod(torch.arange(512), torch.arange(128))
    keys = hash_rows(derive_seed(0, "weighting", 1, 2), rows.unbind(1))
    assert keys.min() >= 0 and keys.unique().numel() == len(rows)
    unit = keys.double() / 2**63
    assert abs(unit.mean() - 0.5) < 0.005 and abs(unit.var() - 1 / 12) < 0.002
    # no trace of the order: neighbours in sequence or position are as far apart as any two
    assert abs(torch.corrcoef(torch.stack((unit[1:], unit[:-1])))[0, 1]) < 0.02
    assert abs(torch.corrcoef(torch.stack((unit[128:], unit[:-128])))[0, 1]) < 0.02
    assert (hash_rows(1, rows.unbind(1)) == hash_rows(2, rows.unbind(1))).sum() == 0


@pytest.mark.parametrize("rows_of_part", [1, 7, 2000])
def test_rows_that_are_hashed_in_parts_have_the_same_keys(rows_of_part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = torch.cartesian_prod(torch.arange(50), torch.arange(40)).unbind(1)
    at_once = hash_rows(7, columns)
    monkeypatch.setattr(seeding, "_ROWS", rows_of_part)
    assert torch.equal(hash_rows(7, columns), at_once)


def test_keys_are_those_of_earlier_releases() -> None:
    """Other numbers would change the tokens that a resumed run picks."""
    columns = (torch.tensor([0, 0, 3, 2**40 + 5]), torch.tensor([0, 1, 17, 20000]))
    numbers = [4002467759508219783, 449103355366260047, 2515776223766842874, 1410984179213132439]
    assert hash_rows(7, columns).tolist() == numbers
    assert [column.tolist() for column in columns] == [[0, 0, 3, 2**40 + 5], [0, 1, 17, 20000]]  # not written to
