"""The gated delta rule over packed sequences, in PyTorch (arXiv 2412.06464, in the chunked form of arXiv 2406.06484).

Each head has a state S of [K, V], which is 0 before a sequence. Token t decays it, writes to it and reads from it:

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - (exp(g_t) S_{t-1})^T k_t))^T,    o_t = S_t^T q_t / sqrt(K)

Suffixes and dimensions: _T packed tokens; H heads, K channels of queries and keys, V channels of values; n chunks, C tokens of
a chunk. Every chunk belongs to one sequence, so nothing crosses the border of two sequences, in values or in gradients.

Everything is computed in the dtype of the inputs, which is fp32 for models.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64
# Elements of a tensor over the chunks that are computed together (4 MiB of fp32): its intermediates stay in a CPU's cache.
_BATCH_ELEMENTS = 1 << 20
_NORM_EPS = 1e-6  # of queries and keys; the published kernels and transformers have the same


def normalize(x: Tensor) -> Tensor:
    """Return x / sqrt(|x|^2 + 1e-6) over the last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _NORM_EPS)


@dataclass(frozen=True)
class SequenceChunks:
    """The chunks of packed sequences. Each sequence is divided from its own start, and its last chunk is padded.

    Chunks are ordered by rounds: round r holds the r-th chunk of every sequence that has one, longer sequences first. So the
    sequences of a round are the first ones of the round before it, and a round is one slice.
    """

    size: int
    number: int
    slot_T: Tensor  # int64, the row of each token in [n C]
    rounds: tuple[int, ...]  # number of chunks of each round

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device, size: int = CHUNK) -> "SequenceChunks":
        """Return the chunks of sequences."""
        size = max(1, min(size, 1 << max(0, max(lengths, default=1) - 1).bit_length()))
        counts = [-(-length // size) for length in lengths]
        longest_first = sorted(range(len(counts)), key=lambda i: -counts[i])
        rounds = tuple(sum(count > r for count in counts) for r in range(max(counts, default=0)))
        first = torch.tensor([0, *itertools.accumulate(rounds)])
        slots = [torch.empty(0, dtype=torch.int64)] * len(counts)
        for place, i in enumerate(longest_first):
            token = torch.arange(lengths[i])
            slots[i] = (first[token // size] + place) * size + token % size
        return cls(size, int(first[-1]), torch.cat([*slots, torch.empty(0, dtype=torch.int64)]).to(device), rounds)

    def spread(self, x_T: Tensor) -> Tensor:
        """Return the tokens in their chunks: [T, H, ...] -> [n, H, C, ...].

        Padding is 0: it does not decay the state and writes nothing.
        """
        rows = x_T.new_zeros(self.number * self.size, *x_T.shape[1:]).index_copy(0, self.slot_T, x_T)
        return rows.unflatten(0, (self.number, self.size)).transpose(1, 2)

    def collect(self, x: Tensor) -> Tensor:
        """Return the tokens in the order of packing, without padding: [n, H, C, V] -> [T, H, V]."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self.slot_T)


def gated_delta_rule(q_T: Tensor, k_T: Tensor, v_T: Tensor, g_T: Tensor, beta_T: Tensor, chunks: SequenceChunks) -> Tensor:
    """Return the output of the gated delta rule, [T, H, V].

    Within a chunk, the tokens' writes are the solution of a triangular system. A scan passes the state from one round of chunks
    to the next, for all sequences at once. Gradients: to all tensors, by autograd through the same operations.

    Args:
        q_T: Queries [T, H, K], normalized by the caller; the factor 1 / sqrt(K) is applied here.
        k_T: Keys [T, H, K], normalized by the caller.
        v_T: Values [T, H, V].
        g_T: Log of the decay [T, H], at most 0.
        beta_T: Strength of the write [T, H], between 0 and 1.
    """
    if not chunks.rounds:
        return v_T
    spread = [chunks.spread(x) for x in (q_T, k_T, v_T, g_T, beta_T)]
    chunk_elements = q_T.size(1) * chunks.size * max(q_T.size(-1), v_T.size(-1))
    batches = _batches(chunks.rounds, max(1, _BATCH_ELEMENTS // chunk_elements))
    state: Tensor | None = None
    outputs: list[Tensor] = []
    # One split per tensor, here and in `_scan`: the gradient of a slice has the size of the whole tensor, so a slice per round
    # would make backward quadratic.
    of_batches = zip(*(x.split([sum(rounds) for rounds in batches]) for x in spread), strict=True)
    for rounds, tensors in zip(batches, of_batches, strict=True):
        output, state = _scan(_within(*tensors), rounds, state)
        outputs.append(output)
    return chunks.collect(torch.cat(outputs))


def _batches(rounds: tuple[int, ...], most: int) -> list[list[int]]:
    """Return consecutive rounds in batches of at most `most` chunks, or of one round: memory that is in use stays small."""
    batches: list[list[int]] = [[]]
    for number in rounds:
        if batches[-1] and sum(batches[-1]) + number > most:
            batches.append([])
        batches[-1].append(number)
    return batches


def _within(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """Return what the scan needs of each chunk, computed within the chunk. q, k, v: [n, H, C, ...]; g, beta: [n, H, C].

    Returns:
        The values to write if the state before the chunk were 0 [n, H, C, V]; the keys by which the state changes them
        [n, H, C, K]; the weights of the chunk's own values in its outputs [n, H, C, C]; the queries with their decay from the
        start [n, H, C, K]; the keys with their decay to the end [n, H, C, K]; the decay of the whole chunk [n, H, 1, 1].
    """
    q = q * q.size(-1) ** -0.5
    total = g.cumsum(-1)  # log of the decay since the start of the chunk
    future = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool, device=q.device).triu(1)
    # masked before exp, which would overflow there, and whose gradient would be 0 * inf
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(future, -torch.inf).exp()
    written = k * beta[..., None]
    system = (written @ k.transpose(-1, -2)) * decay  # the solver takes its diagonal as 1
    wanted = torch.cat((v * beta[..., None], written * total.exp()[..., None]), dim=-1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    return (
        *solved.split((v.size(-1), k.size(-1)), dim=-1),
        (q @ k.transpose(-1, -2)) * decay,
        q * total.exp()[..., None],
        k * (total[..., -1:] - total).exp()[..., None],
        total[..., -1].exp()[..., None, None],
    )


def _scan(parts: tuple[Tensor, ...], rounds: list[int], state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the outputs of a batch of rounds [n, H, C, V], and the state behind its last round.

    `state`: the state before the batch; None: 0.
    """
    outputs: list[Tensor] = []
    for values, reads, own, q, k, decay in zip(*(x.split(rounds) for x in parts), strict=True):
        if state is None:
            outputs.append(own @ values)
            state = k.transpose(-1, -2) @ values
            continue
        state = state[: values.size(0)]
        values = values - reads @ state
        outputs.append(q @ state + own @ values)
        state = state * decay + k.transpose(-1, -2) @ values
    assert state is not None, "a batch has at least one round"
    return torch.cat(outputs), state
