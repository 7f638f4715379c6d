"""Data objects of one training step, in the order in which they are created.

    Prompt -> Rollout -> TrainBatch -> PackedMicrobatch -> TokenStats -> LossOutput

Layout suffixes of tensors:
    _L  tokens of one sequence (prompt and response)
    _B  sequences of the batch, over all ranks
    _N  response tokens of the batch, over all ranks, sequence after sequence
    _S  packed tokens of one microbatch on this context-parallel rank
    _R  response rows of one microbatch: positions whose LABEL is a response token; only these reach the output layer
    _G  sequences of one microbatch (whole sequences, whichever context-parallel ranks hold their tokens)
    _P  pieces of sequences of one microbatch (one per sequence, unless prompts are shared)
    _K  MoE layers of the whole model, first to last
    _T  experts chosen for one token in one MoE layer
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """A tokenized question.

    Attributes:
        id: Unique number, stable across runs (the row's line in the dataset).
        token_ids: Tokens that the engine receives.
        answer: Gold answer for the grader.
        meta: Everything else in the dataset row.
    """

    id: int
    token_ids: tuple[int, ...]
    answer: str
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Routing:
    """The shape of a model's MoE routing.

    Attributes:
        num_layers: Layers of the model.
        sparse_layers: Indices of the layers with experts, ascending.
        per_token: Experts chosen per token and layer (top-k).
        number: Experts per layer.
    """

    num_layers: int
    sparse_layers: tuple[int, ...]
    per_token: int
    number: int

    def check(self, experts_LKT: Tensor) -> None:
        """Raise ValueError unless these are valid choices: distinct experts for every token. The last token may have none."""
        shape = (experts_LKT.shape[0], len(self.sparse_layers), self.per_token)
        if experts_LKT.shape != shape:
            raise ValueError(f"experts of shape {list(experts_LKT.shape)} instead of {list(shape)} (tokens, layers, per token)")
        chosen_LKT = experts_LKT[:-1] if bool((experts_LKT[-1:] == NO_EXPERT).all()) else experts_LKT
        if chosen_LKT.numel() and not 0 <= int(chosen_LKT.min()) <= int(chosen_LKT.max()) < self.number:
            raise ValueError(f"experts {int(chosen_LKT.min())} to {int(chosen_LKT.max())} of a model that has {self.number}")
        if bool((chosen_LKT.sort(dim=-1).values.diff(dim=-1) == 0).any()):
            raise ValueError("an expert was chosen twice for one token")


NO_EXPERT = -1  # marks a token for which no router ran


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of a request.

    Sampling options without a field are switched off in the engine (top_p=1, top_k=-1, min_p=0, repetition_penalty=1),
    because the actor recomputes log-probs under `temperature` alone.

    Attributes:
        samples: Responses per prompt.
        temperature: Sampling temperature.
        max_tokens: Maximum response tokens.
        stop_token_ids: Tokens that end a response; the response includes them. Empty: the engine decides.
        max_sequence_tokens: Maximum tokens of prompt and response together. None: no such limit.
        routing: Routing of the model, if the engine is to return the experts that it chose. None: not requested.
    """

    samples: int = 1
    temperature: float = 1.0
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    max_sequence_tokens: int | None = None
    routing: Routing | None = None

    def after(self, prompt: Prompt) -> SamplingParams:
        """Return the settings for this prompt, limited by `max_tokens` alone. Raise ValueError if that leaves no token."""
        if self.max_sequence_tokens is None:
            return self
        room = self.max_sequence_tokens - len(prompt.token_ids)
        if room < 1:
            raise ValueError(
                f"prompt {prompt.id} has {len(prompt.token_ids)} tokens, max_sequence_tokens={self.max_sequence_tokens}"
            )
        return dataclasses.replace(self, max_tokens=min(self.max_tokens, room), max_sequence_tokens=None)


@dataclass(frozen=True)
class Rollout:
    """One sampled sequence, including its prompt.

    Attributes:
        prompt_id: `Prompt.id`.
        token_ids_L: int64.
        response_mask_L: bool, True where the policy chose the token.
        rollout_logprobs_L: fp32 nats, the engine's log-prob of each token after temperature (0 where the mask is False).
        policy_version: Version of the weights that sampled the sequence, or the oldest if there were several.
        stop_reason: "stop" or "length"; "abort" for a partial response that new weights interrupted (`inference/partial.py`).
        answer: Gold answer.
        reward: Shaped reward, which the policy is trained on; nan before grading.
        score: The grader's unshaped score, used by group filters and accuracies; nan before grading.
        status: Reason for the score (`exact`, `no_box`, `timeout`, ...); "ungraded" before grading.
        later_versions: (index, version) of each change to newer weights, which sampled the tokens from that index on.
        experts_LKT: int16, the experts that the engine's routers chose. The last token was never an input and has NO_EXPERT.
            None: not requested.
        servers: (index, name) of each inference server, like `later_versions`, the first at index 0. Empty: unknown.
    """

    prompt_id: int
    token_ids_L: Tensor
    response_mask_L: Tensor
    rollout_logprobs_L: Tensor
    policy_version: int
    stop_reason: str
    answer: str = ""
    reward: float = float("nan")
    score: float = float("nan")
    status: str = "ungraded"
    later_versions: tuple[tuple[int, int], ...] = ()
    experts_LKT: Tensor | None = None
    servers: tuple[tuple[int, str], ...] = ()

    def __post_init__(self) -> None:
        length = self.token_ids_L.numel()
        if self.experts_LKT is not None and self.experts_LKT.shape[0] != length:
            raise ValueError(
                f"rollout of prompt {self.prompt_id}: experts of {self.experts_LKT.shape[0]} tokens, and it has {length}"
            )
        if self.response_mask_L.numel() != length or self.rollout_logprobs_L.numel() != length:
            raise ValueError(f"rollout of prompt {self.prompt_id}: token ids, mask and log-probs differ in length")
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


@dataclass(frozen=True)
class TrainBatch:
    """Graded rollouts with advantages. Every rank holds the whole batch; the sequences of one prompt are contiguous.

    Attributes:
        rollouts: B sequences.
        advantages_B: fp32.
        old_logprobs_N: fp32 nats under the actor's weights at the start of the rollout batch, valid on the last pipeline stage;
            or the engine's log-probs (training.old_logprobs=rollout). None: no old pass; the current ones are used.
        old_entropies_N: fp32 nats under the same weights, valid on the last pipeline stage. None: no old pass.
        ref_logprobs_N: fp32 nats under the reference policy, valid on the last pipeline stage. None: no reference.
        update: Number of optimizer steps already taken on this rollout batch.
        ids_B: int64, index of each sequence in the rollout batch, which random choices are keyed by. None: its index here.
    """

    rollouts: tuple[Rollout, ...]
    advantages_B: Tensor
    old_logprobs_N: Tensor | None = None
    old_entropies_N: Tensor | None = None
    ref_logprobs_N: Tensor | None = None
    update: int = 0
    ids_B: Tensor | None = None

    @classmethod
    def build(cls, rollouts: Sequence[Rollout], advantages_B: Tensor) -> TrainBatch:
        """Return a batch without old statistics.

        Args:
            rollouts: B graded rollouts, contiguous by prompt.
            advantages_B: fp32. Raises ValueError unless there is one advantage per rollout.
        """
        if advantages_B.shape != (len(rollouts),):
            raise ValueError(f"{len(rollouts)} rollouts but advantages of shape {tuple(advantages_B.shape)}")
        return cls(tuple(rollouts), advantages_B)

    def __len__(self) -> int:
        """Return B, the number of sequences."""
        return len(self.rollouts)

    @cached_property
    def lengths(self) -> list[int]:
        """Return the number of tokens of each sequence, including the prompt."""
        return [r.token_ids_L.numel() for r in self.rollouts]

    @cached_property
    def response_lengths(self) -> list[int]:
        """Return |y| of each sequence."""
        return [r.response_length for r in self.rollouts]

    @cached_property
    def prompt_lengths(self) -> list[int]:
        """Return the number of tokens before the first one that the policy chose; the whole length if it chose none."""
        return [int(r.response_mask_L.int().argmax()) if r.response_length else r.token_ids_L.numel() for r in self.rollouts]

    @cached_property
    def prompt_ids(self) -> list[int]:
        """Return one number per sequence, equal for equal prompts: same tokens and, if known, same experts."""
        numbers: dict[tuple[bytes, bytes], int] = {}
        out = []
        for rollout, length in zip(self.rollouts, self.prompt_lengths, strict=True):
            experts_LKT = rollout.experts_LKT
            experts = b"" if experts_LKT is None else experts_LKT[:length].numpy().tobytes()
            out.append(numbers.setdefault((rollout.token_ids_L[:length].numpy().tobytes(), experts), len(numbers)))
        return out

    @cached_property
    def first_tokens(self) -> list[int]:
        """Return the index in the _N tensors at which each sequence's response starts."""
        return [0, *itertools.accumulate(self.response_lengths)][:-1]

    @property
    def num_tokens(self) -> int:
        """Return N, the number of response tokens."""
        return sum(self.response_lengths)

    @cached_property
    def rollout_logprobs_N(self) -> Tensor:
        """Return the engine's log-probs of the response tokens, fp32 nats."""
        return torch.cat([r.rollout_logprobs_L[r.response_mask_L] for r in self.rollouts])

    @property
    def experts(self) -> list[Tensor]:
        """Return each sequence's experts, int16 [L, K, T]. Raise ValueError naming the prompt of a rollout without them."""
        chosen = [r.experts_LKT for r in self.rollouts if r.experts_LKT is not None]
        if len(chosen) < len(self):
            prompt = next(r.prompt_id for r in self.rollouts if r.experts_LKT is None)
            raise ValueError(f"rollout.replay_experts=true, and a rollout of prompt {prompt} has none to replay")
        return chosen

    @cached_property
    def sequence_N(self) -> Tensor:
        """Return the sequence of each response token, int64 in [0, B)."""
        return torch.arange(len(self)).repeat_interleave(torch.tensor(self.response_lengths))

    @cached_property
    def token_keys_N(self) -> Tensor:
        """Return int64 [N, 2]: (sequence id, position in the response) of each token, independent of the sequence order."""
        ids_B = torch.arange(len(self)) if self.ids_B is None else self.ids_B
        position_N = torch.arange(self.num_tokens) - torch.tensor(self.first_tokens)[self.sequence_N]
        return torch.stack((ids_B[self.sequence_N], position_N), dim=1)

    def select(self, indices: Sequence[int], update: int) -> TrainBatch:
        """Return a batch of some sequences, with their old and reference statistics.

        Args:
            indices: Indices of the sequences, in the order of the new batch.
            update: `update` of the new batch.
        """

        def pick(x_N: Tensor | None) -> Tensor | None:
            if x_N is None:
                return None
            parts = x_N.split(self.response_lengths)
            return torch.cat([parts[i] for i in indices])

        return TrainBatch(
            tuple(self.rollouts[i] for i in indices),
            self.advantages_B[list(indices)],
            pick(self.old_logprobs_N),
            pick(self.old_entropies_N),
            pick(self.ref_logprobs_N),
            update,
            (torch.arange(len(self)) if self.ids_B is None else self.ids_B)[list(indices)],
        )

    def with_old_stats(self, stats_N: TokenStats) -> TrainBatch:
        """Return the same batch with these statistics as the old ones."""
        return dataclasses.replace(self, old_logprobs_N=stats_N.logprob_R, old_entropies_N=stats_N.entropy_R)

    def updates(self, epochs: int, minibatch_prompts: int) -> int:
        """Return the number of minibatches that `epochs` yields for the same arguments.

        Args:
            epochs: Passes over the batch.
            minibatch_prompts: Maximum groups (prompts) per minibatch.
        """
        return epochs * -(-len({r.prompt_id for r in self.rollouts}) // minibatch_prompts)

    def epochs(self, epochs: int, minibatch_prompts: int, seed: int) -> Iterator[TrainBatch]:
        """Yield minibatches of whole groups, as equal in size as possible, reshuffled every epoch.

        Args:
            epochs: Passes over the batch.
            minibatch_prompts: Maximum groups (prompts) per minibatch.
            seed: Seed of the shuffles, which depend on nothing else.
        """
        groups = [list(g) for _, g in itertools.groupby(range(len(self)), key=lambda i: self.rollouts[i].prompt_id)]
        parts = -(-len(groups) // minibatch_prompts)
        generator = torch.Generator().manual_seed(seed)
        update = 0
        for _ in range(epochs):
            order = torch.randperm(len(groups), generator=generator).tolist()
            for part in range(parts):
                chosen = order[part * len(groups) // parts : (part + 1) * len(groups) // parts]
                yield self.select([i for g in chosen for i in groups[g]], update)
                update += 1


@dataclass(frozen=True)
class TokenStats:
    """Log-prob of the label and entropy of the full distribution, for each response row.

    Attributes:
        logprob_R, entropy_R: fp32 (fp64 if the logits are) nats, under the sampling temperature; differentiable.
    """

    logprob_R: Tensor
    entropy_R: Tensor


@dataclass(frozen=True)
class PackedMicrobatch:
    """Pieces of sequences packed one after another (THD), as this context-parallel rank sees them.

    A piece is a whole sequence, a prompt that several sequences share, or the rest of one such sequence after that prompt.

    Attributes:
        tokens_S: int64 [1, S].
        cu_seqlens: int32 [P + 1], padded starts of the P pieces over ALL context-parallel ranks.
        max_seqlen: Length of the longest padded sequence.
        rows_R: int64, positions in [0, S) whose label is a response token; a position repeats where sequences share it.
        labels_R: int64, the label of each row.
        sequence_R: int64 in [0, G), the sequence of each label.
        token_R: int64, index of each label in the flat _N tensors of the TrainBatch (old log-probs and so on).
        position_R: int64, index of each label in its response, from 0.
        chunk_R: int64 in [0, chunks), the part of the sequence that holds the row: the zigzag chunk; a shared prompt counts
            as one part.
        chunks: Parts per sequence.
        lengths_G: |y| of each sequence over all context-parallel ranks, at least 1.
        sequences_G: int64, index of each sequence in the TrainBatch.
        starts: Offset of each piece in its sequence. A piece with an offset above 0 continues that many tokens of the last
            piece before it that starts at 0. None: all pieces start at 0.
        experts_SKT: int16, the experts to route each token to; arbitrary for padding and for tokens without known experts.
            None: the routers choose.
    """

    tokens_S: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    rows_R: Tensor
    labels_R: Tensor
    sequence_R: Tensor
    token_R: Tensor
    position_R: Tensor
    chunk_R: Tensor
    chunks: int
    lengths_G: Tensor
    sequences_G: Tensor
    starts: tuple[int, ...] | None = None
    experts_SKT: Tensor | None = None

    def to(self, device: torch.device) -> PackedMicrobatch:
        """Return the same microbatch with its tensors on `device`."""
        moved = {k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in vars(self).items()}
        return PackedMicrobatch(**moved)


@dataclass(frozen=True)
class Denominators:
    """Counts over the whole minibatch (all ranks and microbatches), fixed before any backward; fp32 scalars on the device.

    Attributes:
        tokens: Response tokens N.
        sequences: Sampled sequences G of the minibatch.
    """

    tokens: Tensor
    sequences: Tensor


@dataclass(frozen=True)
class LossOutput:
    """The loss of one microbatch on this rank, with its metrics.

    Attributes:
        loss: Scalar, this rank's part of the objective; the parts of all ranks and microbatches add up to it.
        metrics: Name -> (numerator, denominator), detached.
        histograms: Name -> int64 counts, to be summed over ranks and microbatches.
        ratio_R: Importance ratio of each row, detached.
    """

    loss: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]]
    histograms: dict[str, Tensor]
    ratio_R: Tensor
