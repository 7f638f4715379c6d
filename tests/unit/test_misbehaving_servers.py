"""Every client of ours survives every answer of a server: in time, in little memory, with an error that is safe to print."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from tepo_megatron.utils.escaping import escaped
from tepo_megatron.utils.exchange import ERROR_BYTES, BadAnswer, BlockingHttpClient, TimedOut
from tests import misbehaving
from tests.misbehaving_clients import ASKS_FOR_HEALTH, CLIENTS, DEADLINE, KEY

SLACK = 20.0  # seconds, for a machine that is busy; without a deadline a server goes on for misbehaving.LASTS
GROWTH = 200.0  # MiB
ERRORS = {"RewardError", "RequestFailed", "RolloutError", "SyncError", "ConfigError", "StaleWeights"}
Pairs = set[tuple[str, str]]  # (client, kind)
ALL: Pairs = {(client, kind) for client in CLIENTS for kind in misbehaving.KINDS}


def sample() -> Pairs:
    """Every kind against one client that reads what is answered, in turn, and every other client against two that last."""
    readers = itertools.cycle(sorted(CLIENTS.keys() - set(ASKS_FOR_HEALTH)))
    lasting = itertools.cycle(sorted(misbehaving.ENDLESS))
    pairs = {(next(readers), kind) for kind in misbehaving.KINDS}
    return pairs | {(client, next(lasting)) for client in ASKS_FOR_HEALTH for _ in range(2)}


def test_the_sample_has_every_kind_and_every_client() -> None:
    assert len(misbehaving.KINDS) >= 40
    assert {kind for _, kind in sample()} == set(misbehaving.KINDS) and {client for client, _ in sample()} == CLIENTS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [sample, pytest.param(lambda: ALL - sample(), id="others", marks=pytest.mark.full)])
def test_every_client_ends_in_time_with_an_error_that_is_safe(chosen: Callable[[], Pairs]) -> None:
    pairs = sorted(chosen())
    misbehaving.seen.clear()
    with misbehaving.serving() as url:
        done = subprocess.run(
            [sys.executable, "-m", "tests.misbehaving_clients", url, json.dumps(pairs)],
            env=os.environ | {"TEPO_TEST_KEY": KEY},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(row["client"], row["kind"]) for row in rows} == set(pairs) and len(rows) == len(pairs)
    for row in rows:
        assert row["seconds"] < 3 * DEADLINE + SLACK, row
        assert row["grown"] < GROWTH, row
        assert escaped(row["said"]) == row["said"] and len(row["said"]) < 1000 and KEY not in row["said"], row
        if row["client"] not in ASKS_FOR_HEALTH:  # health is asked for by status alone
            assert row["ended"] in ERRORS, row
        elif row["kind"] in misbehaving.ENDLESS:
            assert row["ended"] in ERRORS or row["said"] == "False", row
    assert f"Bearer {KEY}" in {key for _, key in misbehaving.seen}
    assert {kind for kind, _ in misbehaving.seen} <= set(misbehaving.KINDS), "somebody went where a redirect led"


def test_each_limit_holds_by_itself() -> None:
    """With a deadline that no busy machine meets, so that it cannot hide a size that is not limited."""
    with misbehaving.serving() as url, contextlib.closing(BlockingHttpClient(url)) as http:
        for kind in ("endless_body", "chunks_never_end", "length_absurd"):
            with pytest.raises(BadAnswer, match=r"^more than 1048576 bytes"):
                http.exchange("GET", f"/{kind}", seconds=50.0, most_bytes=misbehaving.MIB)
        for kind in ("gzip_bomb", "nested_gzip"):
            with pytest.raises(BadAnswer, match="a body that is compressed"):
                http.exchange("GET", f"/{kind}", seconds=50.0)
        assert len(http.exchange("GET", "/error_with_endless_body", seconds=50.0).body) == ERROR_BYTES
        assert http.exchange("GET", "/redirects_elsewhere", seconds=50.0).status == 307
        with pytest.raises(TimedOut):
            http.exchange("GET", "/drip", seconds=0.5)
