"""Results from the samples of benchmarks: of one, over all, and of two runs on the same problems, also as tables.

The tables, for the terminal and in Markdown, are made from one set of cells.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from tepo_megatron.base.errors import DataError, escaped
from tepo_megatron.evaluation.benchmarks import COLUMNS, PublishedRow, title_of
from tepo_megatron.evaluation.samples import BenchmarkSample
from tepo_megatron.evaluation.statistics import (
    Interval,
    PairedDifference,
    ScoreEstimate,
    difference,
    majority,
    pass_at_k,
    share,
    standard_error,
)


@dataclass(frozen=True)
class Result:
    """Result of one benchmark."""

    problems: int
    samples: int  # samples per problem, k
    accuracy: ScoreEstimate
    # pass_at, majority: empty and None if a score is neither 0 nor 1, which leaves open what is right
    pass_at: Mapping[int, float]  # unbiased pass@i, for powers of two up to k, and for k
    # maj@k. Right answers count as one answer, however they are written; wrong answers differ as their texts do.
    majority: float | None
    truncated: float  # share of responses cut off at the length limit
    tokens: float  # mean length of a response in tokens
    unreadable: int  # number of problems whose gold answer math-verify cannot read; only its exact text counts as right
    # Mean over problems of the weighted sum of reward.terms, and its standard error. None: an earlier version kept no rewards.
    reward: float | None
    reward_error: float | None


@dataclass(frozen=True)
class BenchmarkComparison:
    """Comparison of two runs on one benchmark."""

    # ours, theirs: mean score of the first and the second run, in [0, 1]
    ours: float
    theirs: float
    difference: PairedDifference  # first minus second, paired by problem
    # Problems with a mean score above 0.5 in the first run, but not in the second
    gained: tuple[int, ...]
    lost: tuple[int, ...]


def result(samples: Sequence[BenchmarkSample]) -> Result:
    """Return the result of a benchmark from all its samples. Raises DataError if problems have different numbers of samples."""
    groups = by_problem(samples)
    k = len(next(iter(groups.values())))
    right = {problem: [sample.score > 0 for sample in group] for problem, group in groups.items()}
    partial = any(sample.score not in (0, 1) for sample in samples)
    powers = () if partial else sorted({2**i for i in range(k.bit_length())} | {k})
    votes = [majority([_vote(s) for s in group], right[problem]) for problem, group in groups.items()]
    known = all(sample.reward is not None for sample in samples)
    rewards = [statistics.fmean(s.reward or 0.0 for s in group) for group in groups.values()] if known else []
    return Result(
        problems=len(groups),
        samples=k,
        accuracy=share(list(scores(samples).values()), k),
        pass_at={p: statistics.fmean(pass_at_k(k, sum(verdicts), p) for verdicts in right.values()) for p in powers},
        majority=None if partial else statistics.fmean(votes),
        truncated=statistics.fmean(sample.stop == "length" for sample in samples),
        tokens=statistics.fmean(sample.tokens for sample in samples),
        unreadable=sum(any(sample.status == "bad_gold" for sample in group) for group in groups.values()),
        reward=statistics.fmean(rewards) if known else None,
        reward_error=standard_error(rewards),
    )


def by_problem(samples: Sequence[BenchmarkSample]) -> dict[int, list[BenchmarkSample]]:
    """Return the samples of each problem. Raises DataError if problems have different numbers of samples."""
    groups: dict[int, list[BenchmarkSample]] = {}
    for sample in samples:
        groups.setdefault(sample.problem, []).append(sample)
    counts = {len(group) for group in groups.values()}
    if len(counts) > 1:
        raise DataError(f"problems have {min(counts)} to {max(counts)} samples, not equally many; make the evaluation again")
    return groups


def scores(samples: Sequence[BenchmarkSample]) -> dict[int, float]:
    """Return problem -> mean score of its samples."""
    return {problem: statistics.fmean(s.score for s in group) for problem, group in by_problem(samples).items()}


def compare(ours: Sequence[BenchmarkSample], theirs: Sequence[BenchmarkSample], name: str) -> BenchmarkComparison:
    """Return the first run minus the second. Raises DataError unless they have the same problems and gold answers."""
    a, b = scores(ours), scores(theirs)
    golds_a, golds_b = ({s.problem: s.gold for s in samples} for samples in (ours, theirs))
    if golds_a != golds_b:
        wrong = sorted(p for p in a.keys() | b.keys() if golds_a.get(p) != golds_b.get(p))
        raise DataError(
            f"{name}: the two evaluations are not of the same problems: {len(wrong)} differ, the first of them row {wrong[0]}; "
            "evaluate both on the same file"
        )
    order = sorted(a)
    return BenchmarkComparison(
        ours=statistics.fmean(a.values()),
        theirs=statistics.fmean(b.values()),
        difference=difference([a[p] for p in order], [b[p] for p in order]),
        gained=tuple(p for p in order if a[p] > 0.5 >= b[p]),
        lost=tuple(p for p in order if b[p] > 0.5 >= a[p]),
    )


def over_samples(results: Mapping[str, Result]) -> float:
    """Return the mean over all samples of all benchmarks, which explains the paper's averages best (examples/paper)."""
    counts = {name: r.problems * r.samples for name, r in results.items()}
    return sum(counts[name] * r.accuracy.mean for name, r in results.items()) / sum(counts.values())


