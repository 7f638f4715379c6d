"""Seeds that depend on what is drawn, never on who draws it."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2^62) from (run seed, purpose, step, ...): stable over processes, platforms and layouts."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def hash_rows(seed: int, rows: Tensor) -> Tensor:
    """[n] int64 in [0, 2^63): a random number for each row of an int64 matrix [n, k], whatever the order of the rows.

    The finalizer of SplitMix64 (Steele, Lea and Flood 2014), once per column; int64 products wrap around.
    """
    key = torch.full((rows.shape[0],), seed, dtype=torch.int64)
    for column in rows.cpu().unbind(1):
        key = key + column * -7046029254386353131  # 2^64 / golden ratio, as a signed number
        key = (key ^ _shifted(key, 30)) * -4658895280553007687
        key = (key ^ _shifted(key, 27)) * -7723592293110705685
        key = key ^ _shifted(key, 31)
    return key & 0x7FFF_FFFF_FFFF_FFFF


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x >> bits, filled with zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
