"""The report of safety checks names the checks that work in a run, by its config."""

from typing import Any

import pytest

from tepo_megatron.config.io import validate
from tepo_megatron.config.safety import checks_that_are_off, safety_checks


def config(**sections: Any) -> Any:
    tree: dict[str, Any] = {"name": "run", "platform": "cpu", "model": {"path": "m"}, "data": {"train": "t"}}
    return validate(tree | sections)


@pytest.mark.parametrize(
    "rollout", [{}, {"max_staleness": 1}, {"max_staleness": 3, "on_weight_update": "continue"}, {"colocate": True}]
)
def test_log_probs_are_compared_in_every_mode(rollout: dict[str, Any]) -> None:
    checks = safety_checks(config(rollout=rollout))
    assert [check.works for check in checks] == [True, True, False]
    assert "every token under the weights that sampled it" in str(checks[0]) and "0.05 nats" in str(checks[0])


def test_a_sample_of_the_tokens_is_called_one_where_it_is() -> None:
    sync = {"compared_tokens": 512}
    assert "every token" in str(safety_checks(config(sync=sync))[0])
    for sections in ({"rollout": {"max_staleness": 1}}, {"training": {"old_logprobs": "rollout"}}):
        assert "about 512 tokens of each server and version" in str(safety_checks(config(sync=sync, **sections))[0])


@pytest.mark.parametrize(
    ("rollout", "why"), [({"replay": "r"}, "rollout.replay has no engine"), ({"only": True}, "rollout.only=true")]
)
def test_what_cannot_be_checked_is_named_with_the_reason(rollout: dict[str, Any], why: str) -> None:
    lines = checks_that_are_off(safety_checks(config(rollout=rollout)))
    assert len(lines) == 3 and "sync.max_logprob_diff): OFF, " in lines[0] and why in lines[0]


def test_checksums_say_when_and_of_what() -> None:
    assert "sync.verify_every=0 asks for none" in checks_that_are_off(safety_checks(config()))[0]
    (check,) = [c for c in safety_checks(config(sync={"verify_every": 4})) if "checksums" in c.name]
    assert check.works and "multiple of 4" in check.state and "none of linear layers" in check.state
    (line,) = [line for line in checks_that_are_off(safety_checks(config(sync={"verify_every": 73}))) if "checksums" in line]
    assert "sync.verify_every=73 is more than training.steps=72: no update is checked" in line


def test_a_limit_that_no_stale_weights_reach_is_no_gate() -> None:
    assert safety_checks(config(sync={"max_logprob_diff": 0.4}))[0].works
    assert (
        "sync.max_logprob_diff=3 is more than stale weights move a log-prob"
        in checks_that_are_off(safety_checks(config(sync={"max_logprob_diff": 3.0})))[0]
    )


@pytest.mark.parametrize(("staleness", "newest"), [(0, 71), (1, 70), (3, 68)])
def test_evaluations_are_said_not_to_be_compared(staleness: int, newest: int) -> None:
    cfg = config(data={"train": "t", "eval": "e"}, rollout={"max_staleness": staleness})
    assert f"of those after version {newest} perhaps none" in checks_that_are_off(safety_checks(cfg))[0]


def test_what_replayed_experts_hide_is_said() -> None:
    cfg = config(rollout={"replay_experts": True, "engine": "sglang"}, sync={"verify_every": 1})
    (line,) = checks_that_are_off(safety_checks(cfg))
    assert "a wrong choice is not seen; a stale router is" in line and "checksums (sync.verify_every) are of routers" in line
