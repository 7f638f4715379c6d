"""An update in rounds, on a fleet of real processes that refuse, die and come back in the middle of it."""

import threading
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.base.errors import SyncError
from tepo_megatron.engines.engine import INITIAL_VERSION
from tepo_megatron.engines.servers.fleet import Fleet
from tests.direct_requests import ask
from tests.unit.rollout.test_fleet import PROMPTS, SAMPLING, behave, fleet, process
from tests.waiting import until

pytestmark = pytest.mark.slow
ROUNDS = [[Path("a"), Path("b")], [Path("c")]]


def about(fleet: Fleet, server: int) -> Any:
    """Return the server's own report of its last update."""
    return ask(fleet, server, "GET", "/health")


def loaded(fleet: Fleet, server: int) -> Any:
    """The files of the server's last update."""
    return about(fleet, server)["loaded"]


def versions(fleet: Fleet) -> set[int]:
    return {r.policy_version for r in fleet.generate(PROMPTS, SAMPLING, seed=0)}


def test_nothing_is_served_until_the_update_is_finished(tmp_path: Path) -> None:
    with fleet(tmp_path, servers=2) as two:
        behave(two, 0, loading=0.3)
        two.begin_update(1)
        served: list[set[int]] = []
        asking = threading.Thread(target=lambda: served.append(versions(two)))
        asking.start()
        first = two.load(ROUNDS[0])
        assert not first.done()  # the caller goes on
        first.result()
        two.load(ROUNDS[1]).result()
        assert not served
        two.finish_update()
        asking.join()
        assert served == [{1}] and not two.needs_weights
        assert all(loaded(two, i) == ["a", "b", "c"] for i in range(2))


@pytest.mark.parametrize("at", ["/begin", "/load", "/update"])
def test_a_server_that_dies_of_it_asks_for_the_weights_and_the_others_go_on(at: str, tmp_path: Path) -> None:
    with fleet(tmp_path, servers=2) as two:
        behave(two, 0, die=True, at=at)
        two.begin_update(1)
        two.load(ROUNDS[0]).result()
        if at != "/update":
            until(lambda: two.slots[0].up and two.slots[0].restart_count == 1)  # back before the update is over
        two.load(ROUNDS[1]).result()
        two.finish_update()
        assert versions(two) == {1} and loaded(two, 1) == ["a", "b", "c"]
        until(lambda: two.needs_weights)
        assert loaded(two, 0) is None  # it joined too late to take part
        two.update_weights([Path("all")], 1)
        assert loaded(two, 0) == ["all"] and loaded(two, 1) == ["a", "b", "c"]


def test_servers_of_an_update_whose_sender_is_gone_get_all_weights_again(tmp_path: Path) -> None:
    """The update may have been anywhere; nothing is restarted, and a refusal that came of it does not count."""
    with fleet(tmp_path, servers=2) as two:
        two.abandon_update()  # there was none
        two.update_weights([Path("all")], 1)
        two.begin_update(2)
        two.load(ROUNDS[0]).result()
        two.abandon_update()
        assert two.needs_weights and two.version == 2
        two.update_weights([Path("again")], 2)
        assert versions(two) == {2} and all(loaded(two, i) == ["again"] for i in range(2))
        behave(two, 0, refuse=True, at="/load")
        two.begin_update(3)
        with pytest.raises(SyncError):
            two.load(ROUNDS[0]).result()
        two.abandon_update()
        behave(two, 0)
        two.update_weights([Path("last")], 3)
        assert versions(two) == {3} and all(loaded(two, i) == ["last"] for i in range(2))
        two.abandon_update()  # after its end: the new sender may have other weights of the same version
        assert not two.needs_weights and versions(two) == {3}
        two.update_weights([Path("own")], 3)
        assert versions(two) == {3} and all(loaded(two, i) == ["own"] for i in range(2))
        assert [slot.restart_count for slot in two.slots] == [0, 0]


def test_tensors_stay_only_where_all_servers_have_the_same_version(tmp_path: Path) -> None:
    with fleet(tmp_path, servers=2) as two:
        for version, base, names in ((1, INITIAL_VERSION, []), (2, 1, ["kept"])):
            two.begin_update(version)
            assert two.base == base
            two.keep_unchanged(names)
            two.finish_update()
            said = {"version": version, "base": base, "names": names}
            assert [about(two, i)["kept"] for i in range(2)] == [said, said]
        process(two, 1).kill()
        until(lambda: two.needs_weights)
        two.begin_update(3)
        assert two.base is None  # one of them has what it was started with
        two.keep_unchanged([])
        behave(two, 0, refuse=True, at="/keep")
        with pytest.raises(SyncError, match="server 0 answered /keep with 500"):
            two.keep_unchanged([])
