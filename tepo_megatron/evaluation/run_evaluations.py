"""The evaluations of a run: measure at a step, choose the best step, stop early, and summarize.

Benchmarks are stored in `evaluation/step-00000010/` of the run's folder, as `tepo evaluate` does.
"""

import logging
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tepo_megatron.base.errors import DataError
from tepo_megatron.base.records import EVALUATION
from tepo_megatron.base.seeding import derive_seed
from tepo_megatron.base.types import Prompt, SamplingParams
from tepo_megatron.config import EvaluationConfig
from tepo_megatron.engines.engine import Sampler
from tepo_megatron.evaluation.benchmarks import Problems
from tepo_megatron.evaluation.folder import RECORD_FILE, EvaluationFolder, compare_folders, read_record
from tepo_megatron.evaluation.held_out import Accuracy, evaluate, write_evaluation
from tepo_megatron.evaluation.results import Result, over_benchmarks
from tepo_megatron.evaluation.samples import sample_benchmark
from tepo_megatron.evaluation.statistics import ScoreEstimate
from tepo_megatron.rewards.terms import WeightedReward

FOLDER = "evaluation"  # in the run's folder
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class BenchmarkRuns:
    """Evaluates the benchmarks at steps of a run and stores the results in the run's folder.

    The disk alone records which steps were evaluated: results of a killed run are kept, and those that a resumed run must
    repeat are removed (`forget`).
    """

    suite: Sequence[Problems]
    run_dir: Path
    model: str  # model that the run began with
    # One seed for all steps, so that steps are compared on the same random numbers. The run's own random numbers are not
    # affected.
    seed: int
    decode: Callable[[Sequence[int]], str]  # turns token ids into text, as in training
    stop_token_ids: tuple[int, ...]  # tokens that end a response, as in training

    def evaluate(self, step: int, engine: Sampler, reward: WeightedReward, max_failed_share: float) -> Mapping[str, Result]:
        """Evaluate the weights of `step`, which the engine must be serving, and return the result by benchmark.

        Benchmarks that the step's folder already holds are not repeated. Raises as `sample_and_grade`.
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
        return {
            step: statistics.fmean(accuracies.values())
            for step, accuracies in by_step.items()
            if accuracies and accuracies.keys() == names
        }

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
        names = [path.name.removeprefix("step-") for path in (self.run_dir / FOLDER).glob("step-*") if path.is_dir()]
        return sorted(int(name) for name in names if name.isdigit())


def summary_line(results: Mapping[str, Result]) -> str:
    """Return avg@k of each benchmark, in percent, and their mean."""
    each = ", ".join(f"{name} {100 * r.accuracy.mean:.2f}" for name, r in results.items())
    return f"{each}; mean {100 * over_benchmarks(results):.2f} %"


class Evaluations:
    """Accuracies of a run by step, on held-out problems and on benchmarks. Either may be missing."""

    def __init__(
        self,
        cfg: EvaluationConfig,
        held_out: Sequence[Prompt],
        benchmarks: BenchmarkRuns | None,
        *,
        seed: int,
        run_dir: Path,
        keep_best: bool,
    ) -> None:
        """Begin without results; a resumed run restores them with `load_state_dict`."""
        self._cfg, self._held_out, self._benchmarks = cfg, held_out, benchmarks
        self._seed, self._run_dir, self._keep_best = seed, run_dir, keep_best
        self._by_step: dict[int, Accuracy] = {}  # on held-out problems; the summary has the first and the last
        self._benchmarked: dict[int, Mapping[str, Result]] = {}  # by step, as far as this process has evaluated them

    def measure(
        self, step: int, engine: Sampler, reward: WeightedReward, sampling: SamplingParams, *, max_failed_share: float
    ) -> Iterator[str]:
        """Evaluate the weights of `step`, unless that was done, and yield the results as log lines. Raises as `evaluate`."""
        cfg = self._cfg
        if self._held_out and step not in self._by_step:
            asked = replace(sampling, samples=cfg.samples, temperature=cfg.temperature, routing=None)
            # one seed for all evaluations, so that before and after are compared on the same random numbers
            seed = derive_seed(self._seed, "evaluation")
            accuracy = evaluate(engine, reward, self._held_out, asked, seed, max_failed_share=max_failed_share)
            self._by_step[step] = accuracy
            yield f"accuracy at step {step}: {accuracy}, temperature {cfg.temperature:g}"
        if self._benchmarks is not None and step not in self._benchmarked:
            results = self._benchmarks.evaluate(step, engine, reward, max_failed_share)
            self._benchmarked[step] = results
            yield f"benchmarks at step {step}, avg@k: {summary_line(results)}"

    def record(self, step: int) -> dict[str, float | None]:
        """Return the accuracies of `step` and their standard errors by key of metrics.jsonl; empty if nothing was evaluated."""
        by_name: dict[str, Accuracy | ScoreEstimate] = {n: r.accuracy for n, r in self._benchmarked.get(step, {}).items()}
        if step in self._by_step:
            by_name = {"held_out": self._by_step[step], **by_name}
        record: dict[str, float | None] = {}
        for name, accuracy in by_name.items():
            record[f"{EVALUATION}{name}/accuracy"] = accuracy.mean
            record[f"{EVALUATION}{name}/standard_error"] = accuracy.standard_error
        return record

    @property
    def best_step(self) -> int | None:
        """Step whose checkpoint must be kept; None without `checkpoint.keep_best`. Step 0 has no checkpoint and is left out."""
        if not self._keep_best:
            return None
        return _best({step: accuracy for step, accuracy in self._means.items() if step > 0})

    @property
    def out_of_patience(self) -> bool:
        """True if at least `evaluation.patience` evaluations came after the best one."""
        patience, best = self._cfg.patience, _best(self._means)
        return patience is not None and best is not None and sum(step > best for step in self._means) >= patience

    @property
    def _means(self) -> dict[int, float]:
        """Mean accuracy by step: of the benchmarks if there are any, otherwise on the held-out problems."""
        if self._benchmarks is not None:
            return self._benchmarks.means()
        return {step: accuracy.mean for step, accuracy in self._by_step.items()}

    def state_dict(self, until: int) -> dict[str, Any]:
        """Return the results on held-out problems as plain JSON. Benchmark results are on the disk."""
        results = list(self._by_step.items())  # another thread may add one
        return {str(step): accuracy.state() for step, accuracy in results if step <= until}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._by_step = {int(step): Accuracy.of(accuracy) for step, accuracy in state.items()}

    def forget(self, after: int) -> None:
        """Discard the benchmarks of steps after `after`: the run went back there and will repeat them."""
        if self._benchmarks is not None:
            self._benchmarks.forget(after)

    def finish(self, step: int) -> tuple[dict[str, Any], list[str]]:
        """Write the held-out scores of step 0 and of `step`, the last step of the run, and compare both steps' benchmarks.

        What was not measured at both steps is not written. Returns (entries for the summary, lines for the log).
        """
        before, after = self._by_step.get(0), self._by_step.get(step)
        lines = []
        if before and after and before.scores.keys() != after.scores.keys():
            lines.append("resume: the first evaluation was of other problems, so there is no accuracy from before")
            before = None
        if before and after:
            write_evaluation(self._run_dir, before, after)
            lines.append(f"accuracy before: {before}\naccuracy after:  {after}")
        summary: dict[str, Any] = {
            "accuracy_before": before and before.mean,
            "accuracy_after": after and after.mean,
            "standard_error": {"before": before and before.standard_error, "after": after and after.standard_error},
        }
        if self._benchmarks is not None:
            of_benchmarks = {"before": self._benchmarks.accuracies(0), "after": self._benchmarks.accuracies(step)}
            summary["benchmarks"] = of_benchmarks
            if all(of_benchmarks.values()):
                lines.append(f"benchmarks, after against before: {self._benchmarks.compare(0, step)}")
        return summary, lines


def _best(accuracies: Mapping[int, float]) -> int | None:
    """Return the step with the highest accuracy; the first on a tie, None for no steps."""
    return max(accuracies, key=lambda step: (accuracies[step], -step), default=None)
