"""Begin a start of a SkyPilot managed job: `python -m launch.bootstrap CONFIG`, on its first machine, before the run.

It counts the job's starts in the run's folder and records the packages of the machine. At the first start it creates that
folder.
"""

from __future__ import annotations

import os
import sys

from launch import packages
from tepo_megatron.config.io import load_config
from tepo_megatron.errors import TepoError
from tepo_megatron.observability import run_dir
from tepo_megatron.utils.atomic import replace_file


def count_start(config: str, task_id: str) -> int:
    """Count a start of the job.

    Returns:
        The number of this start, from 1.

    Raises:
        ConfigError: As `tepo train`.
    """
    cfg = load_config(config)
    count = cfg.run_dir / "launch" / f"{task_id}.starts"
    number = 1 + (int(count.read_text()) if count.exists() else 0)
    if number == 1:
        run_dir.prepare(cfg)
        count.parent.mkdir(exist_ok=True)
    packages.record(count.with_suffix(".packages.json"))
    replace_file(count, f"{number}\n".encode(), durable=False)
    return number


if __name__ == "__main__":
    try:
        print(f"launch: start {count_start(sys.argv[1], os.environ['SKYPILOT_TASK_ID'])} of this job")
    except TepoError as e:
        sys.exit(f"launch: error: {e}")
