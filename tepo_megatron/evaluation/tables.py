"""Results as tables, for the terminal and in Markdown, from one set of cells."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from tepo_megatron.base.errors import escaped
from tepo_megatron.evaluation.benchmarks import COLUMNS, PublishedRow, title_of
from tepo_megatron.evaluation.results import BenchmarkComparison, Result, over_benchmarks, over_samples
from tepo_megatron.evaluation.statistics import Interval

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
    notes = [
        "avg@k: share of right samples ± standard error, clustered by problem. 95 %: Wilson's interval for as many independent "
        "answers as have that error, and the bootstrap over problems. What another training seed would change is in neither.",
        "pass@k: unbiased, at least one of k samples right. maj@k: the most frequent answer is right; right ones count as one "
        "answer, wrong ones by their text.",
    ]
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
    headings = ["", "problems", "k", "avg@k, % ± SE", "95 %", "bootstrap", "pass@k", "maj@k", "cut off, %", "tokens"]
    return ResultTable(title, headings, [_row(name, r) for name, r in results.items()], notes)


def _row(name: str, r: Result) -> list[str]:
    error = "" if r.accuracy.standard_error is None else f" ± {100 * r.accuracy.standard_error:.2f}"
    return [
        title_of(name), str(r.problems), str(r.samples), f"{100 * r.accuracy.mean:.2f}{error}",
        interval(r.accuracy.interval), interval(r.accuracy.bootstrap), f"{100 * r.pass_at[r.samples]:.2f}",
        f"{100 * r.majority:.2f}", f"{100 * r.truncated:.1f}", f"{r.tokens:.0f}",
    ]  # fmt: skip


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
        "better, worse: problems with a higher and a lower score; p: sign test of that split. gained, lost: problems that most "
        "samples solve in one run and not in the other.",
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
