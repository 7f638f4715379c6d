r"""Units behind numbers: `5\text{ cm}`, `18 dollars`, `9.8 m/s^2`.

A unit may be dropped only behind a plain number: one without variables. `m g`, `\frac{1}{m} t` and `2m` are products.

    upright (\text, \mathrm)      any words that continue no number        3\sqrt{13}\text{ cm}, 36 \text{ apples}
    words of four letters or more in an answer, if they continue no number 366 downloads, 2 bolts; not 3 million, 2 alpha
    known units                   km, dollars, mph, ...                    5 km, 18 dollars
    one of the letters m g s h L K behind digits and a space, if alone     5 m, 5 m/s; not 2m, 5 m n, \frac{2}{3} m
"""

import re
from collections import Counter
from fractions import Fraction
from typing import NamedTuple

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
