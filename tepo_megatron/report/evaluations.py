"""Report a run's evaluations: held-out problems, and benchmarks.

Of held-out problems it shows accuracies, the paired change, and the problems that changed most. Benchmarks are read from the
`evaluation.json` and `NAME.jsonl` files in `evaluation/step-00000010/`.
"""

import dataclasses
import itertools
import json
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tepo_megatron.base.errors import DataError
from tepo_megatron.config import DataConfig
from tepo_megatron.data.schemas import Messages, detect, prompt_and_answer
from tepo_megatron.data.sources import DatasetSource
from tepo_megatron.report.chart import Chart, ChartAxis, Series
from tepo_megatron.report.run import NOTHING, RunRecord
from tepo_megatron.report.samples import ReportSample, SampleGroup, of_text, shortened

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
    return Chart("Accuracy (mean score) on held-out problems", caption, [ChartAxis(series, format="percent", across=True)])


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


SHOWN = 4  # steps in the table
MOST_CHANGED = 2  # problems shown per benchmark

Scores = Mapping[int, Mapping[str, tuple[float, float]]]  # step -> benchmark -> (accuracy, standard error)


@dataclass(frozen=True)
class BenchmarkPanel:
    """Benchmark results of a run."""

    scores: Scores  # accuracy and standard error by step (ascending) and benchmark
    groups: Sequence[SampleGroup]  # samples of the problems whose scores changed most
    notes: Sequence[str]  # sentences about files that could not be read

    @property
    def names(self) -> list[str]:
        """Names of all benchmarks."""
        return list(dict.fromkeys(itertools.chain.from_iterable(self.scores.values())))

    @property
    def steps(self) -> list[str]:
        """Column headings of the table: the first step and the latest ones, SHOWN at most."""
        return [f"step {step}" for step in self._shown]

    @property
    def _shown(self) -> list[int]:
        steps = list(self.scores)
        return steps if len(steps) <= SHOWN else [steps[0], *steps[1 - SHOWN :]]

    def rows(self) -> list[tuple[str, ...]]:
        """Return the rows of the table: the benchmark, then its accuracy at each of `steps`."""
        return [(name, *(_written(self.scores[step].get(name)) for step in self._shown)) for name in self.names]


def read_benchmarks(run: RunRecord) -> BenchmarkPanel:
    """Read the benchmarks of a run. Missing files are skipped, and unreadable ones become notes."""
    folders = {int(path.name.removeprefix("step-")): path for path in (run.folder / "evaluation").glob("step-[0-9]*[0-9]")}
    scores: dict[int, dict[str, tuple[float, float]]] = {}
    groups: list[SampleGroup] = []
    notes: list[str] = []
    for step in sorted(folders):
        path = folders[step] / "evaluation.json"
        try:
            results = json.loads(path.read_text())["benchmarks"]
            each = {name: one["result"]["accuracy"] for name, one in results.items()}
            scores[step] = {name: (float(a["mean"]), float(a["standard_error"] or 0.0)) for name, a in each.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            notes.append(f"{path}: not the results of an evaluation ({e!r}).")
    if len(scores) > 1:
        first, last = next(iter(scores)), list(scores)[-1]
        for name in sorted(scores[first].keys() & scores[last].keys()):
            files = {step: folders[step] / f"{name}.jsonl" for step in (first, last)}
            try:
                groups += _changed(name, {step: _read(file, notes) for step, file in files.items()})
            except DataError as e:
                notes.append(f"{e}.")
    return BenchmarkPanel(scores, sorted(groups, key=lambda group: group.title), notes)


def _written(score: tuple[float, float] | None) -> str:
    return NOTHING if score is None else f"{100 * score[0]:.1f} ± {100 * score[1]:.1f}"


def _read(path: Path, notes: list[str]) -> dict[int, list[dict[str, Any]]]:
    """Return the samples of a file by problem, and add its faults to `notes`."""
    from tepo_megatron.evaluation.samples import load_samples  # imports torch, which a run without benchmarks does not need

    samples, faults = load_samples(path)
    notes += [f"{path}: {fault}." for fault in faults]
    by_problem: dict[int, list[dict[str, Any]]] = {}
    for sample in samples:
        by_problem.setdefault(sample.problem, []).append(dataclasses.asdict(sample))
    return by_problem


def _changed(name: str, by_step: Mapping[int, Mapping[int, Sequence[dict[str, Any]]]]) -> list[SampleGroup]:
    """Return the problems whose mean score changed most between two steps.

    Each group has, for each step, the sample whose score is nearest the problem's mean at that step.
    """
    means = [
        {p: statistics.fmean(r["score"] for r in rows) for p, rows in by_problem.items()} for by_problem in by_step.values()
    ]
    before, after = means
    order = sorted(before.keys() & after.keys(), key=lambda p: (-abs(after[p] - before[p]), p))
    groups = []
    for problem in [p for p in order[:MOST_CHANGED] if after[p] != before[p]]:
        samples = [
            _sample(
                f"step {step}, mean score {mean[problem]:.3g} of {len(by_problem[problem])}", by_problem[problem], mean[problem]
            )
            for (step, by_problem), mean in zip(by_step.items(), means, strict=True)
        ]
        groups.append(SampleGroup(f"{name}, problem {problem}: {before[problem]:.3g} → {after[problem]:.3g}", samples))
    return groups


def _sample(title: str, rows: Sequence[dict[str, Any]], mean: float) -> ReportSample:
    row = min(rows, key=lambda r: abs(r["score"] - mean))
    facts = [f"score {row['score']:.3g}", str(row["status"]), f"{row['tokens']} tokens"]
    if row["stop"] == "length":
        facts.append("cut off at the length limit")
    return ReportSample(title, row["score"] > 0.5, facts, str(row["gold"]), (), shortened(of_text(row["text"], "response")))
