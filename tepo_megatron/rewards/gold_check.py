"""Check before a run starts which gold answers the grader cannot read. Only unusual forms are tried on the grader."""

import asyncio
import contextlib
import math
import re
import time
from collections.abc import Sequence
from dataclasses import replace

from tepo_megatron.config import RewardConfig
from tepo_megatron.rewards.grading.answers import MAX_ANSWER_CHARS, gold_answer, gold_fault
from tepo_megatron.rewards.grading.programs import read_tests
from tepo_megatron.rewards.pool import GradingPool, limits_of

_NUMBER = r"-?(\d{1,30}(\.\d{1,30})?|\.\d{1,30}|\d{1,3}(,\d{3}){1,5})"
_INTEGER = r"-?\d{1,30}"
_FORMS = (
    rf"\$?{_NUMBER}\$?",
    _NUMBER + r"(\\%|\^\\circ|\^\{\\circ\})",
    r"-?(\d{1,30})?\\[dt]?frac\{-?\d{1,30}\}\{[1-9]\d{0,30}\}",
    r"-?\d{1,30}/[1-9]\d{0,30}",
    r"-?(\d{1,30})?(\\sqrt\{\d{1,30}\}|\\pi)",
    r"[A-Za-z]|\\text\{\(?[A-Z]\)?\}",
    rf"\({_INTEGER}(, ?{_INTEGER}){{1,5}}\)",
)
# Forms that math-verify reads whatever their digits and letters are; words are not among them ("or" is unreadable).
# Trying an answer costs 1 to 150 ms.
_READABLE = re.compile("|".join(f"(?:{form})" for form in _FORMS))
_CHUNK = 32  # answers between two checks of the time limit


def unreadable_golds(golds: Sequence[str], cfg: RewardConfig, seconds: float) -> tuple[dict[str, str], int]:
    """Return ({gold: status} of the gold answers that the grader cannot read, number of answers not tried).

    Only a response whose answer has the same characters as such a gold answer could be right. The statuses are bad_gold,
    too_long, timeout and died, as in `MathTerm`; bad_tests, as in `CodeTerm`. Common forms are recognized by a pattern, without
    any process. The result is empty if no reward term compares answers. `seconds`: time limit for trying after the first
    chunk of 32 answers, checked between chunks. Raises RewardError if the worker processes cannot start.
    """
    bad: dict[str, str] = {}
    if any(entry.type == "code" for entry in cfg.terms):
        return {text: "bad_tests" for text in dict.fromkeys(golds) if not _are_tests(text)}, 0
    if not any(entry.type in ("math", "answer_line") for entry in cfg.terms):
        return bad, 0
    open_: list[tuple[str, str]] = []  # (the whole answer, the part that is compared)
    for text in dict.fromkeys(text.strip() for text in golds):
        gold = gold_answer(text)
        if gold_fault(text) is not None:
            bad[text] = "too_long" if len(gold) > MAX_ANSWER_CHARS else "bad_gold"
        elif not _READABLE.fullmatch(gold):
            open_.append((text, gold))
    if not open_:
        return bad, 0
    tried = asyncio.run(_try_each([gold for _, gold in open_], cfg, seconds))
    statuses = {text: status for (text, _), status in zip(open_, tried, strict=False)}
    bad |= {text: status for text, status in statuses.items() if status in ("bad_gold", "timeout", "died")}
    return bad, len(open_) - len(tried)


def _are_tests(gold: str) -> bool:
    with contextlib.suppress(ValueError):
        return read_tests(gold).count > 0
    return False


async def _try_each(golds: Sequence[str], cfg: RewardConfig, seconds: float) -> list[str]:
    limits = replace(limits_of(cfg), workers=min(cfg.workers, len(golds)))
    pool = GradingPool(limits, ["equality", "boxed"], "that math-verify is installed")
    end, statuses = math.inf if seconds else 0.0, list[str]()
    try:
        while len(statuses) < len(golds) and time.monotonic() < end:
            chunk = golds[len(statuses) :][:_CHUNK]
            statuses += [outcome.status for outcome in await pool.grade(("compare", gold, gold) for gold in chunk)]
            end = min(end, time.monotonic() + seconds)  # from the first answers on: the workers may start for minutes
    finally:
        await pool.close()
    return statuses
