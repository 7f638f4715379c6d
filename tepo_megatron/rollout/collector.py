"""One step's worth of graded groups: sample, grade, drop what teaches nothing, refill."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

from tepo_megatron.advantages import informative
from tepo_megatron.config import RolloutConfig
from tepo_megatron.data import PromptStream
from tepo_megatron.errors import SyncError
from tepo_megatron.metrics import Metrics
from tepo_megatron.rewards import Reward
from tepo_megatron.rewards.overlong import OverlongShaping
from tepo_megatron.rollout.engine import INITIAL_VERSION, RolloutEngine
from tepo_megatron.seeding import derive_seed
from tepo_megatron.timing import Clock
from tepo_megatron.types import Prompt, Rollout, SamplingParams


class Collector:
    """Rank 0's side of the rollout phase.

    stop_token_ids: of `SamplingParams`; max_refills: `cfg.max_refills`, resolved; overlong: changes the rewards of the graded
    samples, None for none. Shaping is a step here and no part of `reward`, which grades evaluations too: those may have another
    length limit.
    """

    def __init__(
        self,
        cfg: RolloutConfig,
        engine: RolloutEngine,
        reward: Reward,
        prompts: PromptStream,
        seed: int,
        stop_token_ids: tuple[int, ...] = (),
        *,
        max_refills: int,
        overlong: OverlongShaping | None,
    ) -> None:
        self.cfg, self.engine, self.reward, self.prompts, self.seed = cfg, engine, reward, prompts, seed
        self.max_refills, self.overlong = max_refills, overlong
        self.sampling = SamplingParams(cfg.samples_per_prompt, cfg.temperature, cfg.max_response_tokens, stop_token_ids)

    def collect(self, step: int, clock: Clock) -> tuple[list[Rollout], Metrics]:
        """Graded rollouts of at most `prompts_per_step` groups, contiguous by prompt, and what to report of all samples.

        With `filter_uniform_groups`, groups whose samples are all right or all wrong (unshaped score) are dropped, and up to
        `max_refills` further rounds replace them. The result is empty when every group was dropped.

        Raises RolloutError, RewardError, DataError, and SyncError for rollouts of other weights than those sent last.
        """
        kept: list[list[Rollout]] = []
        sampled = 0
        metrics = Metrics()
        for refill in range(1 + self.max_refills):
            missing = self.cfg.prompts_per_step - len(kept)
            if missing == 0:
                break
            asked = math.ceil(missing * self.cfg.oversample)
            prompts = self.prompts.take(asked, excluding={group[0].prompt_id for group in kept})
            groups = self._graded(step, prompts, derive_seed(self.seed, "rollout", step, refill), missing, clock)
            for rollout in (r for group in groups for r in group):
                metrics.add("reward/mean", rollout.reward)
                metrics.add("rollout/staleness", 0 if self.cfg.only else step - 1 - rollout.policy_version)
                metrics.add("accuracy/mean", rollout.score)
                metrics.add("rollout/response_tokens_mean", rollout.response_length)
                metrics.add("rollout/truncated", rollout.stop_reason == "length")
            sampled += len(groups)
            kept += self._useful(groups)
        metrics.add("rollout/sampled_groups", sampled)
        metrics.add("rollout/kept_groups", len(kept))
        return [rollout for group in kept for rollout in group], metrics

    def _graded(self, step: int, prompts: Sequence[Prompt], seed: int, wanted: int, clock: Clock) -> list[list[Rollout]]:
        """Graded groups in the order of their prompts, each graded while others are still being sampled.

        If there are more prompts than groups `wanted`, it ends with as many useful ones; what is not there then is given up,
        and its prompts are the next to be taken.
        """
        graded: dict[int, list[Rollout]] = {}
        useful = 0
        with contextlib.closing(self.engine.stream(prompts, self.sampling, seed)) as groups:
            while not (useful == wanted < len(prompts)):
                with clock.phase("rollout"):
                    arrived = next(groups, None)
                if arrived is None:
                    break
                place, group = arrived
                self._check_versions(step, {r.policy_version for r in group})
                with clock.phase("reward"):
                    group = self.reward.score(group)
                    graded[place] = group if self.overlong is None else self.overlong.shape(group)
                useful += len(self._useful([graded[place]]))
        self.prompts.give_back([prompt for place, prompt in enumerate(prompts) if place not in graded])
        return [graded[place] for place in sorted(graded)]

    def _useful(self, groups: list[list[Rollout]]) -> list[list[Rollout]]:
        return informative(groups) if self.cfg.filter_uniform_groups else groups

    def _check_versions(self, step: int, versions: set[int]) -> None:
        """Step 1 has the weights of version 0 to learn from, and nothing older whatever the staleness."""
        newest = step - 1
        oldest = max(0, newest - self.cfg.max_staleness)
        allowed = {INITIAL_VERSION} if self.cfg.only else set(range(oldest, newest + 1))
        if wrong := sorted(versions - allowed):
            raise SyncError(f"step {step}: rollouts of version {wrong}, but only {sorted(allowed)} may be learned from")
