"""Numbers of tested cases in the documentation are those of the tests."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import stale_weights
from tests.parallel import test_gate_switches, test_plan_memory
from tests.unit import test_damaged_records
from tests.unit.rewards import test_code_reward
from tests.unit.rollout import test_gateway, test_tool_calls

DOCS = Path(__file__).parents[3] / "docs"
COUNTS: list[tuple[str, str, Callable[[], int]]] = [  # page, its words with the number, the number
    ("agents.md", r"runs (\d+) hostile agents", lambda: len(test_gateway.HOSTILE)),
    ("agents.md", r"compares\s+(\d+) texts with vLLM's", lambda: len(test_tool_calls.CASES)),
    ("code_rewards.md", r"test_code_reward.py` (\d+) that try to pass", lambda: len(test_code_reward.CHEATS)),
    ("faults.md", r"has (\d+) damaged files", lambda: len(test_damaged_records.DAMAGES)),
    ("faults.md", r"in (\d+) modes, with", lambda: len(stale_weights.TURNS | stale_weights.WAYS)),
    ("faults.md", r"every pair of values of (\d+) switches", lambda: len(test_gate_switches.SWITCHES)),
    ("plan.md", r"to the byte, on (\d+) combinations", lambda: len(test_plan_memory.CASES)),
    ("plan.md", r"to the byte, on the (\d+) combinations", lambda: len(test_plan_memory.CASES)),
]


@pytest.mark.parametrize(("page", "words", "count"), COUNTS, ids=[f"{page}-{i}" for i, (page, *_) in enumerate(COUNTS)])
def test_a_number_of_cases_is_that_of_the_tests(page: str, words: str, count: Callable[[], int]) -> None:
    found = re.findall(words, (DOCS / page).read_text())
    assert found == [str(count())], f"docs/{page}: {words}"
