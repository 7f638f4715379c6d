"""Collecting a step: uniform groups dropped on the unshaped score, refills, metrics over all samples."""

import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from tepo_megatron.base.errors import SyncError
from tepo_megatron.base.types import Prompt, Rollout, SamplingParams
from tepo_megatron.config import RolloutConfig
from tepo_megatron.data import PromptStream
from tepo_megatron.monitor.tracer import Clock
from tepo_megatron.rewards.terms import OverlongShaping
from tepo_megatron.rollout.collector import Collector
from tepo_megatron.trainer.driver import StepLog
from tests.scripted_groups import ScriptedGroups


class ScriptedEngine:
    """Samples whose last token says whether they are right: prompt i answers rightly with probability (i % 3) / 2."""

    def __init__(self) -> None:
        self.version = 0
        self.calls: list[tuple[list[int], int]] = []

    def open(self) -> ScriptedGroups:
        return ScriptedGroups(self.generate)

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> list[Rollout]:
        self.calls.append(([p.id for p in prompts], seed))
        return [
            Rollout(
                prompt_id=p.id,
                token_ids_L=torch.tensor([7, 8, int(k < sampling.samples * (p.id % 3) // 2)]),
                response_mask_L=torch.tensor([False, True, True]),
                rollout_logprobs_L=torch.zeros(3),
                policy_version=self.version,
                stop_reason="stop",
            )
            for p in prompts
            for k in range(sampling.samples)
        ]


class LastTokenReward:
    """score: the last token; reward: shaped away from it, so that a filter on the wrong one would show."""

    cpu_seconds = 0.0

    def submit(self, group: Sequence[Rollout]) -> Future[list[Rollout]]:
        graded = Future[list[Rollout]]()
        graded.set_result(
            [replace(r, score=float(r.token_ids_L[-1]), reward=0.1 * i, status="exact") for i, r in enumerate(group)]
        )
        return graded


class LateReward(LastTokenReward):
    """Settles each group in a thread, a random time later, so that they are graded in another order."""

    def __init__(self, seed: int) -> None:
        self._draw, self.submitted = random.Random(seed), list[int]()

    def submit(self, group: Sequence[Rollout]) -> Future[list[Rollout]]:
        self.submitted.append(group[0].prompt_id)
        graded = Future[list[Rollout]]()
        threading.Timer(self._draw.random() / 50, graded.set_result, [super().submit(group).result()]).start()
        return graded


@pytest.mark.parametrize("filtered", [False, True])
def test_the_speed_of_grading_does_not_decide_which_groups_are_kept(filtered: bool) -> None:
    """No group is graded that a step does not need, in whatever order the others are graded."""
    cfg = RolloutConfig(prompts_per_step=6, samples_per_prompt=4, filter_uniform_groups=filtered, oversample=3.0)
    found = []
    for reward in (LastTokenReward(), *map(LateReward, range(4))):
        stream = PromptStream([Prompt(i, (7,), "1") for i in range(60)], 0, shuffle=False)
        collect = Collector(cfg, ScriptedEngine(), reward, stream, seed=1, max_generation_rounds=1, overlong=None)
        rollouts, metrics = collect.collect(1, Clock())
        means = metrics.means()
        found.append(([r.prompt_id for r in rollouts], means, stream.state_dict()))
        if isinstance(reward, LateReward):
            # a group counts only if it arrives before the step has enough
            assert reward.submitted == list(range(17, 17 - int(means["rollout/sampled_groups"]), -1))
    assert found[1:] == found[:1] * 4 and len(found[0][0]) == 24


def collector(refills: int, filtered: bool = True, overlong: OverlongShaping | None = None) -> tuple[Collector, ScriptedEngine]:
    cfg = RolloutConfig(prompts_per_step=6, samples_per_prompt=4, filter_uniform_groups=filtered)
    prompts = [Prompt(i, (7,), "1") for i in range(60)]
    engine = ScriptedEngine()
    stream = PromptStream(prompts, 0, shuffle=False)
    return Collector(
        cfg, engine, LastTokenReward(), stream, seed=1, max_generation_rounds=1 + refills, overlong=overlong
    ), engine


def test_groups_all_right_or_all_wrong_are_dropped() -> None:
    collect, engine = collector(refills=0)
    rollouts, metrics = collect.collect(1, Clock())
    assert sorted({r.prompt_id for r in rollouts}) == [1, 4] and len(rollouts) == 8
    means = metrics.means()
    assert means["accuracy/mean"] == 0.5  # mean over all 24 samples, dropped ones included
    assert means["rollout/kept_groups"] == 2 and means["rollout/sampled_groups"] == 6
    assert means["rollout/response_tokens_mean"] == 2
    assert len(engine.calls) == 1


def test_each_of_several_terms_has_its_mean_in_the_steps_record() -> None:
    class TwoTerms(LastTokenReward):
        def submit(self, group: Sequence[Rollout]) -> Future[list[Rollout]]:
            graded = Future[list[Rollout]]()
            rollouts = super().submit(group).result()
            graded.set_result([replace(r, terms=((1.0, r.score), (0.5, 3.0))) for r in rollouts])
            return graded

    for reward, terms in ((TwoTerms(), {"reward/terms/0": 0.5, "reward/terms/1": 3.0}), (LastTokenReward(), {})):
        collect, _ = collector(refills=0)
        collect.reward = reward  # type: ignore[assignment]
        log = StepLog()
        log.receive(0, collect.collect(1, Clock())[1])
        assert {key: value for key, value in log.record(Clock()).items() if key.startswith("reward/terms/")} == terms


def test_refills_replace_dropped_groups_up_to_the_limit() -> None:
    collect, engine = collector(refills=3)
    rollouts, metrics = collect.collect(1, Clock())
    ids = [r.prompt_id for r in rollouts]
    asked = [len(prompts) for prompts, _ in engine.calls]
    assert len(engine.calls) == 4 and asked[0] == 6 and all(n < 6 for n in asked[1:])
    assert len(set(ids)) == len(ids) // 4 <= 6
    assert len({seed for _, seed in engine.calls}) == 4
    assert metrics.means()["rollout/sampled_groups"] == sum(asked)


def test_shaping_changes_rewards_and_neither_scores_nor_the_choice_of_groups() -> None:
    overlong = OverlongShaping(max_tokens=3, buffer_tokens=2, penalty=1.0)
    plain, _ = collector(refills=0)
    shaped, _ = collector(refills=0, overlong=overlong)
    (before, metrics_before), (after, metrics_after) = plain.collect(1, Clock()), shaped.collect(1, Clock())
    assert [r.prompt_id for r in before] == [r.prompt_id for r in after]
    assert [r.score for r in before] == [r.score for r in after]
    # every response has 2 tokens, one of them in the buffer
    assert [r.reward for r in after] == pytest.approx([r.reward - 0.5 for r in before])
    assert metrics_after.means()["reward/mean"] == pytest.approx(metrics_before.means()["reward/mean"] - 0.5)
    assert metrics_after.means()["accuracy/mean"] == metrics_before.means()["accuracy/mean"]


def test_each_step_samples_with_its_own_seed() -> None:
    collect, engine = collector(refills=0)
    for step in (1, 2):
        engine.version = step - 1
        collect.collect(step, Clock())
    assert engine.calls[0][1] != engine.calls[1][1]


def test_rollouts_of_other_weights_are_refused() -> None:
    collect, _ = collector(refills=0)
    with pytest.raises(SyncError, match=r"step 2: rollouts of version \[0\], but only \[1\] may"):
        collect.collect(2, Clock())


def test_sampling_ends_with_the_groups_that_are_wanted_and_the_other_prompts_come_next() -> None:
    cfg = RolloutConfig(prompts_per_step=4, samples_per_prompt=2, oversample=2.0, filter_uniform_groups=False)
    stream, engine = PromptStream([Prompt(i, (1,), "") for i in range(20)], seed=0, shuffle=False), ScriptedEngine()
    collect = Collector(cfg, engine, LastTokenReward(), stream, seed=1, max_generation_rounds=1, overlong=None)
    rollouts, metrics = collect.collect(1, Clock())
    assert engine.calls[0][0] == list(range(8))
    assert [r.prompt_id for r in rollouts[::2]] == [4, 5, 6, 7]  # the engine's last come first
    assert metrics.means()["rollout/sampled_groups"] == metrics.means()["rollout/kept_groups"] == 4
    resumed = PromptStream([Prompt(i, (1,), "") for i in range(20)], seed=0, shuffle=False)
    resumed.load_state_dict(stream.state_dict())
    for again in (stream, resumed):
        assert [p.id for p in again.take(6)] == [0, 1, 2, 3, 8, 9]


class Slow(ScriptedGroups):
    """A stream in which only the groups in `there` have arrived; the rest is still under way."""

    def add(self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> None:
        made = ScriptedGroups(self._generate)
        made.add(prompts, sampling, seed)
        self.there = [*made.there, *self.there]  # the oldest arrive first


def over_slow_groups() -> tuple[Collector, PromptStream, ScriptedEngine]:
    cfg = RolloutConfig(
        prompts_per_step=4,
        samples_per_prompt=2,
        oversample=1.5,
        filter_uniform_groups=False,
        max_staleness=1,
        on_weight_update="continue",
    )
    prompts, engine = PromptStream([Prompt(i, (1,), "") for i in range(40)], seed=0, shuffle=False), ScriptedEngine()
    engine.open = lambda: Slow(engine.generate)  # type: ignore[method-assign]
    return Collector(cfg, engine, LastTokenReward(), prompts, seed=1, max_generation_rounds=1, overlong=None), prompts, engine


def test_a_group_that_became_too_old_is_counted_and_sampled_again() -> None:
    collect, _, engine = over_slow_groups()
    collect.collect(1, Clock())
    engine.version = 2
    third, metrics = collect.collect(3, Clock())  # groups 0 and 1 are of version 0, and 1 is the oldest that may be
    assert engine.calls[2:] == [([1], engine.calls[2][1]), ([0], engine.calls[3][1])]
    assert metrics.means()["rollout/stale_groups"] == 2
    assert len(third) == 8 and {r.policy_version for r in third} == {2}
    assert not {r.prompt_id for r in third} - set(range(10))
