"""Where the final answer stands in a response."""

from __future__ import annotations

import re

# An escaped brace is a character and opens nothing; `\\boxed`, as models that imitate quoted strings write it, is a box.
_TOKEN = re.compile(r"(?P<box>\\{1,2}boxed\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""The stripped content of the last `\boxed{...}` whose brace is closed; None where there is none.

    Of nested boxes the inner one counts, since it opens last; a box cut off by the length limit does not count.
    One pass, linear in the text, whatever the text is.

    >>> last_boxed(r"so \boxed{1}, no: \boxed{ \frac{1}{2} } and \boxed{3")
    '\\frac{1}{2}'
    """
    open_braces: list[int | None] = []  # where the content of each open box starts, None for a plain brace
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
    return None if last is None else text[slice(*last)].strip()
