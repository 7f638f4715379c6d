"""Rewards of programs: every form of tests, credit, statuses, data, and programs that want to pass without being right."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.base.types import Rollout
from tepo_megatron.config import RewardConfig
from tepo_megatron.config.io import validate_as
from tepo_megatron.data.schemas import gold
from tepo_megatron.rewards.build import build_reward, check_reward
from tepo_megatron.rewards.gold_check import unreadable_golds
from tepo_megatron.rewards.grading.programs import find_program, read_tests, same_output
from tepo_megatron.rewards.terms import WeightedReward

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bwrap (Debian: apt-get install bubblewrap)")
ADD = "def add(a, b):\n    return a + b\n"
ASSERT = ["assert add(1, 2) == 3"]
STDIN = json.dumps({"inputs": ["1 2\n", "30 4\n"], "outputs": ["3\n", "34"]})
# form of the tests -> (gold answer as in a dataset, a right program)
FORMS: dict[str, tuple[object, str]] = {
    "apps": (STDIN, "a, b = map(int, input().split())\nprint(a + b)"),
    "apps, lines": ({"inputs": [["1", "2"]], "outputs": [["3"]]}, "print(int(input()) + int(input()))"),
    "taco": ({"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [[1, 2]]]}, ADD),
    "solution": (
        {"fn_name": "add", "inputs": [[1, 2.0]], "outputs": [3.0]}, "class Solution:\n  def add(self, a, b): return a + b",
    ),
    "livecodebench": ([{"input": "2\n", "output": "4\n", "testtype": "stdin"}], "print(2 * int(input()))"),
    "livecodebench, functional": (
        {"fn_name": "add", "tests": [{"input": '"a"\n"b"', "output": '"ab"', "testtype": "functional"}]}, ADD,
    ),
    "mbpp": (["assert add(1, 2) == 3", "assert add(b=1, a=(2,)[0]) == 3"], ADD),
    "mbpp, setup": ({"test_list": ["assert math.isclose(add(0.1, 0.2), 0.3)"], "test_setup_code": "import math"}, ADD),
    "humaneval": ({"test": "def check(f):\n    assert f(1, 2) == 3\n    assert f('', '') == ''\n", "entry_point": "add"}, ADD),
    "lines": ("assert add(1, 2) == 3\nassert add(2, 2) == 4", ADD),
}  # fmt: skip
# a program that is wrong and tries to pass -> the tests
CHEATS: dict[str, tuple[str, object]] = {
    "exits": ("import sys; sys.exit(0)", STDIN),
    "exits at once": ("import os; os._exit(0)", ASSERT),
    "ends in the call": ("import os\ndef add(a, b): os._exit(0)", ASSERT),
    "equals everything": (
        "class E:\n  def __eq__(self, o): return True\n  __hash__ = None\ndef add(a, b): return E()", ASSERT,
    ),
    "is a number that equals everything": (
        "class E(int):\n  def __eq__(self, o): return True\ndef add(a, b): return E(7)", ASSERT,
    ),
    "redefines set": ("def set(x): return 0\ndef add(a, b): return [7]", ["assert set(add(1, 2)) == set([3])"]),
    "redefines check": ("def check(f): pass\ndef add(a, b): return 7", FORMS["humaneval"][0]),
    "raises SystemExit": ("def add(a, b): raise SystemExit(0)", ASSERT),
    "ends where an error is expected": (
        "import os\ndef add(a, b): os._exit(0)",
        {"test_list": ["try:\n  add(1, 2)\n  assert False\nexcept ValueError: pass"]},
    ),
    "changes assert": ("import builtins\nbuiltins.AssertionError = Exception\ndef add(a, b): return 7", ASSERT),
    "writes results": (
        "import os\nfor i in range(256):\n  try: os.write(i, b'[true]\\n')\n  except OSError: pass\n"
        "def add(a, b): return 7", ASSERT,
    ),
    "answers by itself": (
        "import os\nfor i in range(3, 64):\n  try: os.write(i, b'[\"value\", \"7\"]\\n')\n  except OSError: pass", ASSERT,
    ),
    "reads the tests": (
        "import os, sys\nfor top, folders, names in os.walk('/'):\n  for n in names:\n    if n == 'tests.json': print('34')\n"
        "  folders[:] = [f for f in folders if os.path.join(top, f) not in ('/usr', '/proc', sys.base_prefix)]", STDIN,
    ),
    "prints both": ("print(3)\nprint(34)", STDIN),
    "returns code": (
        "def add(a, b):\n  class R:\n    def __repr__(self): return '__import__(\"os\") and 3'\n  return R()", ASSERT,
    ),
    "has an attribute that is false": ("class S:\n  x = False\ndef add(a, b): return S()", ["assert add(1, 2).x"]),
    "returns an object that is no text": ("class S: pass\ndef add(a, b): return S()", ["assert str(add(1, 2))"]),
    "returns depth": ("def add(a, b):\n  x = []\n  for _ in range(20000): x = [x]\n  return x", ASSERT),
}  # fmt: skip


def config(**term: object) -> RewardConfig:
    return validate_as(RewardConfig, {"terms": [{"type": "code", "run_seconds": 2.0} | term], "workers": 2}, "reward")


@pytest.fixture(scope="module")
def reward() -> Iterator[WeightedReward]:
    with build_reward(config(), lambda ids: bytes(ids).decode()) as reward:
        yield reward


def rollout(program: str | None, answer: object) -> Rollout:
    text = "No idea." if program is None else f"First:\n```\nprint(1)\n```\nBetter:\n```python\n{program}\n```\nDone."
    ids = torch.tensor([*b"?", *text.encode()])
    mask = torch.arange(len(ids)) > 0
    return Rollout(0, ids, mask, torch.zeros(len(ids)), 0, "stop", answer=gold(answer, "tests"))


def test_every_form_of_tests(reward: WeightedReward) -> None:
    right = reward.score([rollout(program, answer) for answer, program in FORMS.values()])
    changed = [(program.replace(" + ", " - ").replace("2 * ", "3 * "), answer) for answer, program in FORMS.values()]
    wrong = reward.score([rollout(program, answer) for program, answer in changed])
    found = dict(zip(FORMS, zip([r.status for r in right], [r.status for r in wrong], strict=True), strict=True))
    assert found == dict.fromkeys(FORMS, ("passed", "failed"))
    assert all(r.reward == r.score == 1.0 for r in right) and not any(r.reward for r in wrong)


def test_nobody_passes_without_being_right(reward: WeightedReward) -> None:
    graded = reward.score([rollout(*cheat) for cheat in CHEATS.values()])
    assert dict(zip(CHEATS, [(r.status, r.reward) for r in graded], strict=True)) == dict.fromkeys(CHEATS, ("failed", 0.0))


def test_statuses_and_credit(reward: WeightedReward) -> None:
    half = "a, b = map(int, input().split())\nprint(3)"
    cases = [(None, STDIN), (half, STDIN), (half, '{"inputs": ["1"]}'), ("while True: pass", STDIN)]
    assert [r.status for r in reward.score([rollout(*case) for case in cases])] == ["no_code", "failed", "bad_tests", "timeout"]
    with build_reward(config(credit="share"), lambda ids: bytes(ids).decode()) as sharing:
        (graded,) = sharing.score([rollout(half, STDIN)])
    assert (graded.status, graded.reward) == ("failed", 0.5)


def test_programs_outputs_and_bad_tests() -> None:
    assert find_program("```python\na\n```\n~~~\n```\nb\n```") == "b\n" and find_program("```python\na") is None
    assert same_output("1 \n2\n\n", "1\n2") and same_output("0.333333", "0.3333335") and same_output("a\n\nb", "a b")
    assert not same_output("1", "2") and not same_output("1000001", "1000000") and not same_output("nan", "nan.")
    for answer, why in (
        ("{", "neither JSON nor"), ("{}", "its keys are"), ("[]", "no test"),
        ('{"inputs": [1], "outputs": []}', "1 inputs and 0"),
        ('[{"input": "1", "output": "2", "testtype": "functional"}]', "give its name as fn_name"),
        ('{"fn_name": "a b", "inputs": [[1]], "outputs": [1]}', "no name of a function"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=why):
            read_tests(answer)
    assert unreadable_golds([STDIN, "{}"], config(), 1.0) == ({"{}": "bad_tests"}, 0)


def test_a_machine_without_a_sandbox_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check_reward(config())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="bwrap is not there; install bubblewrap"):
        check_reward(config())
