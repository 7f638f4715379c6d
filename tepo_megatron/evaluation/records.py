"""`evaluation.jsonl`: what each held-out problem scored before and after a run, for comparisons between runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tepo_megatron.errors import DataError
from tepo_megatron.evaluation.runner import Accuracy

EVALUATION_FILE = "evaluation.jsonl"


@dataclass(frozen=True)
class Scores:
    """Problem id (its line in the dataset, from 0) -> mean unshaped score of its samples, of the first and last evaluation."""

    before: dict[int, float]
    after: dict[int, float]


def write_evaluation(run_dir: Path, before: Accuracy, after: Accuracy) -> Path:
    """One line per problem, in the order of the dataset: {"problem", "before", "after"}; returns the file's path."""
    rows = [{"problem": problem, "before": before.scores[problem], "after": score} for problem, score in after.scores.items()]
    path = run_dir / EVALUATION_FILE
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_evaluation(run_dir: Path) -> Scores:
    """What `write_evaluation` wrote. Raises DataError naming the file, and the line that is malformed."""
    path = run_dir / EVALUATION_FILE
    try:
        lines = path.read_text().splitlines()
    except OSError as e:
        raise DataError(f"{path}: cannot read the evaluations ({e.strerror}); repeat the run, with data.eval") from None
    scores = Scores({}, {})
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            problem = row["problem"]
            scores.before[problem], scores.after[problem] = float(row["before"]), float(row["after"])
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as e:
            raise DataError(f"{path}:{number}: not the scores of a problem ({e!r}); repeat the run") from None
    return scores
