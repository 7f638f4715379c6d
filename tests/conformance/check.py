"""Check one loss function against the reference, case by case."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tepo_megatron.report.audit.reference import Formula
from tests.conformance.answers import Answer, Loss, answer, errors, right_answer
from tests.conformance.cases import CASES, Case
from tests.conformance.diagnosis import usually


@dataclass(frozen=True)
class Subject:
    """A loss function under test.

    Attributes:
        loss: The function; see `parts`.
        method: Formula that it is meant to compute.
        splits_sequences: Whether the function can handle a part with only some of a sequence's tokens. A sequence ratio needs
            all tokens of a sequence, and therefore communication, which a pure function does not have.
        says: Why it fails a case by design, as its code states: case -> a phrase with "it" as the subject.
    """

    name: str
    loss: Loss
    method: Formula
    splits_sequences: bool = False
    says: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """The result of one case.

    Attributes:
        passed: Whether it passed. None: the case does not apply.
        loss_error: Error relative to the magnitude of the loss, at least to 1.
        gradient_error: ||got - expected|| / ||expected||.
        message: Message of a failure: expected, got, and the usual cause.
        usually: The usual cause alone.
    """

    case: Case
    passed: bool | None
    loss_error: float = 0.0
    gradient_error: float = 0.0
    message: str = ""
    usually: str = ""


def check(subject: Subject, case: Case) -> Result:
    if case.splits_sequences and not subject.splits_sequences:
        return Result(case, None, message="needs whole sequences, or communication")
    batch = case.draw(subject.method)
    try:
        got = answer(subject.loss, batch, case)
    except (ArithmeticError, AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
        said = f"raised {type(error).__name__}: {error}"
        return Result(case, False, math.inf, math.inf, f"    {said}", said)
    if case.tolerance is None:
        if got.finite:
            return Result(case, True)
        return Result(case, False, math.inf, math.inf, _message(got, None, case.usually), case.usually)
    right, magnitude = right_answer(subject.method, batch)
    found = errors(got, right, magnitude)
    if max(found) <= case.tolerance:
        return Result(case, True, *found)
    said = usually(subject.method, batch, case, got, right)
    return Result(case, False, *found, _message(got, right, said), said)


def _message(got: Answer, right: Answer | None, said: str) -> str:
    lines = []
    if right is None:
        norm = float(got.gradient.norm())
        lines.append(f"    expected  finite numbers, got loss {got.loss:.6g} and a gradient of norm {norm:.6g}")
    else:
        off = float((got.gradient - right.gradient).norm())
        norms = [float(a.gradient.norm()) for a in (right, got)]
        lines.append(f"    loss      expected {right.loss:.9g}, got {got.loss:.9g}")
        lines.append(f"    gradient  expected norm {norms[0]:.6g}, got {norms[1]:.6g}; the difference has {off:.3g}")
    return "\n".join([*lines, f"    usually   {said}"])


def check_all(subject: Subject, cases: Sequence[Case] = CASES) -> list[Result]:
    return [check(subject, case) for case in cases]
