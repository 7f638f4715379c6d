"""The report of safety checks names the checks that work in a run, by its config."""

import re
from typing import Any

import pytest

from tepo_megatron.config.io import validate
from tepo_megatron.config.safety import checks_that_are_off, safety_checks


def config(**sections: Any) -> Any:
    tree: dict[str, Any] = {"name": "run", "platform": "cpu", "model": {"path": "m"}, "data": {"train": "t"}}
    return validate(tree | sections)


EVAL = {"data": {"train": "t", "eval": "e"}}
# sections of the config -> the check that they turn off, and what is said of it
OFF: list[tuple[dict[str, Any], str]] = [
    ({"rollout": {"replay": "r"}}, r"sync\.max_logprob_diff\): OFF, .*rollout\.replay has no engine"),
    ({"rollout": {"only": True}}, r"sync\.max_logprob_diff\): OFF, .*rollout\.only=true"),
    ({"sync": {"max_logprob_diff": 3.0}}, r"sync\.max_logprob_diff=3 is more than stale weights move a log-prob"),
    ({}, r"sync\.verify_every=0 asks for none"),
    ({"sync": {"verify_every": 73}}, r"sync\.verify_every=73 is more than training\.steps=72: no update is checked"),
    (EVAL, "perhaps never for versions after 71; sync.verify_every=1 "),
    (EVAL | {"rollout": {"max_staleness": 1}}, "perhaps never for versions after 70; sync.verify_every=1 "),
    (EVAL | {"rollout": {"max_staleness": 3}}, "perhaps never for versions after 68; sync.verify_every=1 "),
    (
        {"rollout": {"replay_experts": True, "engine": "sglang"}, "sync": {"verify_every": 1}},
        r"a wrong choice is not seen; a stale router is.*checksums \(sync\.verify_every\) are of routers",
    ),
]


@pytest.mark.parametrize(("sections", "said"), OFF, ids=str)
def test_what_is_not_checked_is_named_with_the_reason(sections: dict[str, Any], said: str) -> None:
    assert re.search(said, "\n".join(checks_that_are_off(safety_checks(config(**sections)))))


SOME = {"sync": {"compared_tokens": 512}}
ALL_TOKENS, SOME_TOKENS = "every token under the weights that sampled it", "about 512 tokens of each server and version"


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({}, ALL_TOKENS),
        ({"rollout": {"max_staleness": 1}}, ALL_TOKENS),
        ({"rollout": {"max_staleness": 3, "on_weight_update": "continue"}}, ALL_TOKENS),
        ({"rollout": {"colocate": True}}, ALL_TOKENS),
        ({"sync": {"max_logprob_diff": 0.4}}, "0.4 nats"),
        (SOME, ALL_TOKENS),
        (SOME | {"rollout": {"max_staleness": 1}}, SOME_TOKENS),
        (SOME | {"training": {"old_logprobs": "rollout"}}, SOME_TOKENS),
    ],
    ids=str,
)
def test_log_probs_are_compared_in_every_mode(sections: dict[str, Any], said: str) -> None:
    checks = safety_checks(config(**sections))
    assert [check.works for check in checks] == [True, True, False] and said in str(checks[0])


def test_checksums_say_when_and_of_what() -> None:
    (check,) = [c for c in safety_checks(config(sync={"verify_every": 4})) if "checksums" in c.name]
    assert check.works and "multiple of 4" in check.state and "none of linear layers" in check.state
