"""Say what a config uses and the plan leaves out."""

from tepo_megatron.config import RewardConfig, RolloutConfig
from tepo_megatron.config.judge import JudgeTermConfig
from tepo_megatron.plan.judges import judge_model


def omissions(reward: RewardConfig, rollout: RolloutConfig) -> list[str]:
    """Return a line for each part of a run that the figures of a plan leave out."""
    found = []
    for number, term in enumerate(reward.terms):
        if isinstance(term, JudgeTermConfig) and judge_model(term) is None:
            more = f"{term.gpus} more GPUs of its servers, their memory, " if term.url is None else ""
            found.append(f"not counted: {more}the seconds of the judge reward.terms[{number}] ({term.model})")
    if rollout.function is not None:
        found.append(f"not counted: what rollout.function={rollout.function} takes besides sampling")
    return found
