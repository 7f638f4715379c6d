"""Forming a group has a deadline. The other member is a real process that stops after it joined, before the first broadcast."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tepo_megatron.distributed.rendezvous_store import open_store
from tepo_megatron.weight_sync.broadcast_group import SENDER, BroadcastGroup, BrokenGroup, GroupSpec, signal

CPU = torch.device("cpu")
MEMBER = """
import json, os, signal, sys
import torch, torch.distributed as dist
from tepo_megatron.weight_sync.broadcast_group import GroupSpec, form_group

spec = GroupSpec(**json.loads(sys.argv[1]))
group = form_group(spec, 0, spec.first, torch.device("cpu"))
os.kill(os.getpid(), getattr(signal, sys.argv[2]))
"""


@contextmanager
def member(spec: GroupSpec, signal: str) -> Iterator[None]:
    described = json.dumps(dataclasses.asdict(spec))
    process = subprocess.Popen([sys.executable, "-c", MEMBER, described, signal])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSTOP"])
def test_a_member_that_is_lost_after_it_joined_is_noticed_within_the_deadline(signal: str) -> None:
    store = open_store("127.0.0.1")
    spec = GroupSpec("127.0.0.1", store.port, signal, 1, 2, SENDER + 1, seconds=60.0, join_seconds=30.0)
    with member(spec, signal):
        start = time.monotonic()
        with pytest.raises(BrokenGroup):
            BroadcastGroup.form(spec, 0, SENDER, CPU, until=start + 5.0)
        assert time.monotonic() - start < 7.0


def test_forming_a_group_ends_as_soon_as_it_is_called_off() -> None:
    store = open_store("127.0.0.1")
    spec = GroupSpec("127.0.0.1", store.port, "off", 1, 2, SENDER + 1, seconds=60.0, join_seconds=60.0)
    signal(store, spec.joining_key(1))
    start = time.monotonic()
    with pytest.raises(BrokenGroup, match="called off, or not formed within 60 s"):
        BroadcastGroup.form(spec, 0, SENDER, CPU, wanted=lambda: time.monotonic() < start + 0.5 or not tell_off(store, spec))
    assert time.monotonic() - start < 5.0 and store.check([spec.cancelled_key()])


def tell_off(store: torch.distributed.Store, spec: GroupSpec) -> bool:
    signal(store, spec.cancelled_key())
    return True
