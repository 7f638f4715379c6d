"""Decide whether two answers are equal, with math-verify and repairs for its false positives and false negatives.

Each repair names the fault of math-verify 0.9.0 that it corrects; docs/rewards.md has the list, tests/data/grading_pairs.txt
the cases.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import product
from typing import Any

from tepo_megatron.rewards.grading import answers
from tepo_megatron.rewards.grading.answers import MAX_ANSWER_CHARS, gold_fault
from tepo_megatron.rewards.grading.units import measure

_GOLDS_KEPT = 4096
_TINY = 1e-5  # below this, math-verify's absolute comparisons (6 decimals, 15 digits) call different numbers equal
_RELATIVE = 1e-6
_DECIMALS = 1e-6  # what rounding to math-verify's six decimals can differ by
_DIGITS = 1.001e-3  # six decimals of a small number are few digits; three of them at least
_FLOAT = 1e-14  # the same for its 15 digits
_MOST_VARIABLES = 4


def load_grader() -> Callable[[str, str], str]:
    """Return the function (gold, answer) -> status. It imports math-verify, so call it after memory limits are set."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy.sets.sets import Set

    # units=False: `measure` drops units; math-verify would drop the last letter of any product
    spelling = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
    # 0: "the answer is 42" never overrides the box
    targets = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=spelling)]

    def parse_boxed(content: str) -> list[Any]:
        # no time limit here or in verify: theirs covers single calls, the worker's alarm covers all of them
        return parse(f"\\boxed{{{content}}}", extraction_config=targets, fallback_mode="no_fallback", parsing_timeout=None)

    parse_gold = lru_cache(maxsize=_GOLDS_KEPT)(parse_boxed)  # one gold answer is compared with a whole group of answers

    def equal(gold: list[Any], answer: list[Any]) -> bool:
        if verify(gold, answer, timeout_seconds=None):
            return not _differ(gold, answer)
        return _equal_where_defined(gold, answer)

    def grade(gold: str, answer: str) -> str:
        gold, answer = (answers.canonical(answers.in_dollars(text)) for text in (gold, answer))
        if (spoken := answers.words(gold)) is not None:
            # math-verify would multiply the letters of words, but "even" is no product
            return "equal" if spoken == answers.words(answer) else "wrong"
        if (letter := answers.choice(gold)) is not None and answers.choice(answer) is not None:
            return "equal" if letter == answers.choice(answer) else "wrong"
        if (base := answers.base(answer)) is not None and base != answers.base(gold):
            return "wrong"  # math-verify drops the base of 110_2
        whole = gold, answer
        (gold, gold_unit), (answer, answer_unit) = measure(gold, any_word=False), measure(answer, any_word=True)
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
        if gold_unit and answer_unit and gold_unit != answer_unit:
            ratio = answer_unit.number / gold_unit.number
            in_golds_unit = parse_boxed(rf"({answer}) \cdot \frac{{{ratio.numerator}}}{{{ratio.denominator}}}")
            same = gold_unit.powers == answer_unit.powers and equal(parsed_gold, in_golds_unit)
            return "equal" if same else "wrong"
        if equal(parsed_gold, parsed_answer):
            return "equal"
        if (gold, answer) != whole and equal(parse_gold(whole[0]), parse_boxed(whole[1])):
            return "equal"  # `2 m` was a product, as `2m` is
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
    wanted, own = answers.canonical(gold), answers.canonical(answer)
    if (a := answers.integer(wanted)) is not None and (b := answers.integer(own)) is not None:
        return "equal" if a == b else "wrong"
    return "equal" if wanted == own else None


def _differ(gold: list[Any], answer: list[Any]) -> bool:
    """Return whether numbers that math-verify calls equal differ by more than rounding: it compares 15 digits or 6 decimals of
    their difference, whatever their size.
    """
    if not gold or not answer:
        return False
    wanted, own = _numbers(gold[0]), _numbers(answer[0])
    return len(wanted) == len(own) and any(
        all(_unequal(x, y) for x, y in product(_readings(a), _readings(b))) for a, b in zip(wanted, own, strict=True)
    )


