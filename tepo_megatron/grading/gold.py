"""Gold answers: extract the part that is compared, and refuse those by which no response could be right."""

import re

from tepo_megatron.grading.boxed import last_boxed

MAX_ANSWER_CHARS = 512  # a longer answer is wrong without being read
_UNREADABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
_SOMETHING = re.compile(r"\w|\\(?:infty|emptyset|varnothing|pi)|[∅∞π]")
_BRACE = re.compile(r"\\.|([{}])", re.DOTALL)


def gold_answer(answer: str) -> str:
    """Return what is compared, stripped: the last box if the gold answer holds one (a worked solution), otherwise all of it."""
    return (last_boxed(answer) or answer).strip()


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
    for found in _BRACE.finditer(text):
        if found[1]:
            depth += 1 if found[1] == "{" else -1
        if depth < 0:
            return False
    return depth == 0
