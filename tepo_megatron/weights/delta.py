"""What changed since the push before, which is all that is sent with `sync.delta`.

A decoder layer is sent whole or not at all, as is each parameter outside of the layers. Less would not do: vLLM loads a module
when all its tensors are there, and one that gets a part of them (`q_proj` without `k_proj`) has garbage in the rest.
"""

from __future__ import annotations

import re
from collections.abc import Set

from tepo_megatron.channel import crc32
from tepo_megatron.weights.gather import Binding
from tepo_megatron.weights.rounds import Rounds

_LAYER = re.compile(r"decoder\.layers\.\d+\.")


class Delta:
    """The CRC-32 of this rank's part of each parameter that leaves through it, as of the last push."""

    def __init__(self, plan: Rounds) -> None:
        self._plan = plan
        self._known: dict[str, int] = {}
        self._version: int | None = None

    def changed(self, version: int, base: int | None) -> list[Binding] | None:
        """Those that a push of `version` sends to servers that have `base`; None: all, because it is not that of the last push.

        Every rank reads its own part of the model. Collectives: one all-gather over the host group.
        """
        now = {b.name: crc32(b.parameter) for b in self._plan.sent}
        mine = {_unit(name) for name, checksum in now.items() if self._known.get(name) != checksum}
        units: Set[str] = set().union(*self._plan.from_all(mine))
        known = base is not None and base == self._version
        self._known, self._version = now, version
        return [b for b in self._plan.sent if _unit(b.name) in units] if known else None


def _unit(name: str) -> str:
    """What is sent whole or not at all, by the name of a parameter in it."""
    match = _LAYER.match(name)
    return match.group() if match else name
