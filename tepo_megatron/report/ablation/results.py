"""Read the results of an ablation's runs, and summarize them in one row of figures per run."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tepo_megatron.base.errors import DataError
from tepo_megatron.evaluation import Scores, read_evaluation
from tepo_megatron.evaluation.statistics import Estimate, over_problems, paired_difference
from tepo_megatron.monitor.sinks import read_metrics
from tepo_megatron.report.curves import Curves

WINDOW = 5  # steps
SHARE_OF_BEST = 0.9


@dataclass(frozen=True)
class RunOutcome:
    """A run that ended without error."""

    curves: Curves
    scores: Scores  # scores of the held-out problems, before and after the run

    @classmethod
    def of(cls, run_dir: Path) -> Self:
        """Read a finished run. Raises DataError that names the file."""
        return cls(Curves.of(read_metrics(run_dir)), read_evaluation(run_dir))


@dataclass(frozen=True)
class MethodRow:
    """One run over all its seeds. A figure is None if it is missing for a seed that it needs, or if no seed succeeded."""

    name: str
    problems: int
    # before, after: accuracy before and after the run
    before: Estimate | None
    after: Estimate | None
    steps_to_best: float | None  # mean over seeds of `steps_to_share_of_best`
    entropy_at_end: float | None  # mean over seeds of the entropy at the end, in nats per token
    difference: Estimate | None  # paired difference of `after` to the baseline's; None for the baseline itself
    errors: Mapping[int, str]  # seed -> error of a failed run


def rows(
    outcomes: Mapping[str, Mapping[int, RunOutcome]], errors: Mapping[str, Mapping[int, str]], baseline: str
) -> list[MethodRow]:
    """Return one row per run. Raises DataError if two runs were evaluated on different problems."""
    reference = _after(outcomes[baseline])
    try:
        return [_row(name, runs, errors[name], None if name == baseline else reference) for name, runs in outcomes.items()]
    except ValueError as e:
        raise DataError(f"the runs cannot be compared: {e}; remove those made with another data.eval") from None


def _row(
    name: str, outcomes: Mapping[int, RunOutcome], errors: Mapping[int, str], baseline: Mapping[int, Mapping[int, float]] | None
) -> MethodRow:
    after = _after(outcomes)
    curves = [outcome.curves for outcome in outcomes.values()]
    return MethodRow(
        name=name,
        problems=len(next(iter(after.values()), ())),
        before=over_problems({seed: outcome.scores.before for seed, outcome in outcomes.items()}) if outcomes else None,
        after=over_problems(after) if outcomes else None,
        steps_to_best=_mean([steps_to_share_of_best(c["accuracy/mean"].tolist()) for c in curves]),
        entropy_at_end=_mean([mean_of_last(c["actor/entropy"].tolist()) for c in curves]),
        difference=None if baseline is None else paired_difference(after, baseline),
        errors=errors,
    )


def _after(outcomes: Mapping[int, RunOutcome]) -> dict[int, Mapping[int, float]]:
    return {seed: outcome.scores.after for seed, outcome in outcomes.items()}


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean over seeds; None if a seed lacks the value, since a mean over the others would not be comparable."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def steps_to_share_of_best(values: Sequence[float]) -> int | None:
    """Return the first step (from 1) at which the mean of the last WINDOW values reaches SHARE_OF_BEST of its own maximum.

    None for fewer than WINDOW steps, if a value is missing (NaN), or if the mean never exceeds 0. `values` has one value per
    step of a single run.
    """
    if any(math.isnan(value) for value in values):
        return None
    trailing = [statistics.fmean(values[end - WINDOW : end]) for end in range(WINDOW, len(values) + 1)]
    best = max(trailing, default=0.0)
    if best <= 0:
        return None
    return WINDOW + next(i for i, mean in enumerate(trailing) if mean >= SHARE_OF_BEST * best)


def mean_of_last(values: Sequence[float]) -> float | None:
    """Return the mean of those of the last WINDOW values that are not NaN; None if all of them are."""
    known = [value for value in values[-WINDOW:] if not math.isnan(value)]
    return statistics.fmean(known) if known else None
