"""The limit on open files: raised where that is allowed, else refused before anything starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from tepo_megatron.config.io import load_config
from tepo_megatron.errors import ConfigError
from tepo_megatron.launcher.open_files import check_open_files, needed_open_files
cfg = load_config("examples/demo.yaml", sys.argv[3:])
needed = needed_open_files(cfg.parallel.world_size, cfg.rollout, cfg.reward)
soft, hard = map(int, sys.argv[1:3])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard or needed))
try:
    check_open_files(needed)
except ConfigError as e:
    print(e)
else:
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= needed
    print("enough")
"""


def test_many_concurrent_requests_are_no_reason_to_refuse_a_low_limit() -> None:
    """The engine sends fewer requests there; see `test_slots.py`."""
    urls = ",".join(f"http://127.0.0.1:{9000 + i}" for i in range(64))
    fields = ["--rollout.servers", "64", "--rollout.server.urls", f"[{urls}]", "--rollout.server.concurrency", "64"]
    words = [sys.executable, "-c", PROGRAM, "1024", "1024", *fields]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert ended.stdout.startswith("enough"), ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("soft", "hard", "said"),
    [
        (64, 64, "a process may open 64 files here, and this run needs"),
        (128, 128, "a process may open 128 files here, and this run needs"),
        (64, 0, "enough"),
    ],
)
def test_a_limit_that_is_too_low_is_raised_or_refused(soft: int, hard: int, said: str) -> None:
    words = [sys.executable, "-c", PROGRAM, str(soft), str(hard)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert ended.stdout.startswith(said), ended.stdout + ended.stderr
