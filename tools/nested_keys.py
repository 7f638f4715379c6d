"""List the keys that a config can set below a mapping: parts of an objective, and fields of `megatron` that are checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from tepo_megatron.config.megatron import CHECKED
from tepo_megatron.config.objective import PARTS, variants


def nested_keys() -> Iterator[str]:
    """Yield the keys with dots: `objective.correction.high`, `megatron.ddp.bucket_size`."""
    for part, hint in PARTS.items():
        yield f"objective.{part}"
        yield from (f"objective.{part}.{f.name}" for cls in variants(hint).values() for f in dataclasses.fields(cls))
    yield from (f"megatron.{name}.{f.name}" for name, cls in CHECKED.items() for f in dataclasses.fields(cls))
