"""Right and wrong answers of every kind, as a careful marker would grade them, and as math-verify alone does.

The tables are in tests/data, one pair a line: `gold === answer` is right, `gold =/= answer` is wrong.

* grading_pairs.txt: what can be argued over is labelled as docs/rewards.md says: a percentage may stand for its number with or
  without the sign, a unit that the gold answer does not ask for may be named, and another one than its own where the quantity
  is the same; decimals count where they agree to six places.
* benchmark_pairs.txt: the notations of seven benchmarks, and numbers and units as datasets and models write them. It was
  written before the grader was changed to it, from what the answers mean and not from what the grader did.

Both are our own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.graded import math_reward, rollout

DATA = Path(__file__).parents[2] / "data"


class Pair(NamedTuple):
    """A labelled answer.

    Attributes:
        kind: Heading of its section in the table.
    """

    kind: str
    gold: str
    answer: str
    right: bool


def load_pairs(table: str) -> list[Pair]:
    """Return all pairs, in the order of the table. Raise ValueError for a line that is no pair."""
    pairs, kind = [], ""
    for line in table.strip().splitlines():
        if line.startswith("# "):
            kind = line[2:]
            continue
        for sign, right in ((" === ", True), (" =/= ", False)):
            gold, found, answer = line.partition(sign)
            if found:
                pairs.append(Pair(kind, gold, answer, right))
                break
        else:
            raise ValueError(f"no pair: {line!r}")
    return pairs


PAIRS, BENCHMARKS = (load_pairs((DATA / f"{name}_pairs.txt").read_text()) for name in ("grading", "benchmark"))
INDEPENDENT = [Pair("", **json.loads(line)) for line in (DATA / "independent_pairs.jsonl").read_text().splitlines()]
# each fault of math-verify 0.9.0 that docs/rewards.md lists, by the pair that shows it
REPAIRED = [
    (r"\frac{1}{2004!}", r"\frac{1}{2006!}", False),
    (r"\frac{1}{3^{50}}", r"\frac{1}{3^{51}}", False),
    (r"10^{-30}", r"10^{-31}", False),
    ("42", r"six times 7 = 42", False),
    (r"5\text{ cm}", r"5\text{ km}", False),
    ("[0,1)", r"0 \le x < 1", True),
    (r"(-\infty,0)\cup(1,\infty)", r"x<0 \text{ or } x>1", True),
    (r"12.5\%", "12.5", True),
    ("1000", r"1\,000", True),
    (r"\frac{7}{3}", "2 1/3", True),
    (r"\frac{1}{3}", r"0.\overline{3}", True),
    (r"3+4i", "3 + 4 i", True),
    (r"\emptyset", r"\varnothing", True),
    (r"45^\circ", "45°", True),
    (r"\text{Yes}", "Yes.", True),
    ("B", "B.", True),
    ("7", r"\text{The answer is }7", True),
    (r"\frac{3}{4}", "¾", True),
    ("x^2", "x²", True),
    ("0.00001", "0.0000104", False),
    (r"3\mathbf{v}", "3", False),
    (r"5\text{ bolts}", "5 bolts", True),
]
PLAIN = """
import json, logging, sys
from math_verify import parse, verify
logging.disable(logging.CRITICAL)
boxed = lambda text: parse(f"\\\\boxed{{{text}}}")
def right(gold, answer):
    gold, answer = boxed(gold), boxed(answer)
    return bool(gold and answer and verify(gold, answer))
print(json.dumps([right(gold, answer) for gold, answer in json.load(sys.stdin)]))
"""


def graded(pairs: list[Pair]) -> list[bool]:
    """Return the grader's results."""
    rollouts = [rollout(rf"so \boxed{{{pair.answer}}}", pair.gold) for pair in pairs]
    with math_reward(workers=2, soft_seconds=10, hard_seconds=20) as reward:
        return [bool(r.score) for r in reward.score(rollouts)]


def disagreements(pairs: list[Pair], found: list[bool]) -> list[Pair]:
    return [pair for pair, right in zip(pairs, found, strict=True) if right != pair.right]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("pairs", [BENCHMARKS, INDEPENDENT], ids=["benchmarks", "independent"])
def test_notations_of_the_benchmarks(pairs: list[Pair]) -> None:
    """No answer is wrongly right, and at most 2 % are wrongly wrong."""
    wrong = disagreements(pairs, graded(pairs))
    assert [pair for pair in wrong if not pair.right] == []
    assert len(wrong) <= 0.02 * len(pairs), wrong


UNITS_AND_NUMBERS = [
    Pair("", *case)
    for case in [
        ("m g", "m", False),
        (r"\frac{1}{m} t", r"\frac{1}{m}", False),
        ("2m", "2", False),
        (r"5 \text{ m/s}", r"5 \text{ km/h}", False),
        ("18", "18 dollars", True),
        ("366", "366 downloads", True),
        ("73", "73 million", False),
        ("73", "73 dozen", False),
        ("73,000,000", r"73 \text{ million}", True),
        ("13", r"\text{thirteen}", True),
        (r"10^{-7} \mathrm{~T}", r"10^{-7} \mathrm{~mT}", False),
        (r"5.4 \text{ cents}", r"\$5.40", False),
        (r"30 \mathrm{~min}", r"0.5 \text{ hours}", True),
        (r"9.8 \text{ m/s}^2", r"9.8 \mathrm{~m} \mathrm{~s}^{-2}", True),
        ("110", "110_{2}", False),
        ("4343_6", "4343_5", False),
        ("4343_6", "4343_{6}", True),
        ("4.5e33", r"4.5 \cdot e \cdot 33", False),
        ("4.5e33", r"4.5 \times 10^{33}", True),
        ("1000", "1e3", True),
        (r"\frac{2^{205}+1}{3 \cdot 2^{206}}", r"\frac{1}{3 \cdot 2^{206}}", False),
        (r"(0,\frac{1}{2^{60}})", r"(0,\frac{1}{2^{61}})", False),
        (r"\sqrt{1/n}", r"\frac{1}{\sqrt{n}}", True),
        (r"\sqrt{x^2}", "x", False),
        (r"\boxed{}", "5", False),
    ]
]


def test_units_and_numbers() -> None:
    assert disagreements(UNITS_AND_NUMBERS, graded(UNITS_AND_NUMBERS)) == []


@pytest.mark.slow
def test_better_than_math_verify_alone() -> None:
    """The grader is at least as good on every kind; each listed fault is still one of math-verify."""
    request = json.dumps([(pair.gold, pair.answer) for pair in PAIRS])
    command = [sys.executable, "-W", "ignore", "-c", PLAIN]
    done = subprocess.run(command, input=request, capture_output=True, text=True, timeout=300, env=os.environ, check=True)
    plain, ours = json.loads(done.stdout), graded(PAIRS)
    assert disagreements(PAIRS, ours) == []
    missed = {(pair.gold, pair.answer, pair.right) for pair in disagreements(PAIRS, plain)}
    assert set(REPAIRED) <= missed
