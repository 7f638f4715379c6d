"""The config defaults that differ between `platform: cpu` and `platform: cuda`, in one table.

A key in this table is `null` or `auto` in the config until somebody sets it; `default_of` gives the value of the platform then.
Nothing else in the package may choose a value of a config key by the platform. The recipe gate (`tests/gate/`) trains every
shipped YAML on a CPU with the `cuda` column forced on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class PlatformDefault:
    """The value that a key takes on each platform when the config leaves it at null, and the reason for the difference."""

    cpu: Any
    cuda: Any
    why: str


PLATFORM_DEFAULTS: Mapping[str, PlatformDefault] = {
    "megatron.ddp.overlap_grad_reduce": PlatformDefault(False, True, "gloo has no stream that runs next to the backward pass"),
    "megatron.ddp.overlap_param_gather": PlatformDefault(False, True, "gloo has no stream that runs next to the forward pass"),
    "training.share_prompts": PlatformDefault(
        "where it saves", "never", "Transformer Engine's packed attention cannot share keys; on GPUs it is not measured"
    ),
    "megatron.transformer.gradient_accumulation_fusion": PlatformDefault(
        False, True, "saves a GPU one write and two reads of every weight gradient; published CPU runs were made without"
    ),
}


def default_of(key: str, platform: str, value: T | None) -> T:
    """Return `value`, or the platform's default where `value` is None."""
    return getattr(PLATFORM_DEFAULTS[key], platform) if value is None else value


# Limit since the invitation to a group of sync.transport=group: the first start of NCCL over InfiniBand takes minutes, the
# ranks are past their start; then the groups are formed again, and after some attempts SyncError
JOIN_SECONDS = PlatformDefault(30.0, 300.0, "the first start of NCCL over InfiniBand can take minutes")


def join_seconds(platform: str) -> float:
    """Return the seconds in which ranks and servers must have formed the groups of `sync.transport=group`, in one attempt.

    The groups are formed at the first delivery and again whenever a server comes back, and connect in a broadcast of one byte.
    """
    return getattr(JOIN_SECONDS, platform)
