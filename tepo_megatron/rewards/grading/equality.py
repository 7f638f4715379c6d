r"""Decide whether two answers are equal, with math-verify and repairs for its false positives and false negatives.

Each repair names the fault of math-verify 0.9.0 that it corrects; docs/rewards.md has the list, tests/data/grading_pairs.txt
the cases.

Units behind numbers are read here: `5\\text{ cm}`, `18 dollars`, `9.8 m/s^2`. A unit may be dropped only behind a plain number:
one without variables. `m g`, `\frac{1}{m} t` and `2m` are products.

    upright (\text, \mathrm)      any words that continue no number        3\sqrt{13}\text{ cm}, 36 \text{ apples}
    words of four letters or more in an answer, if they continue no number 366 downloads, 2 bolts; not 3 million, 2 alpha
    known units                   km, dollars, mph, ...                    5 km, 18 dollars
    one of the letters m g s h L K behind digits and a space, if alone     5 m, 5 m/s; not 2m, 5 m n, \frac{2}{3} m
"""

import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from tepo_megatron.rewards.grading import answers
from tepo_megatron.rewards.grading.answers import MAX_ANSWER_CHARS, gold_fault

_UNITS = {
    name: unit
    for unit, names in {
        "mm": "millimeter millimetre", "cm": "centimeter centimetre", "m": "meter metre", "km": "kilometer kilometre",
        "in": "inch inche", "ft": "foot feet", "yd": "yard", "mi": "mile", "mg": "milligram", "g": "gram", "kg": "kilogram",
        "lb": "pound", "oz": "ounce", "s": "second sec", "min": "minute", "h": "hour hr", "day": "day", "week": "week",
        "month": "month", "year": "year yr", "ml": "milliliter millilitre", "l": "liter litre", "dollar": "dollar usd",
        "euro": "eur", "cent": "cent", "degree": "degree deg", "radian": "radian rad", "K": "kelvin", "eV": "electronvolt",
        "Hz": "hertz", "mi/h": "mph", "km/h": "kmh kph", "unit": "unit", "/": "per",
    }.items()
    for name in (unit, *names.split())
}  # fmt: skip
_LETTERS = frozenset("mgshLlK")  # other letters are variables
_PRODUCTS = frozenset(("mg", "ml", "mi"))  # units only where they are upright
# words that make another number of what precedes them, or that name a number
_NO_UNIT = re.compile(
    r"(?:and|or|not?|to|of|if|when|where|for|with|except|unless|is|are|than|at|mod|modulo|times|plus|minus|over|choose|point|base|more|less|most|least|percent\w*|pct|"
    r"hundred\w*|thousand\w*|\w*illion\w*|dozens?|half|halves|thirds?|quarters?|fourths?|(?:fif|six|seven|eigh|nin|ten|twelf|\w+ie)ths?|"
    r"squared?|cubed?|factorial|infinity|inf|sqrt|a?(?:rc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|lg|exp|gcd|lcm|"
    r"alpha|beta|gamma|delta|epsilon|theta|lambda|sigma|omega|i|e|pi|phi|rho|tau|mu|nu|eta|psi|chi)",
    re.IGNORECASE,
)
_WRAPPED = re.compile(r"\\(?:text|textrm|mathrm|mbox)\s*\{([^{}]*)\}")
_MICRO = re.compile(r"\\mu\s*\\(?:text|mathrm)\s*\{\s*")
_CONSTANT = re.compile(  # no letters but those of commands that make numbers
    r"(?:[a-zA-Z]\s*=\s*)?((?:[^a-zA-Z\\=&]|\\(?:frac|sqrt|pi|cdot|times|left|right|circ)(?![a-zA-Z])|\\[{}])+)"
)
_DIGITS_AND_SPACE = re.compile(r"[+-]?(?:\d[\d,]*\.?\d*|\.\d+)(?:\s*\\(?:times|cdot)\s*10\^\{?[+-]?\d+\}?)?\s+", re.ASCII)
_NUMBER = re.compile(r"\d|\\pi")
_OPEN = re.compile(r"(?:[-+*/^_({,<>|]|\\cdot|\\times)\s*$")  # what follows belongs to the number
_POWER_WORD = re.compile(r"\b(square|sq|cubic|cu) ([a-zA-Z]+)")
_LETTER_POWER = re.compile(r"[a-zA-Z]\s*\^")  # 5 m^2: the power of a variable
_TAIL = re.compile(r"(?:[a-zA-Z][a-zA-Z'-]*\.?(?:\s*\^\s*(?:\d|\{-?\d\}))?(?:\s*(?:/|\\cdot)\s*|\s+|$))+")
_WORD = re.compile(r"[a-zA-Z][a-zA-Z'-]*")


