"""Report the benchmarks of a run, from the `evaluation.json` and `NAME.jsonl` files in `evaluation/step-00000010/`."""

import dataclasses
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tepo_megatron.base.errors import DataError
from tepo_megatron.report.figures import NOTHING
from tepo_megatron.report.run import RunRecord
from tepo_megatron.report.samples import ReportSample, SampleGroup
from tepo_megatron.report.words import of_text, shortened

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
