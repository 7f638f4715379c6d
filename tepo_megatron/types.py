"""The data objects of one training step, in the order in which they arise.

    Prompt -> Rollout -> TrainBatch -> PackedMicrobatch -> TokenStats -> LossOutput

Layout suffixes of tensors:
    _L  tokens of one sequence (prompt and response)
    _B  sequences of the batch, on all ranks
    _N  response tokens of the batch, on all ranks, sequence after sequence
    _S  packed tokens of one microbatch on this context-parallel rank
    _R  its response rows: the positions whose LABEL is a response token, the only ones to reach the output layer
    _G  sequences of one microbatch (whole sequences, whichever context-parallel ranks hold their tokens)
    _P  pieces of sequences of one microbatch (as many as sequences, unless prompts are shared)
    _K  layers with experts, first to last, of the whole model
    _T  experts chosen for one token in one of them
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
    """A question, tokenized.

    id: unique and stable over runs (its line in the dataset); token_ids: what the engine receives;
    answer: the gold answer for the grader; meta: whatever else the dataset row held.
    """

    id: int
    token_ids: tuple[int, ...]
    answer: str
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Routing:
    """A model's experts: `per_token` of `number` are chosen in each of `sparse_layers` (ascending) out of num_layers."""

    num_layers: int
    sparse_layers: tuple[int, ...]
    per_token: int
    number: int

    def check(self, experts_LKT: Tensor) -> None:
        """Raise ValueError unless these are choices of this model: of each token distinct experts, of the last perhaps none."""
        shape = (experts_LKT.shape[0], len(self.sparse_layers), self.per_token)
        if experts_LKT.shape != shape:
            raise ValueError(f"experts of shape {list(experts_LKT.shape)} instead of {list(shape)} (tokens, layers, per token)")
        chosen_LKT = experts_LKT[:-1] if bool((experts_LKT[-1:] == NO_EXPERT).all()) else experts_LKT
        if chosen_LKT.numel() and not 0 <= int(chosen_LKT.min()) <= int(chosen_LKT.max()) < self.number:
            raise ValueError(f"experts {int(chosen_LKT.min())} to {int(chosen_LKT.max())} of a model that has {self.number}")
        if bool((chosen_LKT.sort(dim=-1).values.diff(dim=-1) == 0).any()):
            raise ValueError("an expert was chosen twice for one token")


NO_EXPERT = -1  # whose choice nobody made


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. samples: responses per prompt; max_tokens: response tokens at most; stop_token_ids: each of them ends a
    response, as its last token (none: the engine decides); max_sequence_tokens: of prompt and response together, None for no
    such limit; routing: of the model, if the experts that were chosen are to be returned.

    Whatever is not named here is switched off in the engine (top_p=1, top_k=-1, min_p=0, repetition_penalty=1),
    since log-probs are recomputed by the actor under `temperature` alone.
    """

    samples: int = 1
    temperature: float = 1.0
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    max_sequence_tokens: int | None = None
    routing: Routing | None = None

    def after(self, prompt: Prompt) -> SamplingParams:
        """The same for this prompt alone, with `max_tokens` the only limit. Raises ValueError where it leaves no token."""
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
    """One sampled sequence, prompt included.

    token_ids_L: int64; response_mask_L: bool, True where the policy chose the token;
    rollout_logprobs_L: fp32 nats, the engine's log-prob of each token after temperature (0 on the prompt);
    policy_version: the weights that sampled it, or the oldest of them; later_versions: (place, version) where newer ones took
    over, which sampled the tokens from that place in the sequence on; servers: (place, name) of the inference servers in the
    same way, the first of them at place 0; empty: not known. stop_reason: "stop" or "length".
    reward: what the policy is trained on (shaped); score: the unshaped verdict of the grader, which group filters and
    accuracies use; status: why (`exact`, `no_box`, `timeout`, ...). Before grading: nan, nan, "ungraded".
    experts_LKT: int16, the experts that the engine's routers chose; NO_EXPERT of the last token, which never was an input.
    None: not asked for.
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
        """|y|: tokens that the policy chose."""
        return int(self.response_mask_L.sum())

    @property
    def versions_L(self) -> Tensor:
        """int64: the weights that sampled each token (on the prompt and on what tools wrote: that stand beside it)."""
        versions_L = torch.full_like(self.token_ids_L, self.policy_version)
        for place, version in self.later_versions:
            versions_L[place:] = version
        return versions_L

    @property
    def response_ids(self) -> list[int]:
        """The chosen tokens, for the grader."""
        return self.token_ids_L[self.response_mask_L].tolist()