_FACTOR = re.compile(r"(/?)\s*([a-zA-Z][a-zA-Z'-]*)\.?(?:\s*\^\s*\{?(-?\d+))?")
_PREFIXES = {"T": 12, "G": 9, "M": 6, "k": 3, "c": -2, "m": -3, "u": -6, "n": -9, "p": -12}
_PREFIXED = frozenset(("m", "g", "s", "A", "K", "mol", "Hz", "N", "J", "W", "Pa", "C", "V", "T", "l", "L", "eV"))
# Those that are not listed have a size of their own.
_SIZES = {
    name: (Fraction(number), {base: int(power or 1) for _, base, power in _FACTOR.findall(bases)})
    for name, number, bases in (line.split(" ", 2) for line in (
        "Hz 1 s^-1", "N 1000 g m s^-2", "Pa 1000 g m^-1 s^-2", "J 1000 g m^2 s^-2", "W 1000 g m^2 s^-3", "C 1 A s",
        "V 1000 g m^2 s^-3 A^-1", "T 1000 g s^-2 A^-1", "l 1/1000 m^3", "L 1/1000 m^3", "cent 1/100 dollar", "min 60 s",
        "h 3600 s", "day 86400 s", "week 604800 s",
    ))
}  # fmt: skip


class UnitSize(NamedTuple):
    """A unit in one form: a number, and the exponents of base units by name."""

    number: Fraction
    powers: dict[str, int]


class NumberWithUnit(NamedTuple):
    """A number and the unit behind it.

    Attributes:
        unit: None if there is none, or a word of it is unknown.
    """

    number: str
    unit: UnitSize | None


def measure(text: str, any_word: bool) -> NumberWithUnit:
    r"""Split an answer in canonical spelling into number and unit; without a unit, the text stays whole.

    Args:
        any_word: Long words are units. Without, they have to be known: in a gold answer `2 abcd` is a product.

    >>> measure(r"5\text{ centimeters}", False) == measure("5 cm", False), measure(r"\frac{1}{m} t", True).number
    (True, '\\frac{1}{m} t')
    """
    whole = NumberWithUnit(text, None)
    constant = _CONSTANT.match(text)
    if constant is None or not _NUMBER.search(constant[1]) or _OPEN.search(constant[1]):
        return whole
    number, tail = text[: constant.end()].rstrip(), text[constant.end() :].strip()
    tail = _MICRO.sub(r"\\mathrm{u", tail)
    flat = " ".join(_WRAPPED.sub(r" \1 ", tail).split())
    unit = _POWER_WORD.sub(lambda match: f"{match[2]}^{2 if match[1].startswith('sq') else 3}", flat)
    if number.count("{") != number.count("}") or not _TAIL.fullmatch(unit) or any(map(_NO_UNIT.fullmatch, _WORD.findall(unit))):
        return whole
    bare = _WORD.findall(_WRAPPED.sub(" ", tail).replace(r"\cdot", " "))
    letters = any(word in _LETTERS for word in bare)
    if letters and (
        not _DIGITS_AND_SPACE.fullmatch(constant[1]) or _LETTER_POWER.match(flat) or len(bare) > 1 > flat.count("/")
    ):
        return whole
    if not all(word in _LETTERS or (_unit(word) and word not in _PRODUCTS) or (any_word and len(word) > 3) for word in bare):
        return whole
    return NumberWithUnit(number, _size(unit))


def _unit(word: str) -> str | None:
    """Return a unit in one spelling; None for an unknown word. Letters have one case and no plural (`ms` is no `m`)."""
    name = word if word in _UNITS or len(word) == 1 else word.lower()
    return _UNITS.get(name) or (_UNITS.get(name.removesuffix("s")) if len(name) > 2 else None)


def _size(unit: str) -> UnitSize | None:
    """Return the size of a product of units; None if a word is unknown."""
    number, powers = Fraction(1), Counter[str]()
    for slash, word, power in _FACTOR.findall(re.sub(r"\bper\b", "/", unit.replace(r"\cdot", " "))):
        factor, bases = _size_of_one(word)
        if not factor:
            return None
        exponent = int(power or 1) * (-1 if slash else 1)
        number *= factor**exponent
        powers.update({base: exponent * of_base for base, of_base in bases.items()})
    return UnitSize(number, {base: power for base, power in powers.items() if power})


def _size_of_one(word: str) -> tuple[Fraction, dict[str, int]]:
    """Return the size of one unit; (0, {}) for an unknown word."""
    name = _unit(word) or word
    if "/" in name:
        above, below = map(_size_of_one, name.split("/"))
        return above[0] / below[0], above[1] | {base: -power for base, power in below[1].items()}
    if name in _SIZES:
        return _SIZES[name]
    if name[1:] in _PREFIXED and name[0] in _PREFIXES:
        number, bases = _size_of_one(name[1:])
        return number * Fraction(10) ** _PREFIXES[name[0]], bases
    known = name in _PREFIXED or _unit(word) is not None
    return (Fraction(1), {name: 1}) if known else (Fraction(0), {})


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
