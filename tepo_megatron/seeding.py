"""Seeds that depend on what is drawn, never on who draws it."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2^62) from (run seed, purpose, step, ...): stable over processes, platforms and layouts."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2
