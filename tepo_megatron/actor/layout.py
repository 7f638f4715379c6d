"""Does the model fit the mesh? Checked without Megatron, before any process is started."""

from __future__ import annotations

from tepo_megatron.config import ParallelConfig
from tepo_megatron.errors import ConfigError
from tepo_megatron.weights.ops import Architecture


def check_layout(arch: Architecture, parallel: ParallelConfig) -> None:
    """Raise ConfigError naming the key, the model's size, and the values that would do."""
    for name, size in (
        ("num_query_groups", arch.num_query_groups),
        ("num_heads", arch.num_heads),
        ("ffn_size", arch.ffn_size),
    ):
        if size % parallel.tp:
            fits = [n for n in divisors(arch.num_query_groups) if arch.num_heads % n == 0 and arch.ffn_size % n == 0]
            raise ConfigError(f"parallel.tp={parallel.tp} does not divide {name}={size}; use {_either(fits)}")
    stages = parallel.pp * parallel.vpp
    if arch.num_layers % stages:
        key = "parallel.pp" if parallel.vpp == 1 else "parallel.pp * parallel.vpp"
        raise ConfigError(
            f"{key}={stages} does not divide num_layers={arch.num_layers}; use {_either(divisors(arch.num_layers))}"
        )
    if parallel.ep > 1:
        raise ConfigError(f"parallel.ep={parallel.ep}: the model has no experts; use 1")


def divisors(n: int) -> list[int]:
    """All divisors of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def _either(values: list[int]) -> str:
    *head, last = [str(v) for v in values]
    return f"{', '.join(head)} or {last}" if head else last
