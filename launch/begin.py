"""`python -m launch.begin CONFIG`, on the first machine of a managed job of SkyPilot, before any machine's part of the run.

Counts the starts of the job in the run's folder; at the first makes that folder, as `launch` itself does under Slurm.
"""

from __future__ import annotations

import os
import sys

from tepo_megatron import run_dir
from tepo_megatron.config_io import load_config
from tepo_megatron.errors import TepoError


def begin(config: str, task_id: str) -> int:
    """The number of this start. task_id: SkyPilot's, the same in each start of a job.

    Raises ConfigError where `tepo train` would.
    """
    cfg = load_config(config)
    count = cfg.run_dir / "launch" / f"{task_id}.starts"
    number = 1 + (int(count.read_text()) if count.exists() else 0)
    if number == 1:
        run_dir.prepare(cfg)
        count.parent.mkdir(exist_ok=True)
    part = count.with_suffix(".part")
    part.write_text(f"{number}\n")
    part.replace(count)
    return number


if __name__ == "__main__":
    try:
        print(f"launch: start {begin(sys.argv[1], os.environ['SKYPILOT_TASK_ID'])} of this job")
    except TepoError as e:
        sys.exit(f"launch: error: {e}")
