"""The module that `tepo sft` starts once per rank: `python -m tepo_megatron.trainer.sft.worker runs/NAME/config.yaml`."""

import sys

from tepo_megatron.config import Config
from tepo_megatron.config.io import load_config
from tepo_megatron.dist.platform import Platform
from tepo_megatron.trainer.worker import run_rank


def work(cfg: Config, platform: Platform) -> None:
    """Fine-tune as this rank."""
    from tepo_megatron.trainer.sft.loop import fine_tune  # imports Megatron-Core, so the platform must be active first

    fine_tune(cfg, platform)


if __name__ == "__main__":
    sys.exit(run_rank(load_config(sys.argv[1]), work=work))
