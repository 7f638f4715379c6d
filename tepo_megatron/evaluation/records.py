"""Read and write `evaluation.jsonl`: each held-out problem's score before and after a run, for comparisons between runs."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tepo_megatron.errors import DataError
from tepo_megatron.evaluation.runner import Accuracy
from tepo_megatron.utils import records
from tepo_megatron.utils.atomic import replace_file

EVALUATION_FILE = "evaluation.jsonl"


@dataclass(frozen=True)
class Scores:
    """Mean unshaped score of each problem's samples, by problem id (its line in the dataset, from 0)."""

    before: dict[int, float]
    after: dict[int, float]


def write_evaluation(run_dir: Path, before: Accuracy, after: Accuracy) -> Path:
    """Write one line per problem, in the order of the dataset; return the file's path. The file is replaced atomically.

    A line is {"problem", "before", "after", "of": number of problems}, so that a missing line can be detected.
    """
    rows = [
        {"problem": problem, "before": before.scores[problem], "after": score, "of": len(after.scores)}
        for problem, score in after.scores.items()
    ]
    path = run_dir / EVALUATION_FILE
    replace_file(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
    return path


def read_evaluation(run_dir: Path) -> Scores:
    """Return what `write_evaluation` wrote, as far as lines can be read; warn of the rest.

    Raises DataError that names the file if it cannot be read.
    """
    scores, faults = read_scores(run_dir)
    records.report(run_dir / EVALUATION_FILE, faults)
    return scores


def read_scores(run_dir: Path) -> tuple[Scores, list[str]]:
    """Return the scores as far as lines can be read, and one sentence per fault of the file.

    Raises DataError that names the file if it cannot be read.
    """
    path = run_dir / EVALUATION_FILE
    try:
        rows, faults = records.read_rows(path, _row)
    except OSError as e:
        raise DataError(f"{path}: cannot read the evaluations ({e.strerror}); repeat the run, with data.eval") from None
    scores = Scores({}, {})
    for problem, before, after, _ in rows:
        scores.before[problem], scores.after[problem] = before, after
    if len(rows) > len(scores.after):
        faults.append(f"{len(rows) - len(scores.after)} problems are in the file twice; the later line counts")
    of = max((of for *_, of in rows if of is not None), default=None)
    if of is not None and of > len(scores.after):
        faults.append(f"the scores of {of - len(scores.after)} of {of} problems are missing, so the means are over the others")
    return scores, faults


def _row(row: dict[str, Any]) -> tuple[int, float, float, int | None]:
    """Return (problem, before, after, of). Raises ValueError, TypeError, KeyError or OverflowError for an invalid row."""
    problem, before, after, of = row["problem"], float(row["before"]), float(row["after"]), row.get("of")
    if type(problem) is not int or type(of) not in (int, type(None)):
        raise ValueError("not the scores of a problem")
    if not math.isfinite(before) or not math.isfinite(after):
        raise ValueError("a score is not finite")
    return problem, before, after, of
