"""The page of results, written by `python -m tests.conformance trl verl --peers FOLDER --write`."""

import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tests.conformance.cases import Case
from tests.conformance.check import Result, Subject

PAGE = "docs/conformance.md"
TITLES = {"trl": "TRL", "verl": "verl"}
Table = list[tuple[Subject, list[Result]]]

_HEAD = """# Test your own loss

`python -m tests.conformance` compares any loss function, in value and gradients, with the fp64 reference
`tepo_megatron/report/audit/reference.py`: on ragged minibatches, cut into microbatches and ranks, and in extremes. It needs a
checkout of this repository and torch alone. In five lines:

1. Write `def loss(part): ...`. `part` holds padded tensors `[B, T]` (log-probs, entropies, a mask) and `[B]` advantages:
   `tests/conformance/parts.py` has the whole list. Return what this part adds to the loss of the whole minibatch.
2. `part.tokens` and `part.sequences` count the whole minibatch. Divide by `part.ranks` or `part.microbatches` where your
   trainer averages over them.
3. Run, in the checkout: `python -m tests.conformance my_losses:loss --as grpo --set clip_high=0.2 aggregate=token_mean`.
   The rows are in `tests/reference/methods.py`, the parts that `--set` replaces are `Formula` in
   `tepo_megatron/report/audit/reference.py`.
4. Read of each case that fails what was expected, what came, and what that usually is. The reference makes the usual
   mistakes in turn (exchanged log-probs, means of means, a denominator off by one), and the one that gives your numbers is
   named.
5. Two whole examples are in `tests/conformance/adapters/`: TRL's and verl's own code, called as their trainers call it.

Of TRL's `bnpo`, for example, which takes a mean of each microbatch by design:

```
FAIL  unequal microbatches
    loss      expected -0.0865185931, got -0.0124073834
    gradient  expected norm 0.0957892, got 0.164939; the difference has 0.0939
    usually   each microbatch is a mean of its own, and the means are averaged (reproduced)
```

Where a sequence's tokens lie on several ranks, a sequence ratio needs communication, which a pure function has not. That
case is left out (n/a) unless you say `--splits-sequences`. This project's own rows are compared with the same reference in
`tests/unit/losses/test_objective_parity.py`, and with real ranks in `tests/parallel/test_every_objective.py`.
"""
_MEANING = """\
The figures are the larger error of loss (relative to what it adds up) and gradients (2-norm). The tolerance is 1e-6 in fp64
and 1e-5 in fp32. **✗** differs. *✗* differs by design, for the reason below the table. n/a does not apply. Where a case
only asks for finite numbers it says so. The columns of the tables of results are the numbers of the cases.
"""


def write(tables: Mapping[str, Table], cases: Sequence[Case]) -> None:
    """Write the page. Tables that it holds already and that are not among `tables` stay."""
    path = Path(PAGE)
    path.write_text(text(tables, cases, path.read_text() if path.exists() else ""))


def text(tables: Mapping[str, Table], cases: Sequence[Case], before: str = "") -> str:
    """Return the text of the page.

    Args:
        before: A page whose other tables are kept.
    """
    written = f"Written by `python -m tests.conformance {' '.join(TITLES)} --peers FOLDER --write`."
    lines = [_HEAD, "## Results", "", written, _MEANING]
    lines += ["|  | case | what a failure usually is |", "|---|---|---|"]
    lines += [f"| {i} | {_escaped(case.name)} | {_escaped(case.usually)} |" for i, case in enumerate(cases, 1)]
    for name in dict.fromkeys((*TITLES, *tables)):
        heading = f"### {TITLES.get(name, name)}\n"
        if name in tables:
            lines += ["", heading, *_section(name, tables[name], cases)]
        elif heading in before:
            lines += ["", heading + before.partition(heading)[2].partition("\n### ")[0].rstrip()]
    return "\n".join(lines).rstrip() + "\n"


def _section(name: str, table: Table, cases: Sequence[Case]) -> list[str]:
    head = ["loss", *(str(i) for i in range(1, len(cases) + 1))]
    rows = [[_escaped(subject.name), *(_cell(subject, result) for result in results)] for subject, results in table]
    lines = [_versions(name), "", *(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))]
    return [*lines, "", *_notes(table, cases)]


def _escaped(words: str) -> str:
    return words.replace("|", "\\|")


def _versions(name: str) -> str:
    return f"{name} {importlib.metadata.version(name)}, torch {torch.__version__.partition('+')[0]}."


def _cell(subject: Subject, result: Result) -> str:
    if result.passed is None:
        return "n/a"
    if not result.passed:
        return "*✗*" if result.case.name in subject.says else "**✗**"
    if result.case.tolerance is None:
        return "finite"
    worst = max(result.loss_error, result.gradient_error)
    return f"{worst:.0e}" if worst else "0"


def _notes(table: Table, cases: Sequence[Case]) -> list[str]:
    """Return one line for each reason, with the losses and the numbers of the cases that it explains."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for subject, results in table:
        for number, result in enumerate(results, 1):
            if result.passed is False:
                where = reasons.setdefault(_reason(subject, result), {})
                where.setdefault(subject.name, []).append(str(number))
    lines = []
    for reason, where in reasons.items():
        alike: dict[str, list[str]] = {}
        for name, numbers in where.items():
            alike.setdefault(", ".join(numbers), []).append(f"`{name}`")
        lines.append(f"* {reason}: " + "; ".join(f"{', '.join(names)} in {numbers}" for numbers, names in alike.items()) + ".")
    return lines


def _reason(subject: Subject, result: Result) -> str:
    says = subject.says.get(result.case.name)
    if says is None:
        return result.usually
    return f"By design it {says}" + (f". {result.usually}" if "(reproduced)" in result.usually else "")
