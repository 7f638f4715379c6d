"""Find the parameters that changed since the last push. With `sync.delta` only these are sent.

A decoder layer is sent whole or not at all, and so is each parameter outside the layers. Anything smaller fails: vLLM loads a
module once all of its tensors are there, and a module that gets only some of them (`q_proj` without `k_proj`) has garbage in
the rest.
"""

from __future__ import annotations

import re
from collections.abc import Set

from tepo_megatron.weight_sync.broadcast_group import crc32
from tepo_megatron.weight_sync.buckets import BucketPlan
from tepo_megatron.weights.gather import Binding

_LAYER = re.compile(r"decoder\.layers\.\d+\.")


class Delta:
    """The CRC-32, at the last push, of this rank's part of each parameter in `BucketPlan.sent`."""

    def __init__(self, plan: BucketPlan) -> None:
        self._plan = plan
        self._known: dict[str, int] = {}
        self._version: int | None = None

    def changed(self, version: int, base: int | None) -> list[Binding] | None:
        """Return the parameters that a push must send; None: all of them, because `base` is not the version of the last push.

        Every rank reads its own part of the model. Collectives: one all-gather over the host group.

        Args:
            version: The version that is pushed now.
            base: The version that all servers in the update have; None: there is no such version.
        """
        now = {b.name: crc32(b.parameter) for b in self._plan.sent}
        mine = {_unit(name) for name, checksum in now.items() if self._known.get(name) != checksum}
        units: Set[str] = set().union(*self._plan.from_all(mine))
        known = base is not None and base == self._version
        self._known, self._version = now, version
        return [b for b in self._plan.sent if _unit(b.name) in units] if known else None


def _unit(name: str) -> str:
    """Return the name of the unit that is sent whole or not at all: the layer of a parameter, or the parameter itself."""
    match = _LAYER.match(name)
    return match.group() if match else name