def over_benchmarks(results: Mapping[str, Result]) -> float:
    """Return the mean over benchmarks, with equal weights."""
    return statistics.fmean(r.accuracy.mean for r in results.values())


def _vote(sample: BenchmarkSample) -> str | None:
    """Return the sample's vote for maj@k: the same for all right answers, else the answer without spaces; None for none."""
    if sample.score > 0:
        return f"right: {sample.gold}"
    return None if not sample.answer else "".join(sample.answer.split())


NOTHING = "–"  # noqa: RUF001
FILE_WIDTH = 150  # width in characters if the output is no terminal


@dataclass(frozen=True)
class ResultTable:
    """A table."""

    title: str
    headings: Sequence[str]  # column headings. The first column has names, the others figures.
    rows: Sequence[Sequence[str]]  # cells of each row
    notes: Sequence[str] = ()
    texts: Sequence[int] = (0,)  # columns of text, which are aligned left
    width: int = FILE_WIDTH  # width in characters if the output is no terminal
    wraps: bool = True  # whether names may be broken into several lines

    def print(self) -> None:
        """Print the table to the terminal."""
        console = Console()
        if not console.is_terminal:
            console = Console(width=self.width)
        drawn = Table(box=box.SIMPLE_HEAD, title=escaped(self.title), title_justify="left", title_style="bold")
        for number, heading in enumerate(self.headings):
            no_wrap = number == 0 and not self.wraps
            drawn.add_column(heading, justify="left" if number in self.texts else "right", no_wrap=no_wrap)
        for row in self.rows:
            drawn.add_row(*map(escaped, row))
        console.print(drawn, markup=False, highlight=False)
        for note in self.notes:
            console.print(escaped(note), markup=False, highlight=False, style="dim")

    def markdown(self, level: int = 2) -> str:
        """Return the table in Markdown, below a heading of this level."""

        def line(texts: Sequence[str]) -> str:
            return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"

        rule = line(["---" if number in self.texts else "---:" for number in range(len(self.headings))])
        body = [line(self.headings), rule, *(line(row) for row in self.rows)]
        return "\n".join([f"{'#' * level} {self.title}", "", *body, "", *(f"* {note}" for note in self.notes), ""])


def figures(title: str, results: Mapping[str, Result], changes: Mapping[str, Sequence[str]]) -> ResultTable:
    """Return the table of measured results."""
    partial = not all(r.pass_at for r in results.values())
    score, graded = ("mean score", "over all samples") if partial else ("avg@k", "share of right samples")
    notes = [
        f"{score}: {graded} ± standard error, clustered by problem. 95 %: Wilson's interval for as many independent "
        "answers as have that error, and the bootstrap over problems. What another training seed would change is in neither.",
        "pass@k: unbiased, at least one of k samples right. maj@k: the most frequent answer is right; right ones count as one "
        "answer, wrong ones by their text.",
    ]
    notes += ["A score that is neither 0 nor 1 leaves open what is right: no pass@k and maj@k there."] if partial else []
    alike: dict[str, list[str]] = {}
    for name, changed in changes.items():
        for change in changed:
            alike.setdefault(change, []).append(title_of(name))
    notes += [f"Not the paper's protocol: {change} ({', '.join(titles)})." for change, titles in alike.items()]
    for name, r in results.items():
        if r.reward is not None and r.reward != r.accuracy.mean:
            error = "" if r.reward_error is None else f" ± {r.reward_error:.4f}"
            notes.append(f"{title_of(name)}: mean reward, the weighted sum of reward.terms: {r.reward:.4f}{error}.")
        if r.unreadable:
            notes.append(
                f"{title_of(name)}: {r.unreadable} gold answers are empty or cannot be read by math-verify; of "
                "these only the exact text counts as right."
            )
    headings = ["", "problems", "k", f"{score}, % ± SE", "95 %", "bootstrap", "pass@k", "maj@k", "cut off, %", "tokens"]
    return ResultTable(title, headings, [_row(name, r) for name, r in results.items()], notes)


