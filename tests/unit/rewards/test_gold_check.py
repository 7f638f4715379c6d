"""Gold answers that the grader cannot read: known by their form, or tried in real workers."""

import random

from tepo_megatron.config import RewardConfig
from tepo_megatron.rewards.gold_check import unreadable_golds
from tepo_megatron.rewards.grading.equality import load_grader

CFG = RewardConfig(workers=2, timeout_seconds=60.0)  # verdicts must not depend on who else is at work


def of_known_forms(seed: int) -> list[str]:
    """Random ones of each form that is taken for readable."""
    draw = random.Random(seed)

    def digits() -> str:
        return str(draw.randrange(1, 10 ** draw.choice([1, 2, 5, 12])))

    return [
        digits(), f"-{digits()}", f"{digits()}.{digits()}", f".{digits()}", "1,234,567", f"${digits()}$", f"{digits()}$",
        f"{digits()}\\%", f"{digits()}^\\circ", f"{digits()}^{{\\circ}}", f"\\frac{{{digits()}}}{{{digits()}}}",
        f"-\\dfrac{{-{digits()}}}{{{digits()}}}", f"{digits()}\\tfrac{{{digits()}}}{{{digits()}}}", f"{digits()}/{digits()}",
        f"\\sqrt{{{digits()}}}", f"-{digits()}\\sqrt{{{digits()}}}", "\\pi", f"{digits()}\\pi", *"ABCDEeix",
        "\\text{A}", "\\text{(B)}", f"({digits()}, -{digits()})", f"({digits()},{digits()},{digits()})", "0", "007",
    ]  # fmt: skip


def test_known_forms_are_readable() -> None:
    """Math-verify itself reads every known form, so that no answer is passed over that it would refuse."""
    grade = load_grader()
    for gold in of_known_forms(0):
        assert unreadable_golds([gold], CFG, seconds=0) == ({}, 0), f"{gold}: its form is not known"  # else it is not tried
        assert grade(gold, gold) == "equal", gold


def test_answers_of_other_forms_are_tried_in_a_worker() -> None:
    """An answer that hangs in a worker counts as unreadable; the same answer is tried only once."""
    asked = ["7", r"\frac{1", r"x^2+1", r" \frac{1 ", "9" * 600, r"[0, 1)", "{"]
    bad, unchecked = unreadable_golds(asked, CFG, seconds=60)
    assert bad == {r"\frac{1": "bad_gold", "9" * 600: "too_long", "{": "bad_gold"} and unchecked == 0


def test_the_time_for_trying_counts_from_the_first_answers() -> None:
    """Workers may import their modules for minutes."""
    golds = [rf"x^{{{k}}}+1" for k in range(70)]
    assert unreadable_golds(golds, CFG, seconds=1e-9) == ({}, len(golds) - 32)
