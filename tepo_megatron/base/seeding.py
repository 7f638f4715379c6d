"""Derive seeds from the purpose of the random numbers, never from the process that draws them."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

_ROWS = 2**18  # hashed at once, so that they stay in a CPU's cache


def derive_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2^62) for (run seed, purpose, step, ...), the same in all processes, platforms and layouts."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "big") >> 2


def hash_rows(seed: int, columns: Sequence[Tensor]) -> Tensor:
    """Return one random number per row, independent of the order of the rows: int64 [n] in [0, 2^63).

    The hash is the finalizer of SplitMix64 (Steele, Lea and Flood 2014), applied once per column; int64 products wrap around.
    It runs on the device of the columns and has the same result on every device.
    """
    key = torch.full_like(columns[0], seed)
    for part, *columns_of_part in zip(key.split(_ROWS), *(column.split(_ROWS) for column in columns), strict=True):
        for column in columns_of_part:
            part += column * -7046029254386353131  # 2^64 / golden ratio, as a signed number
            part ^= _shifted(part, 30)
            part *= -4658895280553007687
            part ^= _shifted(part, 27)
            part *= -7723592293110705685
            part ^= _shifted(part, 31)
        part.bitwise_and_(0x7FFF_FFFF_FFFF_FFFF)
    return key


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)
