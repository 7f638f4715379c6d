"""A generation request, and the sampled sequence that answers it, as the engine returns it and the grader completes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from tepo_megatron.base.limits import MOST_MASKED

NO_TOKEN = -1  # fills the rows of a padded mask


@dataclass(frozen=True)
class Truncation:
    """The settings of truncated sampling. Top-k is applied first."""

    top_k: int = -1  # number of most likely tokens that are kept, at least 2. -1: no limit.
    top_p: float = 1.0  # the most likely tokens are kept until their probability is this, in (0, 1]. 1: no limit.
    # Whether top-p counts the probabilities that top-k left, divided by their sum (vLLM), or those of the whole vocabulary
    # (SGLang)
    renormalizes: bool = True


@dataclass(frozen=True, eq=False)
class SamplingMask:
    """The sampling masks of N sampled tokens: for each, the distinct ids that it was sampled from, its own included."""

    ids_M: Tensor  # int32, the ids of all tokens, one token after the other
    counts_N: Tensor  # int32, number of ids of each token, at least 1

    @classmethod
    def cat(cls, masks: Sequence["SamplingMask"]) -> "SamplingMask":
        """Return the masks of the tokens of all, in order."""
        empty = torch.empty(0, dtype=torch.int32)
        return cls(torch.cat([empty, *(m.ids_M for m in masks)]), torch.cat([empty, *(m.counts_N for m in masks)]))

    @classmethod
    def from_rows(cls, ids_NK: Tensor) -> "SamplingMask":
        """Return the masks in the rows of a tensor, where NO_TOKEN is no id."""
        kept_NK = ids_NK != NO_TOKEN
        return cls(ids_NK[kept_NK].int(), kept_NK.sum(1, dtype=torch.int32))

    @cached_property
    def widest(self) -> int:
        """Return the largest number of ids of a token, 0 without tokens."""
        return int(self.counts_N.max()) if self.counts_N.numel() else 0

    @cached_property
    def _starts_N(self) -> Tensor:
        return self.counts_N.cumsum(0) - self.counts_N

    def split(self, lengths: Sequence[int]) -> list["SamplingMask"]:
        """Return the masks in parts of these numbers of tokens, as views."""
        parts = self.counts_N.split(list(lengths))
        ids = self.ids_M.split([int(part.sum()) for part in parts])
        return [SamplingMask(*each) for each in zip(ids, parts, strict=True)]

    def to(self, device: torch.device) -> "SamplingMask":
        """Return the masks on a device."""
        return SamplingMask(self.ids_M.to(device), self.counts_N.to(device))

    def rows(self, token_R: Tensor) -> Tensor:
        """Return the masks of some tokens as int64 [R, widest], filled up with NO_TOKEN.

        `token_R`: int64 indices in [0, N), on the device of the masks.
        """
        column_K = torch.arange(self.widest, device=token_R.device)
        kept_RK = column_K < self.counts_N[token_R, None]
        place_RK = (self._starts_N[token_R, None] + column_K).clamp(max=max(0, self.ids_M.numel() - 1))
        return torch.where(kept_RK, self.ids_M[place_RK].long(), NO_TOKEN)

    def check(self, ids_N: Tensor, most: int) -> None:
        """Raise ValueError unless these are masks of these tokens. `ids_N`: int64 ids of the sampled tokens, on the host."""
        if self.counts_N.shape != ids_N.shape or int(self.counts_N.sum()) != self.ids_M.numel():
            raise ValueError(f"sampling masks of {self.counts_N.numel()} tokens, not {ids_N.numel()}, or of another size")
        if not ids_N.numel():
            return
        if int(self.counts_N.min()) < 1:
            raise ValueError("an empty sampling mask")
        if self.widest > most:
            raise ValueError(f"a sampling mask of {self.widest} ids, more than {most}")
        ids_NK = self.rows(torch.arange(ids_N.numel())).sort(1).values
        if int(self.ids_M.min()) < 0 or bool(((ids_NK[:, 1:] == ids_NK[:, :-1]) & (ids_NK[:, 1:] >= 0)).any()):
            raise ValueError("a sampling mask has an id below 0, or one twice")
        if not bool((ids_NK == ids_N[:, None]).any(1).all()):
            raise ValueError("a sampling mask lacks the sampled token")


class RecomputedMasks(NamedTuple):
    """Sampling masks that were recomputed from logits, the same on every rank."""

    ids_RK: Tensor  # int64, filled up with NO_TOKEN. The label's id is always there, in the last column if it was outside.
    outside_R: Tensor  # bool, the label is not among the tokens that the truncation keeps
    cut_R: Tensor  # bool, the truncation keeps more tokens than there are candidates; the least likely ones are missing

    def differ(self, ids_RK: Tensor) -> Tensor:
        """Return bool [R]: the row's mask is not the same set as that of `ids_RK` (int64, filled up with NO_TOKEN)."""
        width = max(self.ids_RK.size(1), ids_RK.size(1))
        padded = (torch.nn.functional.pad(x, (0, width - x.size(1)), value=NO_TOKEN) for x in (self.ids_RK, ids_RK))
        mine, other = (x.sort(1).values for x in padded)
        return (mine != other).any(1)


