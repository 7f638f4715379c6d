"""One sampled sequence, as the engine returns it and the grader completes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tepo_megatron.base.types.sampling import SamplingMask

# How an answer was graded: the reason for its score.
Status = Literal[
    "exact", "equal", "wrong", "unparsed", "no_box", "too_long", "timeout", "died", "bad_gold", "unjudged", "given"
]  # fmt: skip
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True)
class Rollout:
    """One sampled sequence, including its prompt."""

    prompt_id: int  # `Prompt.id`
    token_ids_L: Tensor  # int64
    response_mask_L: Tensor  # bool, True where the policy chose the token
    # fp32 nats, the engine's log-prob of each token after temperature and truncation (0 where the mask is False)
    rollout_logprobs_L: Tensor
    policy_version: int  # version of the weights that sampled the sequence, or the oldest if there were several
    stop_reason: str  # "stop" or "length"; "abort" for a partial response that new weights interrupted (`engines/partial.py`)
    answer: str = ""
    reward: float = float("nan")  # shaped reward, which the policy is trained on; nan before grading
    score: float = float("nan")  # the grader's unshaped score, used by group filters and accuracies; nan before grading
    status: str = "ungraded"  # reason for the score (`exact`, `no_box`, `timeout`, ...); "ungraded" before grading
    # (index, version) of each change to newer weights, which sampled the tokens from that index on
    later_versions: tuple[tuple[int, int], ...] = ()
    # `Routing.dtype` or int16, the experts that the engine's routers chose. The last token was never an input and has
    # `no_expert` of that type. None: not requested.
    experts_LKT: Tensor | None = None
    # (index, name) of each inference server, like `later_versions`, the first at index 0. Empty: unknown.
    servers: tuple[tuple[int, str], ...] = ()
    # Digest of the experts of the prompt's tokens, where `experts_LKT` may not be there before it is packed. Empty: not known.
    prompt_experts: bytes = b""
    # (weight, value) of each term of the reward, before shaping. Empty: not graded by terms.
    terms: tuple[tuple[float, float], ...] = ()
    # The ids that truncated sampling could choose each response token from. None: the engine did not say.
    sampling_mask: SamplingMask | None = None
    # Index of the sample in its group. Sequences of one sample share it, and one advantage. -1: the sequence is a sample by
    # itself.
    sample: int = -1
    failure: str = ""  # why the user's function lost the sample (`rollout/containment.py`). Empty: it did not.
    row: Mapping[str, Any] = field(default_factory=dict)  # `Prompt.meta`, for rewards. Neither recorded nor sent to ranks.

    def __post_init__(self) -> None:
        length = self.token_ids_L.numel()
        if self.experts_LKT is not None and self.experts_LKT.shape[0] != length:
            raise ValueError(
                f"rollout of prompt {self.prompt_id}: experts of {self.experts_LKT.shape[0]} tokens, and it has {length}"
            )
        if self.response_mask_L.numel() != length or self.rollout_logprobs_L.numel() != length:
            raise ValueError(f"rollout of prompt {self.prompt_id}: token ids, mask and log-probs differ in length")
        if self.sampling_mask is not None and self.sampling_mask.counts_N.numel() != self.response_length:
            raise ValueError(f"rollout of prompt {self.prompt_id}: sampling masks of another number of tokens")
        if length and bool(self.response_mask_L[0]):
            raise ValueError(f"rollout of prompt {self.prompt_id}: the first token cannot be a response token (no context)")
        places = [0, *(place for place, _ in self.later_versions), length]
        versions = [self.policy_version, *(version for _, version in self.later_versions)]
        if self.later_versions and (sorted(set(places)) != places or sorted(set(versions)) != versions):
            raise ValueError(
                f"rollout of prompt {self.prompt_id}: later_versions={self.later_versions} do not ascend from version "
                f"{self.policy_version} within its {length} tokens"
            )

    @property
    def prompt_length(self) -> int:
        """Return the number of tokens before the first one that the policy chose; the whole length if it chose none."""
        return int(self.response_mask_L.int().argmax()) if self.response_length else self.token_ids_L.numel()

    @property
    def response_length(self) -> int:
        """Return |y|, the number of tokens that the policy chose."""
        return int(self.response_mask_L.sum())

    @property
    def versions_L(self) -> Tensor:
        """Return the weight version at each token, int64. Prompt and tool tokens, which no weights sampled, have one too."""
        versions_L = torch.full_like(self.token_ids_L, self.policy_version)
        for place, version in self.later_versions:
            versions_L[place:] = version
        return versions_L

    @property
    def response_ids(self) -> list[int]:
        """Return the tokens that the policy chose, for the grader."""
        return self.token_ids_L[self.response_mask_L].tolist()


def split_samples(group: Sequence[Rollout]) -> list[list[Rollout]]:
    """Return the sequences of each sample of a group, in order."""
    samples: dict[int, list[Rollout]] = {}
    for place, rollout in enumerate(group):
        samples.setdefault(rollout.sample if rollout.sample >= 0 else -1 - place, []).append(rollout)
    return list(samples.values())
