"""Answers as strings: normalize answers to one spelling, and settle what strings alone can settle.

All functions are linear, or nearly so, in the length of the text: reading a response never runs out of time.
"""

# ruff: noqa: RUF001  (this file is about signs that look like others)

import re
import unicodedata

MAX_ANSWER_CHARS = 512  # a longer answer is wrong without being read
_UNREADABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
_SOMETHING = re.compile(r"\w|\\(?:infty|emptyset|varnothing|pi)|[∅∞π]")
_BRACE = re.compile(r"\\.|([{}])", re.DOTALL)
# An escaped brace is a character and opens nothing. `\\boxed` is a box: models that imitate quoted strings write it so.
_TOKEN = re.compile(r"(?P<box>\\{1,2}(?:boxed|fbox)\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
_ANSWER_LINE = re.compile(r"^[ \t#>*_-]{0,8}(?:final )?answer[*_]{0,2}[ \t]?:[ \t*_]{0,8}(\S.*)$", re.MULTILINE | re.IGNORECASE)


def last_boxed(text: str) -> str | None:
    r"""Return the stripped content of the last closed `\boxed{...}` or `\fbox{...}`; None if there is none.

    If one box contains another, the inner one counts, since it opens last. A box that the length limit cut off does not count.
    The function makes one pass over the text, linear in its length.

    >>> last_boxed(r"so \boxed{1}, no: \boxed{ \frac{1}{2} } and \boxed{3")
    '\\frac{1}{2}'
    """
    box = _last_box(text)
    return None if box is None else text[slice(*box)].strip()


def last_answer(text: str) -> str | None:
    r"""Return the last box as `last_boxed`, or the rest of the last line that begins with `Answer:`, whichever comes later.

    >>> last_answer("**Answer:** $7$."), last_answer(r"Answer: \boxed{7}"), last_answer("\\boxed{8}\nFinal Answer: 7")
    ('$7$.', '7', '7')
    """
    line = None
    for line in _ANSWER_LINE.finditer(text):  # noqa: B007  the last one is wanted
        pass
    box = _last_box(text)
    if line is None or (box is not None and box[0] > line.start()):
        return None if box is None else text[slice(*box)].strip()
    return line[1].strip().removesuffix("**").strip()


def _last_box(text: str) -> tuple[int, int] | None:
    """Return the start and end of the content of the last closed box, as indices into the text; None if there is none."""
    open_braces: list[int | None] = []  # start of each open box's content, None for a plain brace
    last: tuple[int, int] | None = None
    for token in _TOKEN.finditer(text):
        if token["box"]:
            open_braces.append(token.end())
        elif token["open"]:
            open_braces.append(None)
        elif token["close"] and open_braces:
            start = open_braces.pop()
            if start is not None and (last is None or start > last[0]):
                last = (start, token.start())
    return last


FINDERS = {"boxed": last_boxed, "answer_line": last_answer}

_SYMBOLS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "⁄": "/", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ",
    "≥": r"\ge ", "≠": r"\ne ", "°": r"^\circ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "±": r"\pm ",
    "ℝ": r"\mathbb{R}", "√": r"\sqrt ", r"\varnothing": r"\emptyset", r"\[": "", r"\]": "", r"\(": "", r"\)": "", r"\$": "",
    "$": "", r"\displaystyle": "", r"\,": " ", r"\;": " ", r"\:": " ", r"\!": "", r"\ ": " ", r"\qquad": " ", r"\quad": " ",
    "~": " ", r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac",
}  # fmt: skip
_SYMBOL = re.compile(r"\\\\|" + "|".join(re.escape(s) + r"(?![a-zA-Z])" * s[-1].isalpha() for s in _SYMBOLS))  # `\\` ends a row
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+")
_PREFIX = re.compile(r"^(?:\\text\s*\{\s*)?(?:so |thus )?(?:the |my )?(?:final )?answer\s*(?:is|:)\s*:?\s*(?P<brace>\}?)", re.I)
_GROUPED_BY_SPACES = re.compile(r"([+-]?\d{1,3})((?: \d{3})+)(\.\d+)?")
_MIXED = re.compile(r"(-?)(\d+) (\d+)\s*/\s*(\d+)")
_REPEATING = re.compile(r"(\d{1,20})\.(\d{0,20})\\overline\s*\{(\d{1,20})\}")
# 4.5e33; neither 2e^3 nor 2e3x, which have Euler's number in them
_BOLD = re.compile(r"\\(?:textbf|mathbf)\s*\{\s*([\d.,]+)\s*\}")
_SPELLED = re.compile(r"(?:\\(?:text|mathrm|textbf)\s*\{)?\s*([a-z]+)\s*\}?", re.IGNORECASE)
_NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
_MAGNITUDES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_MAGNITUDE = re.compile(rf"(?<=\d)\s*(\\(?:text|mathrm)\s*\{{)?\s*({'|'.join(_MAGNITUDES)})\b\s*(\}}?)")
_DOLLARS = re.compile(r"\\\$\s*(\d[\d,.]*)")
_BASE = re.compile(r"[\dA-Z.]+_\{?(\d+)\}?")
_EXPONENT = re.compile(r"(?<![\w.\\^])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d{1,4})(?!\d|\.\d|[a-zA-Z_^])", re.ASCII)
_PERCENT = re.compile(r"(?<=[\d}])\s*(?:\\text\s*\{\s*percent\s*\}|percent)$")
_BARE_FRACTION = re.compile(r"\\frac (\d) ?(\d)")
_BARE_ROOT = re.compile(r"\\sqrt (\d+|[a-zA-Z])")
_APART = re.compile(r"(?<=\d) (?=i(?![a-zA-Z]))")
_INTEGER = re.compile(r"\+?(-?)(?:(\d+)|(\d{1,3}(?:,\d{3})+))", re.ASCII)
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[^\W\d_](?:[^\W\d_]|[' -])*")
_SHORT_WORDS = frozenset({"yes", "no", "odd", "all", "one", "two", "both"})
_SUM_IN_WORDS = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}\b(?! *\()[^=\d]*\d[^=]*=")
_RELATION = re.compile(r"\\(?:leqslant|geqslant|leq|geq|le|ge|lt|gt)(?![a-zA-Z])|<=|>=|<|>")
_VARIABLE = re.compile(r"[a-zA-Z]|\\[a-z]{2,8}")
_OR = re.compile(r"\\(?:text|mathrm|mbox)\s*\{\s*or\s*\}|\\lor\b|\\vee\b|\bor\b")


def canonical(answer: str) -> str:
    r"""Return the answer in one spelling.

    Unicode signs become LaTeX, dollars and spacing commands are removed, groups of thousands are joined, `4.5e33` and
    `2 million` become products with powers of ten, and `0.\overline{3}` a fraction.

    >>> canonical("$1\\,000$."), canonical("¾"), canonical("2 1/3"), canonical("x²"), canonical("5e-05")
    ('1000', '\\frac{3}{4}', '(2+\\frac{1}{3})', 'x^{2}', '5 \\times 10^{-5}')
    """
    if _INTEGER.fullmatch(answer):
        return answer
    text = _SUPERSCRIPT.sub(lambda match: "^{" + match[0].translate(_SUPERSCRIPTS) + "}", answer)
    if not text.isascii():
        text = unicodedata.normalize("NFKC", "".join(map(_vulgar_fraction, text)))
    text = _SYMBOL.sub(lambda match: _SYMBOLS.get(match[0], match[0]), text)
    prefix = _PREFIX.match(text.lstrip())
    if prefix and prefix.end():
        text = text.lstrip()[prefix.end() :]
        if not prefix["brace"] and prefix[0].startswith("\\"):
            text = "\\text{" + text
    text = " ".join(text.split()).strip("*").removesuffix(r"\text{.}").rstrip(".,;: ")
    if (spelled := _SPELLED.fullmatch(text)) and spelled[1].lower() in _NUMBERS:
        return str(_NUMBERS.index(spelled[1].lower()))
    text = _MAGNITUDE.sub(_as_power, _BOLD.sub(r"\1", text))
    text = _EXPONENT.sub(lambda match: rf"{match[1]} \times 10^{{{int(match[2])}}}", text)
    text = _PERCENT.sub(r"\\%", text)
    text = _BARE_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = _BARE_ROOT.sub(r"\\sqrt{\1}", text)
    text = _APART.sub("", text)
    text = _REPEATING.sub(_as_fraction, text)
    if grouped := _GROUPED_BY_SPACES.fullmatch(text):
        return grouped[1] + grouped[2].replace(" ", "") + (grouped[3] or "")
    if mixed := _MIXED.fullmatch(text):
        return rf"{mixed[1]}({mixed[2]}+\frac{{{mixed[3]}}}{{{mixed[4]}}})"
    return text


def _as_power(match: re.Match[str]) -> str:
    """Return `million` as a power of ten; what else is in its \\text stays there."""
    kept = match[1] if match[1] and not match[3] else match[3] if match[3] and not match[1] else ""
    return rf" \times 10^{{{_MAGNITUDES[match[2]]}}}{kept}"


def in_dollars(answer: str) -> str:
    """Return an amount with a dollar sign as an amount with its unit behind it."""
    amount = _DOLLARS.fullmatch(answer.strip())
    return rf"{amount[1]}\text{{ dollars}}" if amount else answer


def base(answer: str) -> str | None:
    """Return the base of a number with one, such as 110_2; None for any other answer in canonical spelling."""
    number = _BASE.fullmatch(answer)
    return number[1] if number else None


def integer(text: str) -> str | None:
    """Return the digits of an integer, without leading zeros and thousands separators; None for anything else.

    >>> integer("-007"), integer("1,000"), integer("-0"), integer("7.0")
    ('-7', '1000', '0', None)
    """
    match = _INTEGER.fullmatch(text)
    if match is None:
        return None
    digits = (match[2] or match[3].replace(",", "")).lstrip("0") or "0"
    return digits if digits == "0" else match[1] + digits


def words(text: str) -> str | None:
    r"""Return the words of an answer that consists of words, in lower case; None for a formula. `choice` is for single letters.

    >>> words(r"\text{ No  solution}"), words("Monday"), words("(B)"), words("xy"), words("2 apples")
    ('no solution', 'monday', None, None, None)
    """
    inner = _WRAPPED.sub(r"\1", text)
    spoken_text = " ".join(inner.split()).strip(".() ")
    if not _WORDS.fullmatch(spoken_text):
        return None
    long_enough = any(len(word) > 3 or word in _SHORT_WORDS for word in spoken_text.lower().split())
    spoken = long_enough or (inner != text and len(spoken_text) > 1)
    return spoken_text.lower() if spoken else None


def choice(text: str) -> str | None:
    r"""Return the capital letter of an answer that is one: `B`, `(B)`, `\text{(B)}`; None for anything else."""
    letter = _WRAPPED.sub(r"\1", text).strip(".() ")
    return letter if len(letter) == 1 and "A" <= letter <= "Z" else None


def is_percentage(text: str) -> bool:
    """Return whether the text, in canonical spelling, ends in a percent sign."""
    return text.endswith("%")


def without_percent(text: str) -> str:
    """Return the number before the percent sign."""
    return text.removesuffix("%").removesuffix("\\").rstrip()


def is_sum_in_words(text: str) -> bool:
    """Return whether a calculation in words precedes an equals sign: "six times 7 = 42" is no answer."""
    return bool(_SUM_IN_WORDS.search(_WRAPPED.sub(r" \1 ", text)))


def as_interval(text: str) -> str | None:
    r"""Return the interval, or union of intervals, that inequalities of one variable describe; None for anything else.

    >>> as_interval(r"0 \le x < 1"), as_interval(r"x<0 \text{ or } x>1"), as_interval("x<y<z<1")
    ('[0,1)', '(-\\infty,0)\\cup(1,\\infty)', None)
    """
    parts = [_interval(part) for part in _OR.split(text)]
    return None if None in parts else r"\cup".join(part for part in parts if part)


def _interval(text: str) -> str | None:
    sides = [side.strip() for side in _RELATION.split(text)]
    signs = [sign.lstrip("\\") for sign in _RELATION.findall(text)]
    if len(signs) == 1 and _VARIABLE.fullmatch(sides[1]) and not _VARIABLE.fullmatch(sides[0]):
        sides.append("")  # 2 < x: nothing on the other side
    elif len(signs) == 1:
        sides.insert(0, "")
        signs.insert(0, signs[0])
    if len(sides) != 3 or not _VARIABLE.fullmatch(sides[1]) or len({_rises(sign) for sign in signs}) > 1:
        return None
    low, _, high = sides if _rises(signs[0]) else reversed(sides)
    first, last = (signs[0], signs[-1]) if _rises(signs[0]) else (signs[-1], signs[0])
    left = f"[{low}" if low and _is_closed(first) else f"({low}" if low else r"(-\infty"
    right = f"{high}]" if high and _is_closed(last) else f"{high})" if high else r"\infty)"
    return f"{left},{right}"


def _rises(sign: str) -> bool:
    return sign[0] in "<l"


def _is_closed(sign: str) -> bool:
    return sign not in ("<", ">", "lt", "gt")


def _vulgar_fraction(character: str) -> str:
    r"""Return ¾ as \frac{3}{4}; any other character unchanged."""
    above, slash, below = unicodedata.normalize("NFKC", character).partition("⁄") if character > "~" else (character, "", "")
    return rf"\frac{{{above}}}{{{below}}}" if slash and above and below else character


def _as_fraction(match: re.Match[str]) -> str:
    whole, fixed, repeated = match.groups()
    below = (10 ** len(repeated) - 1) * 10 ** len(fixed)
    return rf"\frac{{{int(whole + fixed + repeated) - int(whole + fixed)}}}{{{below}}}"


def gold_answer(answer: str) -> str:
    """Return what is compared, stripped: the last box if the gold answer holds one (a worked solution), otherwise all of it."""
    boxed = last_boxed(answer)
    return (answer if boxed is None else boxed).strip()


def gold_fault(answer: str) -> str | None:
    r"""Return why no response could be graded by this gold answer; None if it is usable. Cheap and pure: no parser is loaded.

    An answer that passes may still be unreadable for math-verify. Its samples then have the status `bad_gold`, which the
    metrics count.

    >>> gold_fault(r"\frac{1}{2}"), gold_fault(" "), gold_fault(r"\frac{1}{2")
    (None, 'it is blank', 'its braces do not match')
    """
    content = gold_answer(answer)
    if not content:
        return "it is blank"
    if len(content) > MAX_ANSWER_CHARS:
        return f"it has {len(content)} characters, more than {MAX_ANSWER_CHARS}"
    if _UNREADABLE.search(content):
        return "it holds control characters or halves of surrogate pairs"
    if not _SOMETHING.search(content):
        return "it holds neither a digit nor a letter"
    if not _is_balanced(content):
        return "its braces do not match"
    return None


def _is_balanced(text: str) -> bool:
    depth = 0
    for brace in _BRACE.finditer(text):
        if brace[1]:
            depth += 1 if brace[1] == "{" else -1
        if depth < 0:
            return False
    return depth == 0
