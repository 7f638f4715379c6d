"""Sums of terms: what each gives, what is the verdict, and what is refused."""

import dataclasses
import itertools
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.base.errors import ConfigError, RewardError
from tepo_megatron.base.types import Rollout
from tepo_megatron.config import RewardConfig
from tepo_megatron.config.io import validate, validate_as
from tepo_megatron.rewards.build import build_reward, check_reward
from tepo_megatron.rewards.grading.answers import gold_fault, last_answer
from tepo_megatron.rewards.local import LengthTerm
from tepo_megatron.rewards.terms import Response
from tests.graded import decode, rollout

FUNCTIONS = """
import os, time

def share(prompt, response, answer):
    return response.count(answer) / len(response) + 100 * len(prompt)

def verdict(prompt: str, response: str, answer: str, strict: bool = True) -> bool:
    return response == answer and strict is True

def column(prompt, response, answer, scale=1, *, row):
    return scale * (row["points"] if response == answer else row.get("penalty", 0))

def fails(prompt, response, answer):
    return 1 / (len(response) - 3)

def leaves(prompt, response, answer):
    raise SystemExit(3)

def text(prompt, response, answer):
    return "1.0"

def nothing(prompt, response, answer):
    return None

def endless(prompt, response, answer):
    while response == "loop":
        pass
    if response == "die":
        os._exit(1)
    print('"ready"', "noise", flush=True)
    return 1

def infinite(prompt, response, answer):
    return float("inf")

def two(prompt, response): ...
number = 7
"""


def test_what_tools_wrote_is_neither_graded_nor_the_prompt() -> None:
    tokens, chosen = torch.tensor([4, 5, 6, 7, 8, 9]), torch.tensor([False, False, True, False, False, True])
    one = Rollout(0, tokens, chosen, torch.zeros(6), 0, "stop", answer="9")
    response = Response(one, lambda ids: " ".join(map(str, ids)))
    assert (response.prompt, response.written, response.tokens, response.answer) == ("4 5", "6 9", 2, "9")


def config(*terms: dict[str, Any], **settings: Any) -> RewardConfig:
    return validate_as(RewardConfig, {"terms": list(terms), "workers": 1, **settings}, "config")


def score(cfg: RewardConfig, rollouts: Sequence[Rollout]) -> list[Rollout]:
    check_reward(cfg)
    with build_reward(cfg, decode) as reward:
        return reward.score(rollouts)


@pytest.fixture
def functions(tmp_path: Path) -> str:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return str(tmp_path / "functions.py")


# sums


def test_the_first_term_is_the_verdict_and_the_others_shape() -> None:
    cfg = config(
        {"type": "math", "weight": 2.0},
        {"type": "format", "pattern": r"<think>.*</think>.*", "weight": 0.5},
        {"type": "length", "max_tokens": 10, "weight": -0.1},
    )
    rollouts = [
        rollout("<think>\n1\n</think> \\boxed{7}", "7", 3),
        rollout(r"\boxed{7}", "7", 4),
        rollout("<think></think>", "7", 5),
        rollout("no", "7", 6),
    ]
    graded = score(cfg, rollouts)
    lengths = [len(r.response_ids) for r in rollouts]
    term = [min(1.0, 10 / n) for n in lengths]
    assert [r.score for r in graded] == [1.0, 1.0, 0.0, 0.0]
    assert [r.status for r in graded] == ["exact", "exact", "no_box", "no_box"]
    assert [r.reward for r in graded] == pytest.approx(
        [2.5 - 0.1 * term[0], 2.0 - 0.1 * term[1], 0.5 - 0.1 * term[2], -0.1 * term[3]]
    )
    for before, after in zip(rollouts, graded, strict=True):
        fields = {f.name for f in dataclasses.fields(Rollout)} - {"reward", "score", "status", "terms"}
        assert all(getattr(before, name) is getattr(after, name) for name in fields)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so\nAnswer: 7", "7"),
        ("Answer: 7\nand more", "7"),
        ("Answer: 6\nAnswer: 7", "7"),
        ("**Answer:** 7", "7"),
        ("**Answer: 7**", "7"),
        ("### Final Answer: $7$", "$7$"),
        ("ANSWER : 7", "7"),
        (r"Answer: \boxed{7}", "7"),
        ("Answer: 6\n\\boxed{7}", "7"),
        ("\\boxed{6}\nAnswer: 7", "7"),
        ("The answer: 7", None),
        ("my answer is 7", None),
        ("Answer:", None),
        ("Answer:\n7", None),
        ("", None),
    ],
)
def test_the_last_answer_line_is_found(text: str, answer: str | None) -> None:
    assert last_answer(text) == answer


