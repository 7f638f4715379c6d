"""The table of the config keys that were renamed or removed. `config/renamed.py` applies it."""

from tepo_megatron.config.renamed import Renamed

RENAMED: tuple[Renamed, ...] = (
    # the sections objective, optimizer, training, megatron and model
    # the sections rollout, sync, reward, data, checkpoint, evaluation and logging
)
