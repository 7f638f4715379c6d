"""The evaluations of a run: measure at a step, choose the best step, stop early, and summarize."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tepo_megatron.config import EvaluationConfig
from tepo_megatron.evaluation.records import write_evaluation
from tepo_megatron.evaluation.run_benchmarks import BenchmarkRuns, summary_line
from tepo_megatron.evaluation.runner import Accuracy, evaluate
from tepo_megatron.inference.engine import Sampler
from tepo_megatron.rewards import WeightedReward
from tepo_megatron.types import Prompt, SamplingParams
from tepo_megatron.utils.seeding import derive_seed


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
        self._benchmarked: list[int] = []  # steps whose benchmarks this process has evaluated

    def measure(
        self, step: int, engine: Sampler, reward: WeightedReward, sampling: SamplingParams, *, max_failed_share: float
    ) -> Iterator[str]:
        """Evaluate the weights of `step`, unless that was done, and yield the results as log lines.

        Raises:
            RolloutError: The engine fails, or too many samples were lost.
            RewardError: The grader fails.
        """
        cfg = self._cfg
        if self._held_out and step not in self._by_step:
            asked = replace(sampling, samples=cfg.samples, temperature=cfg.temperature, routing=None)
            # one seed for all evaluations, so that before and after are compared on the same random numbers
            seed = derive_seed(self._seed, "evaluation")
            found = evaluate(engine, reward, self._held_out, asked, seed, max_failed_share=max_failed_share)
            self._by_step[step] = found
            yield f"accuracy at step {step}: {found}, temperature {cfg.temperature:g}"
        if self._benchmarks is not None and step not in self._benchmarked:
            results = self._benchmarks.evaluate(step, engine, reward, max_failed_share)
            self._benchmarked.append(step)
            yield f"benchmarks at step {step}, avg@k: {summary_line(results)}"

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
