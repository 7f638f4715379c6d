"""Collect the graded groups of one step: sample, grade, drop uninformative groups, and refill."""

import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from tepo_megatron.base.errors import SyncError
from tepo_megatron.base.loop import first_done
from tepo_megatron.base.seeding import derive_seed
from tepo_megatron.base.types import STATUSES, Prompt, Rollout, Routing, SamplingParams, split_samples
from tepo_megatron.config import RolloutConfig
from tepo_megatron.data import PromptStream
from tepo_megatron.engines.engine import INITIAL_VERSION, GroupStream, Sampler
from tepo_megatron.monitor.metrics import Metrics
from tepo_megatron.monitor.tracer import Clock, tracer
from tepo_megatron.rewards.terms import OverlongShaping, WeightedReward
from tepo_megatron.rollout.containment import LossCounter
from tepo_megatron.rollout.decisions import StepDecisions
from tepo_megatron.rollout.streaming import MinibatchStream, OrderedGroups

TAIL_FROM = 0.9  # share of the groups after whose arrival the others count as late


@dataclass
class Progress:
    """Progress of the collection of a batch. Another thread may read it."""

    useful: int = 0
    wanted: int = 0


class Collector:
    """The rollout phase on rank 0.

    `overlong`: shapes the rewards of graded samples. None: no shaping. It is separate from `reward` because `reward` also
    grades evaluations, which may have another length limit.
    """

    def __init__(
        self,
        cfg: RolloutConfig,
        sampler: Sampler,
        reward: WeightedReward,
        prompts: PromptStream,
        seed: int,
        stop_token_ids: tuple[int, ...] = (),
        *,
        max_generation_rounds: int,
        overlong: OverlongShaping | None,
        routing: Routing | None = None,
    ) -> None:
        self.cfg, self.sampler, self.reward, self.prompts, self.seed = cfg, sampler, reward, prompts, seed
        self.max_generation_rounds, self.overlong = max_generation_rounds, overlong
        self.sampling = SamplingParams(
            cfg.samples_per_prompt,
            cfg.temperature,
            cfg.max_response_tokens,
            stop_token_ids,
            routing,
            cfg.top_k,
            cfg.top_p,
        )
        self.progress = Progress()
        self._arrived: list[float] = []  # times of the groups of the newest step, seconds
        self._groups: GroupStream | None = None
        self._in_progress: dict[int, Prompt] = {}  # prompt id -> prompt, in the order in which they were taken
        self.decisions = StepDecisions()  # of the newest step
        self._losses = LossCounter(cfg.max_failed_share)  # of the newest step

    def collect(self, step: int, clock: Clock, stream: MinibatchStream | None = None) -> tuple[list[Rollout], Metrics]:
        """Return graded rollouts of at most `prompts_per_step` groups, contiguous by prompt, and metrics of all samples.

        With `filter_uniform_groups`, groups whose samples are all right or all wrong (unshaped score) are dropped, and further
        rounds replace them, up to `max_generation_rounds` in all. The result is empty if every group was dropped. With
        `on_weight_update: continue`, groups that are still being sampled go on for the next step.

        Args:
            clock: The time is measured as phases "rollout" and "grading_wait", which is what grading takes after the last
                sample. "grading_cpu" are the processor seconds of the grading workers.
            stream: Receives the groups as soon as they are graded, and then sets their order. None: the order of their prompts.
        """
        kept: list[list[Rollout]] = []
        sampled = stale = 0
        self._losses, self._arrived = LossCounter(self.cfg.max_failed_share), []
        metrics, cpu_before, self.decisions = Metrics(), self.reward.cpu_seconds, StepDecisions()
        for number in range(self.max_generation_rounds):
            missing = self.cfg.prompts_per_step - len(kept)
            self.progress.useful, self.progress.wanted = len(kept), self.cfg.prompts_per_step
            if missing == 0:
                break
            self._request(missing, {group[0].prompt_id for group in kept}, derive_seed(self.seed, "rollout", step, number))
            groups, old = self._graded(step, missing, clock, stream)
            for rollout in (sample[-1] for group in groups for sample in split_samples(group)):
                metrics.add("reward/mean", rollout.reward)
                for number, (_, value) in enumerate(rollout.terms if len(rollout.terms) > 1 else ()):
                    metrics.add(f"reward/terms/{number}", value)
                metrics.add("rollout/staleness", 0 if self.cfg.only else step - 1 - rollout.policy_version)
                metrics.add("rollout/mixed_versions", bool(rollout.later_versions))
                metrics.add("accuracy/mean", rollout.score)
                metrics.add("rollout/response_tokens_mean", rollout.response_length)
                metrics.add("rollout/truncated", rollout.stop_reason == "length")
                for status in STATUSES:
                    metrics.add(f"grading/{status}", rollout.status == status)
            sampled, stale = sampled + len(groups), stale + old
            kept += self._useful(groups)
        clock.seconds["grading_cpu"] = self.reward.cpu_seconds - cpu_before
        metrics.add("rollout/sampled_groups", sampled)
        metrics.add("rollout/kept_groups", len(kept))
        metrics.add("rollout/stale_groups", stale)
        clock.seconds["rollout_tail"] = _tail(self._arrived)
        self._losses.end_step(step, metrics)
        self.decisions.keep({group[0].prompt_id for group in kept})
        if stream is not None:
            return stream.rollouts, metrics
        return [rollout for group in kept for rollout in group], metrics

    def position(self) -> dict[str, Any]:
        """Return the position in the prompt stream as plain JSON. Prompts still being sampled count as not yet taken."""
        return self.prompts.state_dict(returned=list(self._in_progress.values()))

    def cancel(self) -> None:
        """Cancel what is being sampled, and return its prompts to the front of the stream."""
        if self._groups is not None:
            self._groups.close()
        self.prompts.give_back(list(self._in_progress.values()))
        self._groups, self._in_progress = None, {}

    def _request(self, missing: int, kept: set[int], seed: int) -> None:
        """Start enough groups that `missing` times `oversample` (rounded up) are being sampled."""
        asked = math.ceil(missing * self.cfg.oversample) - len(self._in_progress)
        if self._groups is None:
            self._groups = self.sampler.open()
        if asked > 0:
            self._begin(self.prompts.take(asked, excluding=kept | self._in_progress.keys()), seed)

    def _begin(self, prompts: list[Prompt], seed: int) -> None:
        assert self._groups is not None
        self.decisions.asked.append([prompt.id for prompt in prompts])
        self._in_progress |= {prompt.id: prompt for prompt in prompts}
        self._groups.add(prompts, self.sampling, seed)

    def _graded(self, step: int, wanted: int, clock: Clock, stream: MinibatchStream | None) -> tuple[list[list[Rollout]], int]:
        """Return graded groups in the order of their prompts, and the number of groups sampled again because they were too old.

        Groups are graded while others are still being sampled. Returns early once `wanted` useful groups are there. A group is
        submitted only if those before it are too few, even if all of them are useful. So the order in which the samples arrive
        decides which groups are returned, and the speed of grading does not.
        """
        assert self._groups is not None
        order = {prompt: place for place, prompt in enumerate(self._in_progress)}
        graded: list[list[Rollout]] = []
        grading: set[Future[list[Rollout]]] = set()
        ordered = None if stream is None else OrderedGroups(stream, lambda graded: self._useful([self._shaped(graded)]))
        useful = stale = 0
        while useful < wanted:
            group = None
            if useful + len(grading) < wanted:
                with clock.phase("rollout"):
                    group = self._groups.next()
                if group is None and not grading:
                    break
            if group is not None:
                self._arrived.append(time.monotonic())
                prompt = self._in_progress.pop(group[0].prompt_id)
                arrived, group = group, self._losses.take(group)
                too_old = self._too_old(step, group)
                self.decisions.arrive(group or arrived, too_old, lost=not group)
                if too_old:
                    self._begin([prompt], derive_seed(self.seed, "resample", step))
                    stale += 1
                    continue
                if not group:
                    continue
                grading.add(future := self.reward.submit(group))
                if tracer.active:
                    future.add_done_callback(partial(_graded_span, prompt.id, len(group), tracer.clock()))
                if ordered is not None:
                    ordered.submit(order[prompt.id], future)
            with clock.phase("grading_wait"):
                done, grading = first_done(grading, at_once=group is not None)
            for finished in done:
                group = self._shaped(finished)
                graded.append(group)
                added = len(self._useful([group]))
                useful += added
                self.progress.useful += added
            if ordered is not None:
                ordered.add_graded()
        self.decisions.left = list(self._in_progress)
        if self.cfg.on_weight_update != "continue":
            self.cancel()
        return sorted(graded, key=lambda group: order[group[0].prompt_id]), stale

    def _shaped(self, graded: Future[list[Rollout]]) -> list[Rollout]:
        return graded.result(0) if self.overlong is None else self.overlong.shape(graded.result(0))

    def _useful(self, groups: list[list[Rollout]]) -> list[list[Rollout]]:
        return informative(groups) if self.cfg.filter_uniform_groups else groups

    def _too_old(self, step: int, group: list[Rollout]) -> bool:
        """Return whether a group that was begun for an earlier step is too old to train on.

        Raises SyncError for any other version that is not allowed. Step 1 trains on version 0, and on nothing older, whatever
        the staleness.
        """
        newest = step - 1
        oldest = max(0, newest - self.cfg.max_staleness)
        allowed = {INITIAL_VERSION} if self.cfg.only else set(range(oldest, newest + 1))
        wrong = sorted({version for r in group for version in (r.policy_version, *(v for _, v in r.later_versions))} - allowed)
        if wrong and self.cfg.on_weight_update == "continue" and max(wrong) < oldest:
            return True
        if wrong:
            raise SyncError(f"step {step}: rollouts of version {wrong}, but only {sorted(allowed)} may be learned from")
        return False


def _tail(arrived: Sequence[float]) -> float:
    return arrived[-1] - arrived[math.ceil(TAIL_FROM * len(arrived)) - 1] if arrived else 0.0


def _graded_span(prompt: int, samples: int, start: int, _: object) -> None:
    unit = tracer.unit()
    tracer.add("grade", "grading", start, tracer.clock(), unit=unit, flows=[prompt], prompt=prompt, samples=samples)


def informative(groups: Sequence[list[Rollout]]) -> list[list[Rollout]]:
    """Return the groups whose unshaped scores differ. If all are right or all wrong, no response is better than another.

    This is the paper's filter (Section 4.1) and that of DAPO's dynamic sampling (arXiv 2503.14476).
    """
    return [group for group in groups if len({rollout.score for rollout in group}) > 1]
