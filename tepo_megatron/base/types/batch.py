"""The training batch of one step. The docstring of the package explains the layout suffixes."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tepo_megatron.base.types.rollout import RecomputedMasks, Rollout, SamplingMask


@dataclass(frozen=True)
class PackedMicrobatch:
    """Pieces of sequences packed one after another (THD), as this context-parallel rank sees them.

    A piece is a whole sequence, a prompt that several sequences share, or the rest of one such sequence after that prompt.
    """

    tokens_S: Tensor  # int64 [1, S]
    cu_seqlens: Tensor  # int32 [P + 1], padded starts of the P pieces over ALL context-parallel ranks
    max_seqlen: int  # length of the longest padded sequence
    rows_R: Tensor  # int64, positions in [0, S) whose label is a response token; a position repeats where sequences share it
    labels_R: Tensor  # int64, the label of each row
    sequence_R: Tensor  # int64 in [0, G), the sequence of each label
    token_R: Tensor  # int64, index of each label in the flat _N tensors of the TrainBatch (old log-probs and so on)
    position_R: Tensor  # int64, index of each label in its response, from 0
    # int64 in [0, chunks), the part of the sequence that holds the row: the zigzag chunk; a shared prompt counts as one part
    chunk_R: Tensor
    chunks: int  # parts per sequence
    lengths_G: Tensor  # |y| of each sequence over all context-parallel ranks, at least 1
    sequences_G: Tensor  # int64, index of each sequence in the TrainBatch
    # Offset of each piece in its sequence. A piece with an offset above 0 continues that many tokens of the last piece before
    # it that starts at 0. None: all pieces start at 0.
    starts: tuple[int, ...] | None = None
    # Integers, the experts to route each token to; arbitrary for padding and for tokens without known experts. None: the
    # routers choose.
    experts_SKT: Tensor | None = None


@dataclass(frozen=True)
class TokenStats:
    """Log-prob of the label and entropy of the distribution, for each response row.

    The distribution is over the row's sampling mask, or over the whole vocabulary without one.
    """

    # logprob_R, entropy_R: fp32 (fp64 if the logits are) nats, under the sampling temperature; differentiable
    logprob_R: Tensor
    entropy_R: Tensor
    recomputed: RecomputedMasks | None = None  # sampling masks recomputed from the logits. None: not asked for.
    # The same as `logprob_R`, KL(this distribution || the teacher's). None: there is no teacher.
    teacher_kl_R: Tensor | None = None


@dataclass(frozen=True)
class Denominators:
    """Counts over the whole minibatch (all ranks and microbatches), fixed before any backward; fp32 scalars on the device."""

    tokens: Tensor
    sequences: Tensor  # sampled sequences G of the minibatch
    prompts: Tensor
    max_response_tokens: Tensor  # limit of the length of a response, `rollout.max_response_tokens`


@dataclass(frozen=True)
class LossOutput:
    """The loss of one microbatch on this rank, with its metrics."""

    loss: Tensor  # scalar, this rank's part of the objective; the parts of all ranks and microbatches add up to it
    metrics: dict[str, tuple[Tensor, Tensor]]  # name -> (numerator, denominator), detached
    histograms: dict[str, Tensor]  # name -> int64 counts, to be summed over ranks and microbatches
    ratio_R: Tensor  # importance ratio of each row, detached
    rows: dict[str, Tensor]  # name -> value of each row, detached: the terms of the loss (`losses.diagnostics.rows`)


@dataclass(frozen=True)
class TrainBatch:
    """Graded rollouts with advantages. Every rank holds the whole batch; the sequences of one prompt are contiguous."""

    rollouts: tuple[Rollout, ...]
    advantages_B: Tensor  # fp32
    # fp32 nats under the actor's weights at the start of the rollout batch, valid on the last pipeline stage; or the engine's
    # log-probs (training.old_logprobs=rollout). None: no old pass; the current ones are used.
    old_logprobs_N: Tensor | None = None
    # fp32 nats under the same weights, valid on the last pipeline stage. None: no old pass.
    old_entropies_N: Tensor | None = None
    # fp32 nats under the reference policy, valid on the last pipeline stage. None: no reference.
    ref_logprobs_N: Tensor | None = None
    update: int = 0  # number of optimizer steps already taken on this rollout batch
    # int64, index of each sequence in the rollout batch, which random choices are keyed by. None: its index here.
    ids_B: Tensor | None = None
    # Sampling masks of the response tokens that the actor recomputed, on the last pipeline stage. None: the rollouts have those
    # of the engine, or sampling was not truncated.
    recomputed_mask: SamplingMask | None = None

    @classmethod
    def build(cls, rollouts: Sequence[Rollout], advantages_B: Tensor) -> "TrainBatch":
        """Return a batch without old statistics.

        `advantages_B`: fp32. Raises ValueError unless there is one advantage per rollout.
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
        return [r.prompt_length for r in self.rollouts]

    @cached_property
    def prompt_ids(self) -> list[int]:
        """Return one number per sequence, equal for equal prompts: same tokens and, if known, same experts."""
        numbers: dict[tuple[bytes, bytes], int] = {}
        out = []
        for rollout, length in zip(self.rollouts, self.prompt_lengths, strict=True):
            experts = rollout.prompt_experts
            if rollout.experts_LKT is not None and not experts:
                experts = rollout.experts_LKT[:length].numpy().tobytes()
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
        """Return each sequence's experts, [L, K, T]. Raise ValueError naming the prompt of a rollout without them."""
        chosen = [r.experts_LKT for r in self.rollouts if r.experts_LKT is not None]
        if len(chosen) < len(self):
            prompt = next(r.prompt_id for r in self.rollouts if r.experts_LKT is None)
            raise ValueError(f"rollout.replay_experts=true, and a rollout of prompt {prompt} has none to replay")
        return chosen

    def sequence_N(self, device: torch.device) -> Tensor:
        """Return the sequence of each response token, int64 in [0, B), made on `device`."""
        lengths_B = torch.tensor(self.response_lengths, dtype=torch.int64, device=device)
        return torch.arange(len(self), device=device).repeat_interleave(lengths_B, output_size=self.num_tokens)

    def token_keys_N(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the sequence id and the position in the response of each token, independent of the sequence order.

        Both are int64 [N], made on `device`: the host holds nothing per token.
        """
        sequence_N = self.sequence_N(device)
        first_B = torch.tensor(self.first_tokens, dtype=torch.int64, device=device)
        position_N = torch.arange(self.num_tokens, device=device).sub_(first_B[sequence_N])
        return sequence_N if self.ids_B is None else self.ids_B.to(device)[sequence_N], position_N

    def select(self, indices: Sequence[int], update: int) -> "TrainBatch":
        """Return a batch of some sequences, with their old and reference statistics."""

        def pick(x_N: Tensor | None) -> Tensor | None:
            if x_N is None:
                return None
            parts = x_N.split(self.response_lengths)
            return torch.cat([parts[i] for i in indices])

        masks = None if self.recomputed_mask is None else self.recomputed_mask.split(self.response_lengths)
        return TrainBatch(
            tuple(self.rollouts[i] for i in indices),
            self.advantages_B[list(indices)],
            pick(self.old_logprobs_N),
            pick(self.old_entropies_N),
            pick(self.ref_logprobs_N),
            update,
            (torch.arange(len(self)) if self.ids_B is None else self.ids_B)[list(indices)],
            None if masks is None else SamplingMask.cat([masks[i] for i in indices]),
        )

    def with_old_stats(self, stats_N: TokenStats) -> "TrainBatch":
        """Return the same batch with these statistics as the old ones."""
        return dataclasses.replace(self, old_logprobs_N=stats_N.logprob_R, old_entropies_N=stats_N.entropy_R)

    def updates(self, epochs: int, minibatch_prompts: int) -> int:
        """Return the number of minibatches that `epochs` yields for the same arguments."""
        return epochs * -(-len({r.prompt_id for r in self.rollouts}) // minibatch_prompts)

    def epochs(self, epochs: int, minibatch_prompts: int, seed: int, made: int = 0, update: int = 0) -> "Iterator[TrainBatch]":
        """Yield minibatches of whole groups, as equal in size as possible, reshuffled every epoch."""
        groups = [list(g) for _, g in itertools.groupby(range(len(self)), key=lambda i: self.rollouts[i].prompt_id)]
        each = -(-len(groups) // minibatch_prompts)
        orders = minibatch_orders(len(groups), minibatch_prompts, epochs, seed)
        for number, chosen in enumerate(itertools.islice(orders, made * each, None), update):
            yield self.select([i for g in chosen for i in groups[g]], number)


def minibatch_orders(groups: int, minibatch_prompts: int, epochs: int, seed: int) -> Iterator[list[int]]:
    """Yield the indices of the groups of each minibatch, in the order in which the minibatches are trained on."""
    parts = -(-groups // minibatch_prompts)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(groups, generator=generator).tolist()
        for part in range(parts):
            yield order[part * groups // parts : (part + 1) * groups // parts]


def join_minibatches(parts: Sequence[TrainBatch]) -> TrainBatch:
    """Return the rollout batch of minibatches that divide it, in the order of their `ids_B`. Its `update` is 0."""

    def joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
        known = [x for x in tensors if x is not None]
        return torch.cat(known) if len(known) == len(parts) else None

    masks = [part.recomputed_mask for part in parts if part.recomputed_mask is not None]
    batch = TrainBatch(
        tuple(rollout for part in parts for rollout in part.rollouts),
        torch.cat([part.advantages_B for part in parts]),
        joined([part.old_logprobs_N for part in parts]),
        joined([part.old_entropies_N for part in parts]),
        joined([part.ref_logprobs_N for part in parts]),
        ids_B=joined([part.ids_B for part in parts]),
        recomputed_mask=SamplingMask.cat(masks) if masks and len(masks) == len(parts) else None,
    )
    return batch if batch.ids_B is None else batch.select(batch.ids_B.argsort().tolist(), update=0)