def _row(name: str, r: Result) -> list[str]:
    error = "" if r.accuracy.standard_error is None else f" ± {100 * r.accuracy.standard_error:.2f}"
    return [
        title_of(name), str(r.problems), str(r.samples), f"{100 * r.accuracy.mean:.2f}{error}",
        interval(r.accuracy.interval), interval(r.accuracy.bootstrap), _percent(r.pass_at.get(r.samples)),
        _percent(r.majority), f"{100 * r.truncated:.1f}", f"{r.tokens:.0f}",
    ]  # fmt: skip


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.2f}"


def paper_table(title: str, results: Mapping[str, Result], published: Sequence[PublishedRow]) -> ResultTable:
    """Return a table of avg@k in the paper's columns, above rows of the paper."""
    names = [name for name in COLUMNS if name in results]
    results = {name: results[name] for name in names}
    ours = [f"{100 * results[name].accuracy.mean:.2f}" for name in names]
    rows = [[title, *ours, f"{100 * over_benchmarks(results):.2f}", f"{100 * over_samples(results):.2f}"]]
    for row in published:
        known = [row.accuracy[name] for name in names if name in row.accuracy]
        mean = f"{sum(known) / len(known):.2f}" if len(known) == len(names) else NOTHING
        cells = [f"{row.accuracy[name]:.2f}" if name in row.accuracy else NOTHING for name in names]
        rows.append([row.title, *cells, mean, f"{row.average:.2f}" if len(names) == len(COLUMNS) else NOTHING])
    headings = ["", *(title_of(name) for name in names), "mean", "over samples"]
    note = (
        "mean: of the columns. over samples: every sample counts the same; the paper's printed average, which is no mean of "
        "its columns, is best explained by that (examples/paper/README.md)."
    )
    return ResultTable("avg@k, %, next to the paper", headings, rows, [note] if published else [])


def comparison(ours: str, theirs: str, compared: Mapping[str, BenchmarkComparison]) -> ResultTable:
    """Return the table of two runs, paired by problem."""
    rows = []
    for name, c in compared.items():
        d = c.difference
        rows.append(
            [
                title_of(name), f"{100 * c.ours:.2f}", f"{100 * c.theirs:.2f}", f"{100 * d.mean:+.2f}",
                interval(d.interval, "+"), interval(d.bootstrap, "+"), str(d.better), str(d.worse), f"{d.sign_test:.2g}",
                str(len(c.gained)), str(len(c.lost)),
            ]
        )  # fmt: skip
    notes = [
        "difference: first minus second in points, paired by problem; 95 %: Student's t over problems, and the bootstrap.",
        "better, worse: problems with a higher and a lower score; p: sign test of that split. gained, lost: problems whose "
        "mean score is above 0.5 in one run and not in the other.",
        f"Even where nothing differs, one of {len(compared)} intervals misses 0 with a chance of up to "
        f"{min(100, 5 * len(compared))} %. They say nothing of other training seeds.",
    ]
    for name, c in compared.items():
        if c.gained or c.lost:
            notes.append(f"{title_of(name)}, rows: gained {_rows(c.gained)}, lost {_rows(c.lost)}.")
    headings = ["", "first", "second", "difference", "95 %", "bootstrap", "better", "worse", "p", "gained", "lost"]
    return ResultTable(f"{ours} against {theirs}", headings, rows, notes)


def _rows(problems: Sequence[int], most: int = 20) -> str:
    shown = " ".join(map(str, problems[:most]))
    return (shown or "none") if len(problems) <= most else f"{shown} and {len(problems) - most} more"


def interval(bounds: Interval | None, sign: str = "") -> str:
    """Return an interval in percent, or a dash for None."""
    return NOTHING if bounds is None else f"[{100 * bounds[0]:{sign}z.2f}, {100 * bounds[1]:{sign}z.2f}]"
