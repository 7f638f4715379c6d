"""Report a run's evaluations on held-out problems: accuracies, the paired change, and the problems that changed most."""

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tepo_megatron.base.errors import DataError
from tepo_megatron.config import DataConfig
from tepo_megatron.data.schemas import Messages, detect, prompt_and_answer
from tepo_megatron.data.sources import DatasetSource
from tepo_megatron.report.chart import Chart, ChartAxis, Series
from tepo_megatron.report.run import RunRecord

if TYPE_CHECKING:
    from tepo_megatron.evaluation.statistics import PairedDifference

EVALUATION_FILE = "evaluation.jsonl"
MOST = 8  # problems that are listed
_HALF = statistics.NormalDist().inv_cdf(0.975)  # half width of a 95 % interval, in standard errors


@dataclass(frozen=True)
class HeldOutProblem:
    """A held-out problem."""

    number: int  # row of the dataset, from 0
    # before, after: mean score of its samples before and after the run
    before: float
    after: float
    # text, answer: prompt and gold answer; empty if the dataset can no longer be read
    text: str
    answer: str


@dataclass(frozen=True)
class HeldOut:
    """Evaluations of one run."""

    accuracies: Sequence[tuple[str, str]]  # (step, accuracy with standard error), in words
    change: "PairedDifference | None"  # change from before to after the run; None without scores of both
    changed: Sequence[HeldOutProblem]
    after: Mapping[int, float]  # problem -> score after the run, for comparisons with other runs
    notes: Sequence[str] = ()  # sentences on faults of the file of scores


def change(scores: Mapping[int, float], baseline: Mapping[int, float]) -> "PairedDifference | None":
    """Return scores - baseline, problem by problem; None if they are not of the same problems, or of none."""
    if not scores or scores.keys() != baseline.keys():
        return None
    from tepo_megatron.evaluation.statistics import difference  # imports torch, which a run without evaluations does not need

    return difference(list(scores.values()), [baseline[problem] for problem in scores])


def read_held_out(run: RunRecord) -> HeldOut:
    """Read summary.json and evaluation.jsonl. Missing files give empty results. Raises DataError for a malformed one."""
    evaluations = [] if run.summary is None else run.summary.evaluations
    accuracies = [(f"step {step}", f"{accuracy:.1%} ± {100 * error:.1f}") for step, accuracy, error in evaluations]
    if not (run.folder / EVALUATION_FILE).exists():
        return HeldOut(accuracies, None, (), {})
    from tepo_megatron.evaluation.held_out import read_scores  # imports torch, which a run without evaluations does not need

    scores, faults = read_scores(run.folder)
    order = sorted(scores.after, key=lambda p: -abs(scores.after[p] - scores.before[p]))
    most = [p for p in order[:MOST] if scores.after[p] != scores.before[p]]
    rows = _rows(run.cfg.data, most)
    changed = [HeldOutProblem(p, scores.before[p], scores.after[p], *rows.get(p, ("", ""))) for p in most]
    notes = [f"{EVALUATION_FILE}: {fault}." for fault in faults]
    return HeldOut(accuracies, change(scores.after, scores.before), changed, scores.after, notes)


def accuracies(results: Sequence[tuple[str, float, float, str]], caption: str) -> Chart:
    """Return a chart of accuracies with 95 % intervals, from (label, mean, standard error, colour) of each."""
    series = []
    for label, mean, error, color in results:
        ends = max(mean - _HALF * error, 0.0), min(mean + _HALF * error, 1.0)  # an accuracy lies in [0, 1]
        series.append(Series("points", label, color, np.zeros(1), [np.array([value]) for value in (mean, *ends)]))
    return Chart("Accuracy on held-out problems", caption, [ChartAxis(series, format="percent", across=True)])


def _rows(data: DataConfig, wanted: Collection[int]) -> dict[int, tuple[str, str]]:
    """Return (problem, gold answer) by row of the evaluation data, from 0. Rows that can no longer be read are left out."""
    rows: dict[int, tuple[str, str]] = {}
    if data.eval is None or not wanted:
        return rows
    try:
        reader = DatasetSource.of(data.eval).reader()
        for place, row in reader.rows((), passing_repeats=False):
            if place in wanted and not isinstance(row, DataError):
                whole = reader.whole(place)
                schema = detect(whole, data.prompt_key, data.answer_key)
                if schema is not None:
                    prompt, answer = prompt_and_answer(whole, schema)
                    rows[place] = _words(prompt), answer
    except DataError:  # the dataset was moved or changed since the run
        return rows
    return rows


def _words(prompt: str | Messages) -> str:
    """Return a prompt's text, or its chat messages one below the other."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)
