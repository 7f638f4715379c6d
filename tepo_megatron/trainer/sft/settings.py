"""The config, the loss and the order of the conversations of supervised fine-tuning.

The masked cross-entropy, averaged over the learned tokens of an update, is REINFORCE with advantage 1 at temperature 1: its
loss is -log p of each token. So the same code computes it, with the same collectives, as an RL loss.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.base.seeding import derive_seed
from tepo_megatron.config import DataConfig, SftConfig, TrainingConfig
from tepo_megatron.config.io import parse_overrides, read_layers, set_key
from tepo_megatron.config.layers import Layers
from tepo_megatron.losses import Objective

CROSS_ENTROPY = Objective(ratio="none", surrogate="reinforce", aggregate="token_mean")
_OF_RL = ("rollout", "reward", "objective", "sync", "evaluation")
_KEPT = {"data": ("template_kwargs", "skip_bad_rows"), "rollout": ("stop_token_ids",)}  # of sections that are left out


def read_tree(path: str, words: list[str]) -> Layers:
    """Read a YAML file on top of its base files, apply the overrides, and leave out what fine-tuning does not use.

    Raises ConfigError if `sft.data` is not set, or a file or an override cannot be read.
    """
    layers = read_layers(path)
    for key, value in parse_overrides(words):
        override: dict[str, Any] = {}
        set_key(override, key, value)
        layers.add(override, "command line")
    layers.tree = supervised(layers.tree)
    return layers


def supervised(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a training config with which the actor is built for fine-tuning.

    Sections of RL have their defaults, so what they ask of each other does not matter.
    """
    actor_tree = {key: value for key, value in deepcopy(dict(tree)).items() if key not in _OF_RL}
    sft = actor_tree.get("sft") or {}
    if not isinstance(sft, dict) or sft.get("data") is None:
        raise ConfigError("sft.data is not set; give tepo sft a file of conversations: --sft.data FILE")
    most = sft.get("max_tokens", SftConfig.max_tokens)
    own = {name: {k: v for k, v in (tree.get(name) or {}).items() if k in keys} for name, keys in _KEPT.items()}
    actor_tree["rollout"] = own["rollout"] | {"max_response_tokens": most - 1 if isinstance(most, int) else most}
    actor_tree["rollout"] |= {"temperature": 1.0, "prompts_per_step": 1}
    actor_tree["data"] = own["data"] | {"train": sft["data"], "max_prompt_tokens": 1}
    training = {"stream": "off", "epochs": 1, "minibatch_prompts": 1, "share_prompts": "never"}
    actor_tree["training"] = (actor_tree.get("training") or {}) | training
    fits = actor_tree["training"].get("max_tokens_per_microbatch", TrainingConfig.max_tokens_per_microbatch)
    if isinstance(most, int) and isinstance(fits, int) and most > fits:
        raise ConfigError(
            f"training.max_tokens_per_microbatch={fits} cannot hold one sequence of {most} tokens (sft.max_tokens); raise it, "
            "or lower that"
        )
    actor_tree["checkpoint"] = (actor_tree.get("checkpoint") or {}) | {"keep_best": False}
    return actor_tree


def is_supervised(sft: SftConfig, data: DataConfig) -> bool:
    """Return whether `supervised` has made the config of these sections: no training by RL has prompts of one token."""
    return sft.data is not None and sft.data == data.train and data.max_prompt_tokens == 1


@dataclass(frozen=True)
class TrainingPlan:
    """Which conversations each update learns from. The order depends on the seed alone, so a resume needs a step alone."""

    conversations: int
    per_update: int  # conversations of an update; the last one of a pass may have fewer
    epochs: int  # passes over the conversations, each in another order
    limit: int | None  # most updates; None: no limit
    seed: int

    @property
    def updates_per_epoch(self) -> int:
        """Return the number of updates of a whole pass."""
        return -(-self.conversations // self.per_update)

    @property
    def steps(self) -> int:
        """Return the number of updates of the run."""
        every = self.epochs * self.updates_per_epoch
        return every if self.limit is None else min(self.limit, every)

    def indices(self, step: int) -> list[int]:
        """Return the conversations of an update."""
        epoch, update = divmod(step - 1, self.updates_per_epoch)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "sft", epoch))
        order = torch.randperm(self.conversations, generator=generator).tolist()
        return order[update * self.per_update : (update + 1) * self.per_update]
