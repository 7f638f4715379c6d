"""The checksums that servers report: compared by themselves, and asked of a fleet of real processes."""

from pathlib import Path

import pytest

from tepo_megatron.base.errors import SyncError
from tepo_megatron.engines.servers.updates import ChecksumChecks
from tests.unit.rollout.test_fleet import behave, fleet

NORM, QUERY = "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight"
SENT = {NORM: 1, QUERY: 2, "model.embed_tokens.weight": 3}
SERVED = {f"tp0:{NORM}": "a", "tp0:model.layers.0.self_attn.qkv_proj.weight": "b", "tp0:model.embed_tokens.weight": "c"}


def check(now: dict[str, str], sent: dict[str, int], same_precision: bool = True, before: dict[str, str] = SERVED) -> None:
    checks = ChecksumChecks(same_precision)
    checks.compare(1, {"server 0": before}, SENT)
    checks.compare(2, {"server 0": now}, sent)


def test_what_changed_as_it_should_passes() -> None:
    check(SERVED, SENT)
    check(SERVED | {f"tp0:{NORM}": "other"}, SENT | {NORM: 9})
    check(SERVED, SENT | {"model.layers.0.mlp.experts.3.up_proj.weight": 9})  # nothing is known of it


@pytest.mark.parametrize("name", [NORM, QUERY])
def test_a_tensor_that_changed_on_one_side_alone_is_named(name: str) -> None:
    with pytest.raises(SyncError, match=f"version 2: server 0 still serves those of before: {name}$"):
        check({n: c if _is(n, name) else "other" for n, c in SERVED.items()}, dict.fromkeys(SENT, 9))


def _is(theirs: str, name: str) -> bool:
    return theirs.endswith(name.replace("q_proj", "qkv_proj"))


def test_a_cast_may_swallow_a_change_but_not_all() -> None:
    sent = SENT | {NORM: 9, QUERY: 9}
    moved = SERVED | {"tp0:model.layers.0.self_attn.qkv_proj.weight": "other"}
    check(moved, sent, same_precision=False)
    with pytest.raises(SyncError, match="still serves"):
        check(moved, sent)
    with pytest.raises(SyncError, match=f"{NORM}, {QUERY}"):
        check(SERVED, sent, same_precision=False)


@pytest.mark.slow
def test_a_server_that_says_otherwise_ends_the_fleet(tmp_path: Path) -> None:
    with fleet(tmp_path, servers=2) as two:
        two.update_weights([Path("a")], 1)
        two.verify(SENT)  # these have no checksums
        for i in range(2):
            behave(two, i, checksums=SERVED)
        two.verify(SENT)
        behave(two, 1, checksums=SERVED | {f"tp0:{NORM}": "other"})
        with pytest.raises(SyncError, match=f"version 1: server 0 and server 1 serve different ones: tp0:{NORM}$"):
            two.verify(SENT)
        with pytest.raises(SyncError, match="the check of version 1 failed; the engine can no longer be used"):
            two.begin_update(2)
