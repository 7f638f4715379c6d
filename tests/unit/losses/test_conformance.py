"""The conformance kit: a right loss passes, and of a wrong one it names the case and the mistake."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tepo_megatron.report.audit.reference import Formula
from tests.conformance.__main__ import main
from tests.conformance.cases import CASES
from tests.conformance.check import Result, Subject, check, check_all
from tests.conformance.parts import Part
from tests.reference.methods import METHODS

GRPO = Formula(**METHODS["grpo"])
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


def failed(results: list[Result]) -> dict[str, str]:
    return {r.case.name: r.usually for r in results if r.passed is False}


def test_a_right_loss_passes_every_case() -> None:
    results = check_all(Subject("right", right, GRPO, splits_sequences=True))
    assert all(r.passed for r in results), failed(results)


@pytest.mark.parametrize(
    ("loss", "parts", "case", "said"),
    [
        (mean_of_a_part, {}, "unequal microbatches", "each microbatch is a mean of its own, and the means are added"),
        (sequences_but_one, {"aggregate": "sequence_mean_token_sum"}, "whole", "the number of sequences is one too small"),
        (length_and_one, {"aggregate": "sequence_mean_token_mean"}, "one-token responses", "off by the factor 0.5"),
        (length_and_one, {"aggregate": "sequence_mean_token_mean"}, "whole", "|y|, which a response's sum is divided by"),
        (exchanged_bounds, {}, "whole, again", "the clip bounds are exchanged"),
        (ratio_to_the_engine, {}, "whole", "the old log-probs are those of the engine"),
        (padding_is_counted, {}, "padding holds other numbers", "the mask is missing from a sum or a mean"),
        (rank_average, {}, "2 ranks", "the average over ranks is not undone"),
        (lambda part: -right(part), {}, "whole", "the sign is wrong"),
        (lambda part: right(part).detach(), {}, "whole", "the value is right and the gradient is not"),
    ],
)
def test_a_wrong_loss_fails_and_the_mistake_is_named(
    loss: Callable[[Part], Tensor], parts: dict[str, Any], case: str, said: str
) -> None:
    method = Formula(**METHODS["grpo"] | parts)
    result = check(Subject("wrong", loss, method), BY_NAME[case])
    assert result.passed is False and said in result.usually
    assert said in result.message and "expected" in result.message and "got" in result.message


def test_a_loss_that_raises_fails_with_what_it_says() -> None:
    def broken(part: Part) -> Tensor:
        raise ValueError("no such thing")

    result = check(Subject("broken", broken, GRPO), BY_NAME["whole"])
    assert result.passed is False and "raised ValueError: no such thing" in result.message


def test_the_command_names_the_case_and_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{__name__}:sequences_but_one"
    assert main([name, "--as", "grpo", "--set", "aggregate=sequence_mean_token_sum"]) == 1
    printed = capsys.readouterr().out
    assert "FAIL  whole\n    loss      expected " in printed and "the number of sequences is one too small" in printed
    with pytest.raises(SystemExit, match="no such part"):
        main([name, "--as", "grpo", "--set", "cliphigh=0.2"])
    with pytest.raises(SystemExit, match=r"module:NAME or file\.py:NAME with --as ROW"):
        main([name])


OBJECTIVE = """
from tepo_megatron.losses import OBJECTIVES
OWN = OBJECTIVES["grpo"].replace(clip_high=0.3)
"""


def test_an_objective_is_named_by_its_file_as_in_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OBJECTIVE)
    assert main([f"{file}:OWN", "--as", "grpo", "--set", "clip_high=0.3"]) == 0
    assert main([f"{file}:OWN", "--as", "grpo"]) == 1
    assert "the formula itself" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="there is no file"):
        main([f"{tmp_path}/none.py:OWN", "--as", "grpo"])
