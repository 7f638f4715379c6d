"""What a config can say and this version cannot do: refused before anything is started."""

from __future__ import annotations

from tepo_megatron.config import Config
from tepo_megatron.errors import ConfigError


def not_yet(cfg: Config) -> None:
    """Raise ConfigError naming the key, what this version lacks, and what to do without it."""
    if cfg.evaluation.benchmarks:
        raise ConfigError(
            f"evaluation.benchmarks=[{', '.join(cfg.evaluation.benchmarks)}]: this version cannot run benchmarks yet; leave "
            "them out with --evaluation.benchmarks null (data.eval can name a file of held-out problems instead)"
        )
