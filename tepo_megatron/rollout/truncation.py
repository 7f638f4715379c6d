"""Check, before anything is started, that the engine can return the sampling masks of the model."""

from tepo_megatron.config import RolloutConfig
from tepo_megatron.errors import ConfigError
from tepo_megatron.types import MASK_TIES


def check_truncation(cfg: RolloutConfig, vocab_size: int) -> None:
    """Raise ConfigError if the engine would be asked for more log-probs per token than the vocabulary has."""
    if cfg.replay is None and cfg.engine_returns_masks and cfg.top_k + MASK_TIES > vocab_size:
        raise ConfigError(
            f"rollout.top_k={cfg.top_k}: the engine is asked for {MASK_TIES} tokens more, and the model's vocabulary has "
            f"{vocab_size}; lower it to {vocab_size - MASK_TIES}, or set it to -1"
        )
