"""Inputs and outputs of one forward pass. The docstring of the package explains the layout suffixes."""

from dataclasses import dataclass

from torch import Tensor

from tepo_megatron.types.sampling_mask import RecomputedMasks


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
        experts_SKT: Integers, the experts to route each token to; arbitrary for padding and for tokens without known experts.
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


@dataclass(frozen=True)
class TokenStats:
    """Log-prob of the label and entropy of the distribution, for each response row.

    The distribution is over the row's sampling mask, or over the whole vocabulary without one.

    Attributes:
        logprob_R, entropy_R: fp32 (fp64 if the logits are) nats, under the sampling temperature; differentiable.
        recomputed: Sampling masks recomputed from the logits. None: not asked for.
        teacher_kl_R: The same as `logprob_R`, KL(this distribution || the teacher's). None: there is no teacher.
    """

    logprob_R: Tensor
    entropy_R: Tensor
    recomputed: RecomputedMasks | None = None
    teacher_kl_R: Tensor | None = None


@dataclass(frozen=True)
class Denominators:
    """Counts over the whole minibatch (all ranks and microbatches), fixed before any backward; fp32 scalars on the device.

    Attributes:
        sequences: Sampled sequences G of the minibatch.
        max_response_tokens: Limit of the length of a response, `rollout.max_response_tokens`.
    """

    tokens: Tensor
    sequences: Tensor
    prompts: Tensor
    max_response_tokens: Tensor


@dataclass(frozen=True)
class LossOutput:
    """The loss of one microbatch on this rank, with its metrics.

    Attributes:
        loss: Scalar, this rank's part of the objective; the parts of all ranks and microbatches add up to it.
        metrics: Name -> (numerator, denominator), detached.
        histograms: Name -> int64 counts, to be summed over ranks and microbatches.
        ratio_R: Importance ratio of each row, detached.
        rows: Name -> value of each row, detached: the terms of the loss (`losses.diagnostics.rows`).
    """

    loss: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]]
    histograms: dict[str, Tensor]
    ratio_R: Tensor
    rows: dict[str, Tensor]
