"""Decide whether two answers are equal, with math-verify and repairs for its false positives and false negatives.

Each repair names the fault of math-verify 0.9.0 that it corrects; docs/rewards.md has the list, tests/grading_pairs.py the
cases.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from tepo_megatron.grading import answers
from tepo_megatron.grading.answers import MAX_ANSWER_CHARS, gold_fault

_GOLDS_KEPT = 4096
_TINY = 1e-5  # below this, math-verify's absolute comparisons (6 decimals, 15 digits) call different numbers equal
_RELATIVE = 1e-6


def load_grader() -> Callable[[str, str], str]:
    """Return the function (gold, answer) -> status. It imports math-verify, so call it after memory limits are set."""
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy.sets.sets import Set

    targets = [LatexExtractionConfig(boxed_match_priority=0)]  # 0: "the answer is 42" never overrides the box

    def parse_boxed(content: str) -> list[Any]:
        # no time limit here or in verify: theirs covers single calls, the worker's alarm covers all of them
        return parse(f"\\boxed{{{content}}}", extraction_config=targets, fallback_mode="no_fallback", parsing_timeout=None)

    parse_gold = lru_cache(maxsize=_GOLDS_KEPT)(parse_boxed)  # one gold answer is compared with a whole group of answers

    def equal(gold: list[Any], answer: list[Any]) -> bool:
        return bool(verify(gold, answer, timeout_seconds=None)) and not _differ(gold, answer)

    def grade(gold: str, answer: str) -> str:
        gold, answer = answers.canonical(gold), answers.canonical(answer)
        if (spoken := answers.words(gold)) is not None:
            # math-verify would multiply the letters of words, but "even" is no product
            return "equal" if spoken == answers.words(answer) else "wrong"
        if (letter := answers.choice(gold)) is not None and answers.choice(answer) is not None:
            return "equal" if letter == answers.choice(answer) else "wrong"
        parsed_gold = parse_gold(gold)
        if not parsed_gold:
            return "bad_gold"
        if answers.is_sum_in_words(answer) and not answers.is_sum_in_words(gold):
            return "unparsed"
        if any(isinstance(x, Set) for x in parsed_gold):
            # math-verify can compare an inequality with a set, but solves it first, which takes long
            answer = answers.as_interval(answer) or answer
        parsed_answer = parse_boxed(answer)
        if not parsed_answer:
            return "unparsed"
        if (asked := answers.unit(gold)) and (given := answers.unit(answer)) and asked != given:
            return "wrong"
        if equal(parsed_gold, parsed_answer):
            return "equal"
        if answers.is_percentage(gold) != answers.is_percentage(answer):
            # 12.5% and 12.5 count as equal, but math-verify drops the percent sign of whole numbers only
            bare = [parse_boxed(answers.without_percent(text)) for text in (gold, answer)]
            return "equal" if all(bare) and equal(*bare) else "wrong"
        return "wrong"

    return grade


def settle(gold: str, answer: str | None) -> str | None:
    """Return the status if strings alone can settle the pair, otherwise None."""
    if answer is None:
        return "no_box"
    if answer == gold and gold:
        return "exact"
    if len(answer) > MAX_ANSWER_CHARS:
        return "too_long"
    if gold_fault(gold) is not None:
        return "bad_gold"
    wanted, given = answers.canonical(gold), answers.canonical(answer)
    if (a := answers.integer(wanted)) is not None and (b := answers.integer(given)) is not None:
        return "equal" if a == b else "wrong"
    return "equal" if wanted == given else None


def _differ(gold: list[Any], answer: list[Any]) -> bool:
    """Return whether two numbers that math-verify calls equal do differ, because both are below its absolute precision."""
    numbers = [[x for x in parsed if getattr(x, "is_number", False)] for parsed in (gold, answer)]
    if not all(numbers):
        return False
    a, b = numbers[0][0], numbers[1][0]
    x, y = a.evalf(30), b.evalf(30)
    if not (x.is_real and y.is_real and abs(x) < _TINY and abs(y) < _TINY) or a == b:
        return False
    if x == 0 or y == 0:
        return (b if x == 0 else a).equals(0) is not True
    return bool(abs(x - y) > _RELATIVE * max(abs(x), abs(y)))
