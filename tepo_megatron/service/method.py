"""Resolve what the objective requires of sampling and reward shaping, where the config leaves it null."""

from dataclasses import dataclass

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.config import DYNAMIC_SAMPLING_ROUNDS, Config, RewardConfig, RolloutConfig, TrainingConfig
from tepo_megatron.losses import Objective, build_objective
from tepo_megatron.losses.advantages import OF_WHOLE_BATCH
from tepo_megatron.rewards.terms import OverlongShaping

# The penalty starts in the last 1/5 of the response length. DAPO, Section 4.1: the last 4096 of 20480 tokens.
OVERLONG_BUFFER_SHARE = 5
OVERLONG_PENALTY = 0.5  # the largest one. Verdicts are 0 and 1 here; DAPO takes 1 for verdicts of -1 and 1


@dataclass(frozen=True)
class Method:
    """The resolved method of a run."""

    objective: Objective
    max_generation_rounds: int
    overlong: OverlongShaping | None


def resolve(cfg: Config) -> Method:
    """Return the method that `cfg` describes. Raises ConfigError when its keys contradict each other. A pure function."""
    objective = build_objective(cfg.objective)
    _check_reward_penalty(objective, cfg.rollout.filter_uniform_groups)
    _check_old_logprobs(objective, cfg.training.old_logprobs)
    _check_teacher(objective, cfg.objective.reference_path, cfg.rollout.filter_uniform_groups)
    _check_stream(objective, cfg.training.stream)
    _check_full_vocabulary(objective, cfg.training.logits_budget_mib, cfg.rollout)
    rounds = _max_generation_rounds(cfg.rollout, objective, cfg.objective.name)
    return Method(objective, rounds, _overlong(cfg.reward, objective, cfg.rollout.max_response_tokens))


def has_idle_ratio(objective: Objective, training: TrainingConfig, minibatches: int) -> bool:
    """Return whether ratio and KL to the old policy have no effect on a rollout batch of this number of minibatches.

    Its only update has the old policy's own weights, so that every ratio is 1 and every dH is 0.
    """
    uses_old_policy = objective.ratio != "none" or objective.kl_mask != "none"
    return uses_old_policy and training.old_logprobs == "actor" and minibatches * training.epochs == 1


def _check_reward_penalty(objective: Objective, filters_groups: bool) -> None:
    """Raise ConfigError if a KL in the reward would decide the advantages of groups with equal scores."""
    in_reward = objective.ref_kl is not None and objective.ref_kl.where == "reward"
    if in_reward and objective.advantage in ("std", "gdpo") and not filters_groups:
        raise ConfigError(
            f"objective.ref_kl.where=reward with objective.advantage={objective.advantage} and "
            "rollout.filter_uniform_groups=false: in a group of equal verdicts the KL is all that differs, and dividing it by "
            "its standard deviation makes full-size advantages of it; use objective.advantage=mean, or filter those groups"
        )


def _check_teacher(objective: Objective, path: str | None, filters_groups: bool) -> None:
    """Raise ConfigError if distillation lacks a teacher, or drops groups for their rewards, which it does not use."""
    if objective.advantage != "none" or objective.ref_kl is None:
        return
    if path is None:
        raise ConfigError(
            "objective.advantage=none learns from the reference policy, which is model.path itself; set objective.ref_kl.path "
            "to the teacher's directory"
        )
    if filters_groups:
        raise ConfigError(
            "objective.advantage=none with rollout.filter_uniform_groups=true drops groups of equal scores, and the "
            "teacher has something to say on all of them; set filter_uniform_groups to false"
        )


def _check_full_vocabulary(objective: Objective, logits_budget_mib: int | None, rollout: RolloutConfig) -> None:
    """Raise ConfigError if the exact KL to the reference policy lacks hidden states, or would be of another distribution."""
    if not objective.needs_teacher:
        return
    if logits_budget_mib is None:
        raise ConfigError(
            "objective.ref_kl.estimator=full computes the logits of both models in chunks, from hidden states; set "
            "training.logits_budget_mib (0: hold none)"
        )
    if rollout.truncates:
        raise ConfigError(
            f"objective.ref_kl.estimator=full is over the whole vocabulary, and rollout.top_k={rollout.top_k} with "
            f"top_p={rollout.top_p} leaves tokens out; set top_k to -1 and top_p to 1, or use another estimator"
        )


def _check_old_logprobs(objective: Objective, old_logprobs: str) -> None:
    """Raise ConfigError if the engine's log-probs serve as the old ones and the objective needs what they lack."""
    if old_logprobs != "rollout":
        return
    if objective.kl_mask not in ("none", "all"):
        raise ConfigError(
            f"training.old_logprobs=rollout knows no old entropies, which objective.kl_mask={objective.kl_mask} compares with; "
            f"use old_logprobs=actor, or objective.kl_mask=none with beta=0"
        )
    if objective.correction.type != "none":
        raise ConfigError(
            f"training.old_logprobs=rollout leaves objective.correction.type={objective.correction.type} nothing to "
            f"correct (old over rollout is 1); remove one of them"
        )


def _check_stream(objective: Objective, stream: str) -> None:
    """Raise ConfigError if the advantages of a streamed minibatch depend on groups that are not there yet."""
    if stream != "off" and objective.advantage in OF_WHOLE_BATCH:
        raise ConfigError(
            f"training.stream={stream} with objective.advantage={objective.advantage}: that advantage takes all samples of the "
            "rollout batch, which are not there when its first minibatch is trained; set stream to off, or another advantage"
        )


def _max_generation_rounds(cfg: RolloutConfig, objective: Objective, name: str) -> int:
    rounds = cfg.max_generation_rounds
    if objective.dynamic_sampling and rounds is None and not cfg.filter_uniform_groups:
        raise ConfigError(
            f"objective {name} samples dynamically: it replaces the groups that rollout.filter_uniform_groups=false keeps; set "
            f"that to true, or rollout.max_generation_rounds=1"
        )
    if rounds is not None and rounds > 1 and not cfg.filter_uniform_groups:
        raise ConfigError(
            f"rollout.max_generation_rounds={rounds} has no effect with rollout.filter_uniform_groups=false, which drops no "
            f"group; change one of them"
        )
    if rounds is None:
        return DYNAMIC_SAMPLING_ROUNDS if objective.dynamic_sampling else 1
    return rounds


def _overlong(reward: RewardConfig, objective: Objective, max_tokens: int) -> OverlongShaping | None:
    if (buffer := reward.overlong_buffer_tokens) is None:
        buffer = max(1, max_tokens // OVERLONG_BUFFER_SHARE) if objective.overlong_shaping else 0
    return OverlongShaping(max_tokens, buffer, OVERLONG_PENALTY) if buffer else None
