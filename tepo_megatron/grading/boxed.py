"""Find the final answer in a response."""

import re

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
    found = _last_box(text)
    return None if found is None else text[slice(*found)].strip()


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