@pytest.mark.parametrize(("tokens", "value"), [(0, 0.0), (1, 0.25), (4, 1.0), (7, 1.0), (10, 1.0), (11, 10 / 11), (40, 0.25)])
def test_the_length_term_is_linear_between_its_bounds(tokens: int, value: float) -> None:
    assert LengthTerm(4, 10).value(tokens) == pytest.approx(value)


@pytest.mark.slow
def test_a_pattern_that_takes_for_ever_costs_its_sample_only() -> None:
    cfg = config({"type": "math"}, {"type": "format", "pattern": "(a+)+b"}, timeout_seconds=2.0)
    graded = score(cfg, [rollout("aaab"), rollout("a" * 40), rollout("ab"), rollout("b")])
    assert [r.reward for r in graded] == [1.0, 0.0, 1.0, 0.0]
    assert [r.status for r in graded] == ["no_box", "timeout", "no_box", "no_box"]


# functions of the user's own


def test_a_function_may_take_the_other_columns(functions: str) -> None:
    rows = [{"points": 2.5, "day": date(2026, 1, 2)}, {"points": 1, "penalty": -1}]
    rollouts = [dataclasses.replace(rollout(text), row=row) for text, row in itertools.product(("7", "8"), rows)]
    graded = score(config({"type": "custom", "function": f"{functions}:column"}), rollouts)
    assert [r.score for r in graded] == [2.5, 1.0, 0.0, -1.0]
    graded = score(config({"type": "custom", "function": f"{functions}:verdict"}), rollouts)
    assert [r.score for r in graded] == [1, 1, 0, 0], "a default of another name keeps its value"


def test_a_function_that_hangs_or_dies_costs_its_sample_only(functions: str) -> None:
    cfg = config({"type": "custom", "function": f"{functions}:endless"}, timeout_seconds=2.0)
    graded = score(cfg, [rollout("a"), rollout("loop"), rollout("b"), rollout("die"), rollout("c")])
    assert [r.status for r in graded] == ["graded", "timeout", "graded", "died", "graded"]
    assert [r.score for r in graded] == [1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fails", r"functions\.py:fails failed: ZeroDivisionError: .* at .*functions\.py:14; fix it"),
        ("leaves", r"failed: SystemExit: 3"),
        ("text", r"functions\.py:text failed: it returned '1\.0', which is no finite number; fix it"),
        ("nothing", r"functions\.py:nothing failed: it returned None, which is no finite number; fix it"),
        ("infinite", r"failed: it returned inf, which is no finite number"),
    ],
)
def test_a_function_that_fails_is_an_error_that_names_it(functions: str, name: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        score(config({"type": "custom", "function": f"{functions}:{name}"}), [rollout("four"), rollout("abc")])


# settings


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"terms": [{"type": "math", "wieght": 1}]}, r"reward\.terms\.0\.math\.wieght: unknown key; did you mean weight\?"),
        ({"terms": [{"weight": 1}]}, r"reward\.terms\.0: the key `type` is required"),
        (
            {"terms": [{"type": "length", "max_tokens": 3}]},
            "let it be math, answer_line, .*, http or judge",
        ),
        ({"terms": [{"type": "math"}, {"type": "format", "pattern": "("}]}, r"terms\.1\.format: pattern='\(' is no regular"),
        (
            {"terms": [{"type": "math"}, {"type": "length", "max_tokens": 3, "min_tokens": 4}]},
            "min_tokens=4 exceeds max_tokens=3",
        ),
        ({"terms": [{"type": "math", "weight": float("nan")}]}, r"weight: Input should be a finite number"),
        ({"terms": [{"type": "http", "url": "host:80"}]}, r"url='host:80' is not http\(s\)://"),
        ({"terms": [{"type": "http", "url": "https://me:secret@host/"}]}, "without a password"),
    ],
)
def test_contradictory_terms_are_refused(reward: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate({"name": "run", "model": {"path": "m"}, "data": {"train": "t"}, "reward": reward})


# gold answers


@pytest.mark.parametrize(
    "answer",
    [
        "7",
        " 7 ",
        "-1/2",
        r"\frac{1}{2}",
        r"\{1,2\}",
        "[0,1)",
        r"\infty",
        "∅",
        "Monday",
        r"work \boxed{7} done" + " x" * 900,
        "(B)",
    ],
)
def test_a_usable_gold_answer(answer: str) -> None:
    assert gold_fault(answer) is None


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        ("", "blank"),
        (" \n", "blank"),
        ("???", "neither a digit nor a letter"),
        ("$$", "neither a digit nor a letter"),
        ("7" * 513, "513 characters"),
        ("7\0", "control characters"),
        ("\ud800", "surrogate"),
        (r"\frac{1}{2", "braces"),
        ("7}{", "braces"),
    ],
)
def test_a_faulty_gold_answer(answer: str, fault: str) -> None:
    assert fault in (gold_fault(answer) or "")