def _numbers(value: Any) -> list[Any]:
    """Return the numbers of a value in an order that equal values share; [] if something else is in it."""
    from sympy import Eq, Interval, MatrixBase, Symbol, Tuple
    from sympy.sets.sets import FiniteSet

    match value:
        case Eq(lhs=Symbol()):
            parts = [value.rhs]
        case Interval():
            parts = [value.start, value.end]
        case MatrixBase():
            parts = list(value.flat())
        case Tuple():
            parts = list(value.args)
        case FiniteSet():
            parts = list(value.args)
            if not all(part.is_number and part.is_comparable for part in parts):
                return []
            parts.sort(key=lambda part: part.evalf(30))
        case _:
            parts = [value]
    return parts if all(getattr(part, "is_number", False) for part in parts) else []


def _readings(number: Any) -> list[Any]:
    """Return the number; of a percentage, the number before its sign, too."""
    from sympy import Mul, Rational, UnevaluatedExpr

    is_percentage = isinstance(number, Mul) and number.args[-1] == UnevaluatedExpr(Rational(1, 100))
    return [number, Mul(*number.args[:-1])] if is_percentage else [number]


def _unequal(a: Any, b: Any) -> bool:
    """Return whether two real numbers differ: exact ones at all, decimals by more than rounding."""
    from sympy import Float

    if a == b:
        return False
    if not (a.has(Float) or b.has(Float)):
        difference = (a.doit() - b.doit()).evalf(2)
        return bool(difference.is_Float and difference._prec > 1 and difference != 0)  # 1: no digit of it is certain
    x, y = a.evalf(30), b.evalf(30)
    if not (x.is_real and y.is_real):
        return False
    most = max(abs(x), abs(y))
    if x == 0 or y == 0:
        return most < _TINY and (b if x == 0 else a).equals(0) is not True
    return bool(abs(x - y) > (_RELATIVE * most if most < _TINY else min(_DECIMALS, _DIGITS * most) + _FLOAT * most))


def _equal_where_defined(gold: list[Any], answer: list[Any]) -> bool:
    r"""Return whether expressions with roots or logarithms of variables are equal wherever both are real, as \sqrt{1/n} and
    1/\sqrt{n} are. math-verify takes variables of either sign, and finds them unequal as complex numbers.

    Positive variables are settled by algebra; others at points of every combination of signs.
    """
    from sympy import Expr, Integer, Symbol, log, simplify

    if not (gold and answer and isinstance(gold[0], Expr) and isinstance(answer[0], Expr)):
        return False
    a, b = gold[0], answer[0]
    variables = sorted(a.free_symbols, key=str)
    if not 0 < len(variables) <= _MOST_VARIABLES or a.free_symbols != b.free_symbols:
        return False

    def roots(x: Any) -> list[Any]:
        """Return what is under a root, or in a logarithm."""
        under = [y.base for y in x.atoms(type(Symbol("x") ** 2)) if y.exp.is_integer is not True]
        return under + [y.args[0] for y in x.atoms(log)]

    if not roots(a) and not roots(b):
        return False
    positive = {x: Symbol(x.name, positive=True) for x in variables}
    if simplify(a.xreplace(positive) - b.xreplace(positive)) != 0:
        return False
    for signs in product((1, -1), repeat=len(variables)):
        for scale in (1, 7):
            point = {x: Integer(sign * (i + 2)) / scale for i, (x, sign) in enumerate(zip(variables, signs, strict=True))}
            if all(x.subs(point).is_extended_nonnegative for x in (*roots(a), *roots(b))):
                difference = abs((a - b).subs(point).evalf(30))
                if not (difference.is_finite and difference <= _RELATIVE):
                    return False
    return True
