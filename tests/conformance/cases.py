"""The cases: ragged minibatches, their layouts, and extremes."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tepo_megatron.report.audit.reference import Formula
from tests.conformance.parts import Layout
from tests.reference.minibatches import LENGTHS, MARGIN, Batch, draw, expected

ONE = Layout((((*range(10),),),))
EQUAL = Layout((((0, 1), (2, 3), (4, 5), (6, 7), (8, 9)),))  # the fifth sequence has no response token
UNEQUAL = Layout((((0, 1, 2, 3, 4, 5), (6, 7, 8), (9,)),))
EMPTY = Layout((((4,), (0, 1, 2), (3, 5, 6, 7, 8, 9)),))
RANKS = Layout((((0, 2, 4, 6, 8),), ((1, 3, 5, 7, 9),)))
BOTH = Layout((((0, 2), (4, 6, 8)), ((1, 3, 5), (7, 9))))
CONTEXT = Layout((((*range(10),),),), halves=2)
_TRIES = 400


def _as_drawn(batch: Batch) -> Batch:
    return batch


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        layout: Distribution of the sequences over ranks and microbatches.
        lengths: Response tokens of each sequence; as many sequences as the layout distributes.
        extreme: Set a third of the log-ratios to any other policy to +-60 nats.
        change: Modification of the minibatch after it was drawn.
        skip: Number of suitable minibatches to skip, because other cases use them.
        padding: Value of log-probs and entropies outside the mask.
        tolerance: Bound on the errors of loss (relative to its magnitude, at least 1) and gradients (2-norm). None: they must
            only be finite.
        usually: Usual cause if this case alone fails.
    """

    name: str
    usually: str
    layout: Layout = ONE
    lengths: tuple[int, ...] = LENGTHS
    extreme: bool = False
    change: Callable[[Batch], Batch] = _as_drawn
    skip: int = 0
    padding: float = 0.0
    dtype: torch.dtype = torch.float64
    tolerance: float | None = 1e-6

    @property
    def splits_sequences(self) -> bool:
        """True if the tokens of a sequence are distributed over several parts."""
        return self.layout.halves > 1

    def draw(self, method: Formula) -> Batch:
        """Return the first minibatch, by seed, in which no number that a condition compares is close to its threshold."""
        tiny = self.dtype == torch.float64 and not self.extreme
        if self.tolerance is None:
            return self.change(draw(0, self.lengths, extreme=self.extreme, tiny=tiny))
        return _draw(method, self.lengths, self.extreme, tiny, self.change, self.skip)


@functools.lru_cache(maxsize=64)
def _draw(
    method: Formula, lengths: tuple[int, ...], extreme: bool, tiny: bool, change: Callable[[Batch], Batch], skip: int
) -> Batch:
    for seed in range(_TRIES):
        batch = change(draw(seed, lengths, extreme=extreme, tiny=tiny))
        if expected(method, batch)[0].margin >= MARGIN:
            if not skip:
                return batch
            skip -= 1
    raise AssertionError(f"no minibatch of {_TRIES} keeps clear of the thresholds of {method}")


def _equal_rewards(batch: Batch) -> Batch:
    return replace(batch, responses=[replace(r, advantage=0.0) for r in batch.responses])


def _first_update(batch: Batch) -> Batch:
    """The old policy is the current one."""
    lengths = [len(r.old) for r in batch.responses]
    rows = zip(batch.responses, batch.logprob.split(lengths), batch.entropy.split(lengths), strict=True)
    return replace(batch, responses=[replace(r, old=x.tolist(), old_entropy=h.tolist()) for r, x, h in rows])


def _beyond_fp32(batch: Batch) -> Batch:
    """Set every fourth token's log-ratio to +-100 nats, whose exponential overflows or underflows in fp32."""
    lengths = [len(r.old) for r in batch.responses]
    down, old_down = torch.zeros_like(batch.logprob), torch.zeros_like(batch.logprob)
    down[::8], old_down[4::8] = 100.0, 100.0
    old = (batch.flat("old") - old_down).split(lengths)
    responses = [replace(r, old=x.tolist()) for r, x in zip(batch.responses, old, strict=True)]
    return replace(batch, responses=responses, logprob=batch.logprob - down)


def _layout(sequences: int) -> Layout:
    return Layout(((tuple(range(sequences)),),))


CASES = (
    Case("whole", "the formula itself"),
    Case("whole, again", "the formula itself, where the first minibatch does not tell", skip=1),
    Case("whole, once more", "the formula itself, where the others do not tell", skip=2),
    Case("first update", "a ratio of exactly 1 has no gradient, or clipping compares with >= for >", change=_first_update),
    Case("fp32", "numbers are rounded or cast on the way (a sum in low precision)", dtype=torch.float32, tolerance=1e-5),
    Case("equal microbatches", "a mean over a microbatch's tokens in the place of the minibatch's", EQUAL),
    Case("unequal microbatches", "a mean over each microbatch, averaged: small microbatches count too much", UNEQUAL),
    Case("a microbatch without tokens", "0 / 0: a mean over the tokens of a part that has none", EMPTY),
    Case("2 ranks", "denominators of one rank, or averages over ranks that are not undone", RANKS),
    Case("2 ranks, 2 microbatches", "ranks and microbatches are taken for each other", BOTH),
    Case("split sequences", "|y|, or a sum over a sequence, of the tokens of one rank", CONTEXT),
    Case("one-token responses", "|y| is off by one (nothing else shows as much here)", _layout(6), (1, 1, 1, 1, 1, 1)),
    Case("empty responses", "sequences without tokens: counted where they are not, or 0 / 0", _layout(6), (0, 5, 0, 8, 3, 0)),
    Case("no response token at all", "0 / 0 where a minibatch has no tokens", _layout(3), (0, 0, 0)),
    Case("equal rewards", "advantages of 0 divide something, or a penalty lost its gradient", change=_equal_rewards),
    Case("huge ratios", "log-ratios are clamped elsewhere (log_ratio_limit), or exp overflows into 0 * inf", extreme=True),
    Case("ratios beyond fp32", "exp overflows: clamp the log-ratio before it", change=_beyond_fp32, dtype=torch.float32,
         tolerance=None),
    Case("padding holds other numbers", "the mask is missing from a sum or a mean", padding=-3.0),
    Case("padding holds nan", "masked by multiplication: nan * 0 = nan; take torch.where, or fill the padding before",
         padding=float("nan")),
)  # fmt: skip
