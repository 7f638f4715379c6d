# ruff: noqa: RUF001  (signs that look like others are part of the attack)
"""Answers that were written to stop a grader: each is the content of a box, and none is right."""

import itertools
import random


def hostile_answers() -> list[str]:
    """Return all of them, without duplicates and in the same order on every call."""
    found = [
        *_towers(),
        *_factorials(),
        *_sums(),
        *_nested(),
        *_characters(),
        *_noise(),
        *_unclosed(),
        *_code(),
        *_algebra(),
        *_mutations(),
    ]
    return list(dict.fromkeys(found))


def _towers() -> list[str]:
    bases, exponents = ("9", "7", "-3", "2.5", "x", r"\pi"), ("{9^9}", "{9^{9^9}}", "{10^8}", "{10^{10}}", "{-10^9}")
    towers = [f"{base}^{exponent}" for base in bases for exponent in exponents]
    return [*towers, "^".join(["9"] * 200), "9" + "^{9" * 80 + "}" * 80, r"\sqrt[10^9]{7^{10^9}}", r"7^{10^8} \bmod 13"]


def _factorials() -> list[str]:
    sizes = ("10^6", "10^8", "10^{12}", "99999999", "9^{9^9}")
    chosen = [rf"\binom{{{n}}}{{{n}/2}}" for n in sizes] + [rf"\dbinom{{2\cdot {n}}}{{{n}}}" for n in sizes]
    return [f"{n}!" for n in sizes] + [f"({n})!" for n in sizes] + chosen + ["5" + "!" * 30, "9!!!!!!!!", r"\Gamma(10^8)"]


def _sums() -> list[str]:
    ends = ("10^9", r"\infty", "10^{30}")
    terms = ("k", "k^k", r"\frac{1}{k}", r"\sin k", "k!")
    series = [rf"\{kind}_{{k=1}}^{{{end}}} {term}" for kind in ("sum", "prod") for end in ends for term in terms]
    integrals = [rf"\int_0^{{{end}}} e^{{-x^{{{n}}}}}\sin(x^x) dx" for end in ends for n in (2, 99)]
    return [*series, *integrals, r"\lim_{n\to\infty} n^{n^n}", r"\lim_{x\to 0} \frac{\sin(1/x)^{99}}{x^{x^x}}"]


def _nested() -> list[str]:
    pairs = (
        ("{", "}"),
        ("(", ")"),
        (r"\sqrt{", "}"),
        (r"\frac{1}{1+", "}"),
        (r"\left(", r"\right)"),
        ("[", "]"),
        (r"\{", r"\}"),
    )
    pairs += ((r"\sin(", ")"), (r"\text{", "}"), ("|", "|"), (r"\lfloor ", r"\rfloor "), ("-(", ")"), (r"\log(", ")"))
    return [o * n + "x" + c * n for (o, c), n in itertools.product(pairs, (30, 250, 2000)) if len(o * n) < 5000 or n == 2000]


def _characters() -> list[str]:
    plain = [
        "\0", "\0" * 500, "7\0", "\ud800", "\udfff7", "\ud83d", "7\ud800\ud800", "\ufeff7\ufeff8", "\u202e7\u202c1", "\u200b",
    ]  # fmt: skip
    plain += [
        "７８", "٧٨", "፯", "𝟕𝟖", "Ⅶ!", "¹²³⁴", "½" * 200, "ﷺ" * 400, "e\u0301" * 200, "Ω̸" * 100, "🙂" * 300, "\x1b[2J",
        "\r\n" * 99,
    ]  # fmt: skip
    return [*plain, "\b\b\b", "\x7f" * 60, "\u2028" * 60, "\x85", "\\\0", "\\", "\\\\" * 200, "%" * 400, "#" * 400, "&" * 400]


def _noise() -> list[str]:
    draw = random.Random(20)
    alphabet = "0123456789+-*/^_=<>!()[]{}\\|,.;:$%&#@~'\"abcxyz \t\n"
    texts = ["".join(draw.choices(alphabet, k=length)) for length in (20, 60, 200, 500) for _ in range(8)]
    return [
        *texts, "noise \0 " * 25_000, "1" * 200_000, "1+" * 250, "," * 500, "1," * 250, "1 " * 250, "=" * 500, "x=" * 250,
        "'" * 500,
    ]  # fmt: skip


