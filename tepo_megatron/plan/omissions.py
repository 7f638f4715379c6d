"""Say what a config uses and the plan leaves out."""

from tepo_megatron.config import ObjectiveConfig, RewardConfig, RolloutConfig
from tepo_megatron.config.judge import JudgeTermConfig


def omissions(reward: RewardConfig, objective: ObjectiveConfig, rollout: RolloutConfig) -> list[str]:
    """Return a line for each part of a run that the figures of a plan leave out.

    Args:
        reward, objective, rollout: Sections of the config.
    """
    found = []
    for number, term in enumerate(reward.terms):
        if isinstance(term, JudgeTermConfig):
            gpus = term.servers * term.server.tp
            more = f"{gpus} more GPUs of its servers, their memory, " if term.url is None else ""
            found.append(f"not counted: {more}the seconds of the judge reward.terms[{number}] ({term.model})")
    if (objective.ref_kl or {}).get("estimator") == "full":
        found.append("not counted: the reference policy's output layer and hidden states (objective.ref_kl.estimator=full)")
    if rollout.function is not None:
        found.append(f"not counted: what rollout.function={rollout.function} takes besides sampling")
    return found