@dataclass(frozen=True)
class TrainBatch:
    """Graded rollouts with advantages, whole on every rank; sequences are contiguous by prompt.

    advantages_B: fp32. old_logprobs_N, old_entropies_N: fp32 nats of the actor's weights at the start of the rollout batch
    (valid on the last pipeline stage), None before the old pass; ref_logprobs_N: the same of the reference policy, None
    without one. update: how many optimizer steps on this rollout batch came before. ids_B: int64, each sequence's place in the
    rollout batch (which random choices hang on); None: its place in this one.
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
        """Raises ValueError when there is not one advantage per rollout."""
        if advantages_B.shape != (len(rollouts),):
            raise ValueError(f"{len(rollouts)} rollouts but advantages of shape {tuple(advantages_B.shape)}")
        return cls(tuple(rollouts), advantages_B)

    def __len__(self) -> int:
        """Sequences."""
        return len(self.rollouts)

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each sequence, prompt included."""
        return [r.token_ids_L.numel() for r in self.rollouts]

    @cached_property
    def response_lengths(self) -> list[int]:
        """|y| of each sequence."""
        return [r.response_length for r in self.rollouts]

    @cached_property
    def prompt_lengths(self) -> list[int]:
        """Tokens of each sequence before the first that the policy chose; all of them where it chose none."""
        return [int(r.response_mask_L.int().argmax()) if r.response_length else r.token_ids_L.numel() for r in self.rollouts]

    @cached_property
    def prompt_ids(self) -> list[int]:
        """For each sequence a number: equal ones where the prompts are equal, token by token, with their experts if known."""
        numbers: dict[tuple[bytes, bytes], int] = {}
        out = []
        for rollout, length in zip(self.rollouts, self.prompt_lengths, strict=True):
            experts_LKT = rollout.experts_LKT
            experts = b"" if experts_LKT is None else experts_LKT[:length].numpy().tobytes()
            out.append(numbers.setdefault((rollout.token_ids_L[:length].numpy().tobytes(), experts), len(numbers)))
        return out

    @cached_property
    def first_tokens(self) -> list[int]:
        """Where each sequence's response starts in the _N tensors."""
        return [0, *itertools.accumulate(self.response_lengths)][:-1]

    @property
    def num_tokens(self) -> int:
        """N: response tokens."""
        return sum(self.response_lengths)

    @cached_property
    def rollout_logprobs_N(self) -> Tensor:
        """fp32 nats: the engine's log-probs of the response tokens."""
        return torch.cat([r.rollout_logprobs_L[r.response_mask_L] for r in self.rollouts])

    @property
    def experts(self) -> list[Tensor]:
        """int16, each [L, K, T]: the experts of each sequence. Raises ValueError naming the prompt of one without."""
        chosen = [r.experts_LKT for r in self.rollouts if r.experts_LKT is not None]
        if len(chosen) < len(self):
            prompt = next(r.prompt_id for r in self.rollouts if r.experts_LKT is None)
            raise ValueError(f"rollout.replay_experts=true, and a rollout of prompt {prompt} has none to replay")
        return chosen

    @cached_property
    def sequence_N(self) -> Tensor:
        """int64: the sequence of each response token, in [0, B)."""
        return torch.arange(len(self)).repeat_interleave(torch.tensor(self.response_lengths))

    @cached_property
    def token_keys_N(self) -> Tensor:
        """int64 [N, 2]: sequence id and place in the response of each token: its name, whatever the order of the sequences."""
        ids_B = torch.arange(len(self)) if self.ids_B is None else self.ids_B
        position_N = torch.arange(self.num_tokens) - torch.tensor(self.first_tokens)[self.sequence_N]
        return torch.stack((ids_B[self.sequence_N], position_N), dim=1)

    def select(self, indices: Sequence[int], update: int) -> TrainBatch:
        """The sequences `indices`, with their old and reference statistics."""

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
        """The same batch with these old statistics."""
        return dataclasses.replace(self, old_logprobs_N=stats_N.logprob_R, old_entropies_N=stats_N.entropy_R)

    def updates(self, epochs: int, minibatch_prompts: int) -> int:
        """How many minibatches `epochs` yields."""
        return epochs * -(-len({r.prompt_id for r in self.rollouts}) // minibatch_prompts)

    def epochs(self, epochs: int, minibatch_prompts: int, seed: int) -> Iterator[TrainBatch]:
        """Minibatches of at most `minibatch_prompts` whole groups, of even size, reshuffled every epoch (by `seed` alone)."""
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
    """Log-prob of the label and entropy of the whole distribution, of each response row.

    logprob_R, entropy_R: fp32 (or fp64 where the logits are) nats, under the sampling temperature; differentiable.
    """

    logprob_R: Tensor
    entropy_R: Tensor


@dataclass(frozen=True)
class PackedMicrobatch:
    """Pieces of sequences packed one after another (THD), as this context-parallel rank sees them.

    A piece is a whole sequence, a prompt that several sequences share, or what one of these has behind that prompt.
    tokens_S: int64 [1, S]; cu_seqlens: int32 [P + 1], padded starts of the P pieces over ALL context-parallel ranks;
    max_seqlen: the longest padded sequence; rows_R: int64, positions in [0, S) whose label is a response token, several times
    where sequences share them; labels_R: int64, that token; sequence_R: int64, its sequence, in [0, G); token_R: int64, its
    place in the flat _N tensors of the TrainBatch (where old log-probs and the like are kept); position_R: int64, its place in
    its response, from 0; chunk_R: int64, the part of its sequence in which it lies, in [0, chunks): the zigzag chunk, a shared
    prompt counted as one; lengths_G: |y| of each sequence over all context-parallel ranks, at least 1; sequences_G: int64, the
    index of each sequence in the TrainBatch; starts: of each piece, its place in its sequence: above 0, the piece continues as
    many tokens of the last piece before it that starts at 0; None: all start at 0; experts_SKT: int16, the experts that each
    token is sent to (those of padding and of tokens without any are arbitrary); None: as routers choose.
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
        """The same microbatch with its tensors on `device`."""
        moved = {k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in vars(self).items()}
        return PackedMicrobatch(**moved)


@dataclass(frozen=True)
class Denominators:
    """Counts over the whole minibatch (all ranks and microbatches), fixed before any backward. fp32 scalars on the device.

    tokens: response tokens N; sequences: sampled sequences G.
    """

    tokens: Tensor
    sequences: Tensor


@dataclass(frozen=True)
class LossOutput:
    """loss: scalar, this rank's part of the objective (the parts of all ranks and microbatches add up to it);
    metrics: name -> (numerator, denominator), detached; histograms: name -> int64 counts, to be summed over ranks and
    microbatches; ratio_R: the importance ratio of each row, detached.
    """

    loss: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]]
    histograms: dict[str, Tensor]
    ratio_R: Tensor