NO_EXPERT = -1  # marks a token for which no router ran; see `no_expert` for unsigned types


def no_expert(dtype: torch.dtype) -> int:
    """Return the value that marks a token for which no router ran: NO_EXPERT, or the largest value of an unsigned type.

    Both have the same bits, so `Tensor.to` turns one into the other.
    """
    return NO_EXPERT if dtype.is_signed else torch.iinfo(dtype).max


@dataclass(frozen=True)
class Prompt:
    """A tokenized question."""

    id: int  # unique number, stable across runs (the row's line in the dataset)
    token_ids: tuple[int, ...]
    answer: str
    meta: Mapping[str, Any] = field(default_factory=dict)  # the other columns of the dataset row
    messages: Sequence[dict[str, Any]] = ()  # the chat that the tokens render; empty for a string


@dataclass(frozen=True)
class Routing:
    """The shape of a model's MoE routing."""

    num_layers: int
    sparse_layers: tuple[int, ...]  # indices of the layers with experts, ascending
    per_token: int  # experts chosen per token and layer (top-k)
    number: int  # experts per layer

    @property
    def dtype(self) -> torch.dtype:
        """Return the narrowest type of `Rollout.experts_LKT`: uint8 for fewer than 256 experts, else int16."""
        return torch.uint8 if self.number <= torch.iinfo(torch.uint8).max else torch.int16

    def check(self, experts_LKT: Tensor) -> None:
        """Raise ValueError unless these are valid choices: distinct experts for every token. The last token may have none."""
        shape = (experts_LKT.shape[0], len(self.sparse_layers), self.per_token)
        if experts_LKT.shape != shape:
            raise ValueError(f"experts of shape {list(experts_LKT.shape)} instead of {list(shape)} (tokens, layers, per token)")
        chosen_LKT = experts_LKT[:-1] if bool((experts_LKT[-1:] == no_expert(experts_LKT.dtype)).all()) else experts_LKT
        if chosen_LKT.numel():
            self.check_range(*map(int, chosen_LKT.aminmax()))
        # Compare each expert with those at a distance. In numpy, expert by expert, this is faster than a sort.
        chosen_TLK = np.ascontiguousarray(np.moveaxis(chosen_LKT.numpy(), -1, 0))
        if any((chosen_TLK[i:] == chosen_TLK[:-i]).any() for i in range(1, self.per_token)):
            raise ValueError("an expert was chosen twice for one token")

    def check_range(self, least: int, most: int) -> None:
        """Raise ValueError unless all experts of a range exist."""
        if not 0 <= least <= most < self.number:
            raise ValueError(f"experts {least} to {most} of a model that has {self.number}")


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of a request.

    Sampling options without a field are switched off in the engine (min_p=0, repetition_penalty=1), because the actor
    recomputes log-probs under temperature, top-k and top-p alone.
    """

    samples: int = 1  # responses per prompt
    temperature: float = 1.0
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()  # tokens that end a response; the response includes them. Empty: the engine decides.
    # Routing of the model, if the engine is to return the experts that it chose. None: not requested.
    routing: Routing | None = None
    # top_k, top_p: see `Truncation`
    top_k: int = -1
    top_p: float = 1.0

    @property
    def returns_masks(self) -> bool:
        """Return whether the engine is asked for the sampling mask of each token."""
        return 0 < self.top_k <= MOST_MASKED


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
    stop_reason: str  # "stop" or "length"; "abort" for a partial response that new weights interrupted (`engines/engine.py`)
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
