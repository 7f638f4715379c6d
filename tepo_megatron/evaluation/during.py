"""Benchmarks during a run, by its own servers: `evaluation/step-00000010/` in its folder, as `tepo evaluate` writes them."""

from __future__ import annotations

import logging
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tepo_megatron.errors import DataError
from tepo_megatron.evaluation.comparing import compare_folders
from tepo_megatron.evaluation.folder import RECORD_FILE, EvaluationFolder, read_record
from tepo_megatron.evaluation.problems import Problems
from tepo_megatron.evaluation.results import Result, over_benchmarks
from tepo_megatron.evaluation.samples import sample_benchmark
from tepo_megatron.rewards import Reward
from tepo_megatron.rollout.engine import RolloutEngine

FOLDER = "evaluation"  # of a run
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Benchmarks:
    """suite: what is evaluated; run_dir: of the run; model: that it began with; seed: one for all steps, so that these are
    compared on the same random numbers, of which the run takes none; decode, stop_token_ids: as in training.

    Which steps were evaluated is known from the disk alone: what a killed run has there is kept, what a resumed one is to
    evaluate again is removed (`forget`).
    """

    suite: Sequence[Problems]
    run_dir: Path
    model: str
    seed: int
    decode: Callable[[Sequence[int]], str]
    stop_token_ids: tuple[int, ...]

    def evaluate(self, step: int, engine: RolloutEngine, reward: Reward) -> Mapping[str, Result]:
        """The results of the weights of `step`, which the engine serves. Raises RolloutError, RewardError."""
        folder = EvaluationFolder(self.folder(step), {"checkpoint": self.model, "step": step, "seed": self.seed})
        for problems in folder.keep(self.suite):
            folder.add(problems, sample_benchmark(problems, engine, reward, self.decode, self.stop_token_ids, self.seed))
        return folder.results

    def accuracies(self, step: int) -> dict[str, float] | None:
        """avg@k of each benchmark at a step, from the disk; None where it was not evaluated."""
        if not (self.folder(step) / RECORD_FILE).exists():
            return None
        try:
            record = read_record(self.folder(step))["benchmarks"]
            return {name: float(each["result"]["accuracy"]["mean"]) for name, each in record.items()}
        except (DataError, KeyError, TypeError, ValueError, AttributeError) as e:
            _LOGGER.warning("%s: the benchmarks of step %d cannot be read and do not count (%s)", self.folder(step), step, e)
            return None

    def means(self) -> dict[int, float]:
        """Step -> mean avg@k over the benchmarks, of each step at which all of them were evaluated, from the disk."""
        found = {}
        names = {problems.name for problems in self.suite}
        for step in self._steps():
            accuracies = self.accuracies(step)
            if accuracies and accuracies.keys() == names:
                found[step] = statistics.fmean(accuracies.values())
        return found

    def compare(self, before: int, after: int) -> Path:
        """Print and keep what changed between two steps, paired by problem; returns the file."""
        grid = compare_folders(self.folder(after), self.folder(before))
        grid.print()
        path = self.run_dir / FOLDER / f"step-{after:08d}-against-{before:08d}.md"
        path.write_text(grid.markdown())
        return path

    def folder(self, step: int) -> Path:
        """Of the evaluation of a step."""
        return self.run_dir / FOLDER / f"step-{step:08d}"

    def forget(self, after: int) -> None:
        """Remove the evaluations of steps after that one: the run went back there, and takes them again."""
        for step in self._steps():
            if step > after:
                shutil.rmtree(self.folder(step))

    def _steps(self) -> list[int]:
        """Those that have a folder."""
        names = [path.name.removeprefix("step-") for path in (self.run_dir / FOLDER).glob("step-*") if path.is_dir()]
        return sorted(int(name) for name in names if name.isdigit())


def in_words(results: Mapping[str, Result]) -> str:
    """avg@k of each, in percent, and their mean."""
    each = ", ".join(f"{name} {100 * r.accuracy.mean:.2f}" for name, r in results.items())
    return f"{each}; mean {100 * over_benchmarks(results):.2f} %"
