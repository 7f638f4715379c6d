"""Whether the grader can read gold answers: asked of the few whose form does not settle it, before a run starts."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from tepo_megatron.config import RewardConfig
from tepo_megatron.rewards.pool import GradingPool

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
# forms that math-verify reads whatever the digits and letters are (not so words: "or" is none); trying costs 1 to 150 ms each
_READABLE = re.compile("|".join(f"(?:{form})" for form in _FORMS))
_CHUNK = 32  # answers between two looks at the clock


def unreadable_golds(golds: Sequence[str], cfg: RewardConfig, seconds: float) -> tuple[dict[str, str], int]:
    """({gold: status}, how many were not looked at) of the golds that math-verify cannot read: only a response whose box holds
    the same characters could be right.

    Status: bad_gold, too_long, timeout, died, as in `MathReward`. Common forms are known by a pattern, without any process; the
    others are tried in `cfg.workers` of them for `seconds` at most. Raises RewardError if those cannot start.
    """
    bad: dict[str, str] = {}
    open_: list[str] = []
    for gold in dict.fromkeys(text.strip() for text in golds):
        if len(gold) > cfg.max_answer_chars:
            bad[gold] = "too_long"
        elif not _READABLE.fullmatch(gold):
            open_.append(gold)
    if not open_:
        return bad, 0
    pool = GradingPool(min(cfg.workers, len(open_)), cfg.soft_seconds, cfg.hard_seconds, cfg.memory_mib)
    end, done = time.monotonic() + seconds, 0
    try:
        while done < len(open_) and time.monotonic() < end:
            chunk = open_[done : done + _CHUNK]
            verdicts = pool.grade([(gold, gold) for gold in chunk])
            bad |= {gold: v for gold, v in zip(chunk, verdicts, strict=True) if v in ("bad_gold", "timeout", "died")}
            done += len(chunk)
    finally:
        pool.close()
    return bad, len(open_) - done
