"""Benchmarks during a run, on its own servers. They are stored in `evaluation/step-00000010/`, as `tepo evaluate` does."""

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
from tepo_megatron.inference.engine import Sampler
from tepo_megatron.rewards import WeightedReward

FOLDER = "evaluation"  # in the run's folder
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class BenchmarkRuns:
    """Evaluates the benchmarks at steps of a run and stores the results in the run's folder.

    The disk alone records which steps were evaluated: results of a killed run are kept, and those that a resumed run must
    repeat are removed (`forget`).

    Attributes:
        model: Model that the run began with.
        seed: One seed for all steps, so that steps are compared on the same random numbers. The run's own random numbers are
            not affected.
        decode: Turns token ids into text, as in training.
        stop_token_ids: Tokens that end a response, as in training.
    """

    suite: Sequence[Problems]
    run_dir: Path
    model: str
    seed: int
    decode: Callable[[Sequence[int]], str]
    stop_token_ids: tuple[int, ...]

    def evaluate(self, step: int, engine: Sampler, reward: WeightedReward, max_failed_share: float) -> Mapping[str, Result]:
        """Evaluate the weights of `step`, which the engine must be serving, and return the result by benchmark.

        Benchmarks that the step's folder already holds are not repeated.

        Raises:
            RolloutError: The engine fails, or too many samples were lost.
            RewardError: The grader fails.
        """
        folder = EvaluationFolder(self.folder(step), {"checkpoint": self.model, "step": step, "seed": self.seed})
        for problems in folder.take_over(self.suite):
            samples = sample_benchmark(
                problems,
                engine,
                reward,
                self.decode,
                self.stop_token_ids,
                self.seed,
                max_failed_share=max_failed_share,
            )
            folder.add(problems, samples)
        return folder.results

    def accuracies(self, step: int) -> dict[str, float] | None:
        """Return avg@k of each benchmark at a step, from the disk; None if it was not evaluated or its record is damaged."""
        if not (self.folder(step) / RECORD_FILE).exists():
            return None
        try:
            record = read_record(self.folder(step))["benchmarks"]
            return {name: float(each["result"]["accuracy"]["mean"]) for name, each in record.items()}
        except (DataError, KeyError, TypeError, ValueError, AttributeError) as e:
            _LOGGER.warning("%s: the benchmarks of step %d cannot be read and do not count (%s)", self.folder(step), step, e)
            return None

    def means(self) -> dict[int, float]:
        """Return step -> mean avg@k over the benchmarks, from the disk, for each step at which all of them were evaluated."""
        names = {problems.name for problems in self.suite}
        by_step = {step: self.accuracies(step) for step in self._steps()}
        return {step: statistics.fmean(found.values()) for step, found in by_step.items() if found and found.keys() == names}

    def compare(self, before: int, after: int) -> Path:
        """Print and write what changed between two steps, paired by problem; return the file."""
        grid = compare_folders(self.folder(after), self.folder(before))
        grid.print()
        path = self.run_dir / FOLDER / f"step-{after:08d}-against-{before:08d}.md"
        path.write_text(grid.markdown())
        return path

    def folder(self, step: int) -> Path:
        """Return the folder of a step's evaluation."""
        return self.run_dir / FOLDER / f"step-{step:08d}"

    def forget(self, after: int) -> None:
        """Remove the evaluations of steps after `after`: the run went back there and will repeat them."""
        for step in self._steps():
            if step > after:
                shutil.rmtree(self.folder(step))

    def _steps(self) -> list[int]:
        """Return the steps that have a folder, in order."""
        names = [path.name.removeprefix("step-") for path in (self.run_dir / FOLDER).glob("step-*") if path.is_dir()]
        return sorted(int(name) for name in names if name.isdigit())


def summary_line(results: Mapping[str, Result]) -> str:
    """Return avg@k of each benchmark, in percent, and their mean."""
    each = ", ".join(f"{name} {100 * r.accuracy.mean:.2f}" for name, r in results.items())
    return f"{each}; mean {100 * over_benchmarks(results):.2f} %"
