"""The conformance kit: a right loss passes, and of a wrong one it names the case and the usual cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance import own
from tests.conformance.__main__ import main
from tests.conformance.cases import CASES
from tests.conformance.check import Result, Subject, check, check_all
from tests.conformance.parts import Part
from tests.reference.methods import METHODS
from tests.reference.parts import Method

GRPO = Method(**METHODS["grpo"])
BY_NAME = {case.name: case for case in CASES}


def per_token(part: Part, low: float = 0.2, high: float = 0.28) -> Tensor:
    """-min(r A, clip(r) A) of each token, as most trainers have it."""
    log_ratio = torch.where(part.mask, part.logprob - part.old_logprob, 0.0).clamp(-20, 20)
    ratio, advantage = log_ratio.exp(), part.advantage[:, None]
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def right(part: Part) -> Tensor:
    return torch.where(part.mask, per_token(part), 0.0).sum() / max(1, part.tokens)


def mean_of_a_part(part: Part) -> Tensor:
    return (per_token(part) * part.mask).sum() / part.mask.sum().clamp(min=1)


def sequences_but_one(part: Part) -> Tensor:
    return (per_token(part) * part.mask).sum() / (part.sequences - 1)


def length_and_one(part: Part) -> Tensor:
    return ((per_token(part) * part.mask).sum(1) / (part.length + 1)).sum() / part.sequences


def exchanged_bounds(part: Part) -> Tensor:
    return (per_token(part, 0.28, 0.2) * part.mask).sum() / max(1, part.tokens)


def ratio_to_the_engine(part: Part) -> Tensor:
    log_ratio = torch.where(part.mask, part.logprob - part.rollout_logprob, 0.0).clamp(-20, 20)
    ratio, advantage = log_ratio.exp(), part.advantage[:, None]
    value = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    return -(value * part.mask).sum() / max(1, part.tokens)


def padding_is_counted(part: Part) -> Tensor:
    return per_token(part).sum() / max(1, part.tokens)


def rank_average(part: Part) -> Tensor:
    return right(part) * part.ranks


def broken(part: Part) -> Tensor:
    raise ValueError("no such thing")


def failed(results: list[Result]) -> dict[str, str]:
    return {r.case.name: r.message for r in results if r.passed is False}


def test_a_right_loss_passes_every_case() -> None:
    results = check_all(Subject("right", right, GRPO, splits_sequences=True))
    assert all(r.passed for r in results), failed(results)


@pytest.mark.parametrize("subject", [s for s in own.subjects() if s.name in ("tepo", "clip_cov")], ids=lambda s: s.name)
def test_own_rows_pass(subject: Subject) -> None:
    """The others: `python -m tests.conformance own`."""
    results = check_all(subject)
    assert not failed(results)
    assert [r.case.name for r in results if r.passed is None] == (["split sequences"] if subject.name == "tepo" else [])


@pytest.mark.parametrize(
    ("loss", "parts", "case", "said"),
    [
        (mean_of_a_part, {}, "unequal microbatches", "a mean over each microbatch, averaged"),
        (sequences_but_one, {"aggregate": "sequence_mean_token_sum"}, "whole", "the formula itself"),
        (length_and_one, {"aggregate": "sequence_mean_token_mean"}, "one-token responses", "|y| is off by one"),
        (exchanged_bounds, {}, "whole, again", "the formula itself"),
        (ratio_to_the_engine, {}, "whole", "the formula itself"),
        (padding_is_counted, {}, "padding holds other numbers", "the mask is missing from a sum or a mean"),
        (rank_average, {}, "2 ranks", "denominators of one rank"),
        (lambda part: -right(part), {}, "whole", "the formula itself"),
        (lambda part: right(part).detach(), {}, "whole", "the formula itself"),
        (broken, {}, "whole", "raised ValueError: no such thing"),
    ],
)
def test_a_wrong_loss_fails_with_its_usual_cause(
    loss: Callable[[Part], Tensor], parts: dict[str, Any], case: str, said: str
) -> None:
    result = check(Subject("wrong", loss, Method(**METHODS["grpo"] | parts)), BY_NAME[case])
    assert result.passed is False and said in result.message
    assert loss is broken or ("expected" in result.message and "got" in result.message)


def test_only_the_cases_that_a_mistake_touches_fail() -> None:
    wrong = failed(check_all(Subject("wrong", mean_of_a_part, GRPO, splits_sequences=True)))
    shared = {case.name for case in CASES if len(case.layout.rows) * len(case.layout.rows[0]) * case.layout.halves > 1}
    assert wrong.keys() == shared


def test_the_command_names_the_case_and_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{__name__}:sequences_but_one"
    assert main([name, "--as", "grpo", "--set", "aggregate=sequence_mean_token_sum"]) == 1
    assert "FAIL  whole\n    loss      expected " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no such part"):
        main([name, "--as", "grpo", "--set", "cliphigh=0.2"])
    with pytest.raises(SystemExit, match="module:function with --as ROW"):
        main([name])
