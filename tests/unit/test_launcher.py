"""The ranks of one machine share its cores as threads."""

from __future__ import annotations

import os

from tepo_megatron.launcher.launcher import threads_of_rank


def test_ranks_share_the_cores_and_each_has_a_thread() -> None:
    cores = len(os.sched_getaffinity(0))
    assert threads_of_rank(1) == cores
    assert threads_of_rank(2) == max(1, cores // 2)
    assert threads_of_rank(2 * cores) == 1
