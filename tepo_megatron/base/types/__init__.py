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

from tepo_megatron.base.limits import MASK_TIES, MOST_CANDIDATES, MOST_MASKED
from tepo_megatron.base.types.batch import Denominators, LossOutput, PackedMicrobatch, TokenStats, TrainBatch
from tepo_megatron.base.types.rollout import (
    NO_EXPERT,
    NO_TOKEN,
    STATUSES,
    Prompt,
    RecomputedMasks,
    Rollout,
    Routing,
    SamplingMask,
    SamplingParams,
    Status,
    Truncation,
    no_expert,
    split_samples,
)

__all__ = [
    "MASK_TIES", "MOST_CANDIDATES", "MOST_MASKED", "NO_EXPERT", "NO_TOKEN", "STATUSES",
    "Denominators", "LossOutput", "PackedMicrobatch", "Prompt", "RecomputedMasks", "Rollout", "Routing", "SamplingMask",
    "SamplingParams", "Status", "TokenStats", "TrainBatch", "Truncation", "no_expert", "split_samples",
]  # fmt: skip