def _unclosed() -> list[str]:
    return [
        r"\frac{", r"\frac", r"\frac{1}", r"\sqrt{", r"\begin{pmatrix}", r"\begin{pmatrix}1&2\\", r"\end{pmatrix}", r"\left(",
        r"\right)", "(", ")", "[1,", "(1,2", r"\{", r"\text{", "^", "_", "1^", "^1", "_{", r"\sum_{", r"\int", "|", "||", "$",
        "$$", r"\begin{matrix}" * 20, r"\left" * 80, r"\frac" * 80, r"\sqrt" * 80, r"\boxed" * 60, "^" * 400, "_" * 400,
        "-" * 500 + "8",
    ]  # fmt: skip


def _code() -> list[str]:
    calls = [
        "__import__('os').system('kill -9 0')", "eval('9**9**9')", "exec('while True: pass')", "open('/etc/passwd').read()",
        "().__class__.__bases__[0].__subclasses__()", "lambda: 0", "exit()", "quit()", "os._exit(0)", "sys.exit(1)",
        "print('\"equal\"')", '[1, "equal", 1.0, ""]', '"ready"', "Integer(7) if False else 8", "factorial(10**9)",
        "prod(range(1, 10**9))", "integrate(sin(x**x), x)", "nsolve(x, x, 10**99)", "Symbol('x').__class__", "{{7*7}}",
        "${7*7}", "`id`", "$(id)", "; rm -rf x", "%(7)s", "{0.__class__}", "\\input{/etc/passwd}", "\\write18{id}",
        "\\def\\x{\\x\\x}\\x", "\\catcode`\\%=12", "import signal", "signal.alarm(0)", "raise SystemExit",
        "raise MemoryError", "True == 1", "None", "nan", "zoo", "oo", "inf", "-inf", "NaN", "E**E**E**E**E", "I**I**I**I",
        "S.Infinity", "Float('nan')",
    ]  # fmt: skip
    return [*calls, *(rf"\text{{{call}}}" for call in calls[:8])]


def _algebra() -> list[str]:
    roots = [rf"\sqrt{{{i}}}" for i in range(2, 60)]
    variables = "abcdefghjk"
    return [
        "+".join(roots),
        "*".join(roots[:30]),
        "(" + "+".join(variables) + ")^{40}",
        "(x+1)^{10^6}",
        "(x+y+z)^{300}",
        "x^{99}+x^{98}+7=0",
        r"\frac{" + "+".join(roots[:20]) + "}{" + "-".join(roots[20:40]) + "}",
        r"e^{e^{e^{e^{e}}}}",
        r"\sin(\cos(\tan(\sin(\cos(\tan(x))))))^{99}",
        r"x^{x^{x^{x}}} = 7",
        r"\sin x = x^{99} - x + 1",
        r"1/0",
        r"0/0",
        r"0^0-1+\frac10",
        r"\log 0",
        r"\tan 90^\circ",
        r"\infty-\infty",
        r"\frac{x^{200}-1}{x-1}",
        r"\{" + ",".join(map(str, range(150))) + r"\}",
        r"\begin{pmatrix}" + r"\\".join("&".join("9" * 12) for _ in range(12)) + r"\end{pmatrix}^{99}",
        "<".join(variables),
        r"x < y < z < 10^{10^{10}}",
        r"[0,10^{10^{10}})",
        r"\bigcup_{k=1}^{10^9} [k,k+1)",
    ]


def _mutations() -> list[str]:
    """Return good answers with pieces lost, doubled or exchanged."""
    draw = random.Random(21)
    good = [r"\frac{1+\sqrt{5}}{2}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"(-\infty,0)\cup[1,\infty)", r"\{1,\frac12,3\}"]
    found = []
    for text in good * 5:
        pieces = list(text)
        for _ in range(4):
            at = draw.randrange(len(pieces))
            pieces[at : at + draw.randrange(3)] = draw.choices(r"\{}^_&()[],0", k=draw.randrange(3))
        found.append("".join(pieces) + "+0.123")
    return found
