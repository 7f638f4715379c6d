"""The evaluations of a run: what is measured at a step, which step is the best, and what the summary says of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tepo_megatron.config import Config
from tepo_megatron.evaluation.during import Benchmarks, in_words
from tepo_megatron.evaluation.records import write_evaluation
from tepo_megatron.evaluation.runner import Accuracy, evaluate
from tepo_megatron.rewards import Reward
from tepo_megatron.rollout.engine import RolloutEngine
from tepo_megatron.seeding import derive_seed
from tepo_megatron.types import Prompt, SamplingParams


class Evaluations:
    """Accuracies by step, on held-out problems and on benchmarks. Either may be missing."""

    def __init__(self, cfg: Config, held_out: Sequence[Prompt], benchmarks: Benchmarks | None) -> None:
        self._cfg, self._held_out, self._benchmarks = cfg, held_out, benchmarks
        self._by_step: dict[int, Accuracy] = {}  # on held-out problems; the first and the last are reported
        self._benchmarked: list[int] = []  # steps

    def measure(self, step: int, engine: RolloutEngine, reward: Reward, sampling: SamplingParams) -> Iterator[str]:
        """Evaluate the weights of `step`, which the engine serves, where that was not done: what came out, in words.

        sampling: as in training. Raises RolloutError, RewardError.
        """
        cfg = self._cfg.evaluation
        if self._held_out and step not in self._by_step:
            asked = replace(sampling, samples=cfg.samples, temperature=cfg.temperature, routing=None)
            # one seed for all evaluations: before and after are compared on the same random numbers
            found = evaluate(engine, reward, self._held_out, asked, derive_seed(self._cfg.seed, "evaluation"))
            self._by_step[step] = found
            yield f"accuracy at step {step}: {found}, temperature {cfg.temperature:g}"
        if self._benchmarks is not None and step not in self._benchmarked:
            results = self._benchmarks.evaluate(step, engine, reward)
            self._benchmarked.append(step)
            yield f"benchmarks at step {step}, avg@k: {in_words(results)}"

    @property
    def best_step(self) -> int | None:
        """The one whose checkpoint is to stay, which the model that the run began with has not; None without `keep_best`."""
        if not self._cfg.checkpoint.keep_best:
            return None
        return _best({step: accuracy for step, accuracy in self._means.items() if step > 0})

    @property
    def out_of_patience(self) -> bool:
        """Whether `evaluation.patience` evaluations came after the best one."""
        patience, best = self._cfg.evaluation.patience, _best(self._means)
        return patience is not None and best is not None and sum(step > best for step in self._means) >= patience

    @property
    def _means(self) -> dict[int, float]:
        """By step: of the benchmarks, else on the held-out problems."""
        if self._benchmarks is not None:
            return self._benchmarks.means()
        return {step: accuracy.mean for step, accuracy in self._by_step.items()}

    def state_dict(self) -> dict[str, Any]:
        """Of those on held-out problems, plain JSON; benchmarks are kept on the disk."""
        return {str(step): accuracy.state() for step, accuracy in self._by_step.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` returned."""
        self._by_step = {int(step): Accuracy.of(accuracy) for step, accuracy in state.items()}

    def forget(self, after: int) -> None:
        """The run went back to that step: the benchmarks of later ones are taken again."""
        if self._benchmarks is not None:
            self._benchmarks.forget(after)

    def finish(self, step: int) -> tuple[dict[str, Any], list[str]]:
        """Keep the scores before the first and after the last step that was taken, `step`.

        Returns what the summary holds of them, and what is to be said.
        """
        before, after = self._by_step.get(0), self._by_step.get(step)
        told = []
        if before and after and before.scores.keys() != after.scores.keys():
            told.append("resume: the first evaluation was of other problems, so there is no accuracy from before")
            before = None
        if before and after:
            write_evaluation(self._cfg.run_dir, before, after)
            told.append(f"accuracy before: {before}\naccuracy after:  {after}")
        summary: dict[str, Any] = {
            "accuracy_before": before and before.mean,
            "accuracy_after": after and after.mean,
            "standard_error": {"before": before and before.standard_error, "after": after and after.standard_error},
        }
        if self._benchmarks is not None:
            of_benchmarks = {"before": self._benchmarks.accuracies(0), "after": self._benchmarks.accuracies(step)}
            summary["benchmarks"] = of_benchmarks
            if all(of_benchmarks.values()):
                told.append(f"benchmarks, after against before: {self._benchmarks.compare(0, step)}")
        return summary, told


def _best(accuracies: Mapping[int, float]) -> int | None:
    """The first step with the highest."""
    return max(accuracies, key=lambda step: (accuracies[step], -step), default=None)
