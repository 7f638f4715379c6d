"""Every row of the table, and combinations of parts: one loss and one gradient, however the tokens are laid out.

The loss alone, without a model: its leaves are the flat log-probs and entropies of all N response tokens, which the product's
own packing deals to context-parallel ranks, data-parallel ranks and microbatches.
"""

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.base.types import PackedMicrobatch, TokenStats
from tepo_megatron.losses import OBJECTIVES, Objective
from tepo_megatron.losses.contradictions import TRUST_REGIONS
from tepo_megatron.losses.objective import LossInputs
from tepo_megatron.losses.weighting import TokenWeights
from tepo_megatron.ops.alignment import Alignment
from tepo_megatron.ops.context_parallel import Segments
from tepo_megatron.ops.packing import PrefixGroups, pack
from tepo_megatron.ops.planning import plan_microbatches
from tests.objective_cases import MARGIN, Batch, draw, expected, inputs_of, method_of, replaced
from tests.worlds import run_world

pytestmark = pytest.mark.slow
RANKS, TOLERANCE = 4, 1e-5
RESPONSES = (14, 1, 25, 9, 0, 30, 1, 17, 4, 22, 11, 2)  # |y|; prompts of 3 to 8 tokens
# coefficients and shares at which no part drowns in another
LARGER = {"beta": 0.5, "entropy_coefficient": 0.1, "advantage_alpha": 0.4}


def objectives() -> dict[str, Objective]:
    """The rows with larger coefficients, and parts that no row combines."""
    out = {}
    for name, row in OBJECTIVES.items():
        parts: dict[str, Any] = {k: math.copysign(v, getattr(row, k)) for k, v in LARGER.items() if getattr(row, k)}
        if row.weighting.type != "none":
            parts |= {"cov_share": 0.2, "cov_low": 0.3, "steer_lambda_min": 0.5}
        if row.surrogate in TRUST_REGIONS:
            parts["max_divergence"] = row.max_divergence / 2
        out[name] = replaced(row, **parts)
    tepo, grpo, prefix = out["tepo"], out["grpo"], out["prefix_is"]
    return out | {
        "grpo, tis": replaced(grpo, correction="tis"),
        "grpo, icepop, reference": replaced(grpo, correction="icepop", ref_beta=0.3),
        "tepo, tis": replaced(tepo, correction="tis"),
        "tepo, mis": replaced(tepo, correction="geometric_mask", correction_low=0.8, correction_high=1.3),
        "tepo, sequence_mis": replaced(tepo, correction="sequence_mis"),
        "tepo, steer": replaced(tepo, weighting="steer", steer_lambda_min=0.5),
        "tepo, clip_cov": replaced(tepo, weighting="clip_cov", cov_share=0.2, cov_low=0.3),
        "tepo_alg1, kl_cov": replaced(out["tepo_alg1"], weighting="kl_cov", cov_share=0.2),
        "tepo, entropy advantage": replaced(tepo, advantage_alpha=0.4),
        "prefix, mis, sequence mean": replaced(
            prefix, correction="geometric_mask", correction_low=0.8, aggregate="sequence_mean_token_mean"
        ),
        "prefix, icepop, KL": replaced(prefix, correction="icepop", kl_mask="both", beta=0.5),
        "prefix, steer": replaced(prefix, weighting="steer", steer_lambda_min=0.5),
        "tepo, prompt mean": replaced(tepo, aggregate="prompt_mean_token_mean"),
        "gmpo, tis": replaced(out["gmpo"], correction="tis"),
        "prefix, clip_tokens": replaced(prefix, surrogate="clip_tokens"),
        "prefix, soft_gate": replaced(prefix, surrogate="soft_gate"),
        "prefix, eq4": replaced(prefix, surrogate="clip_eq4"),
        "prefix, unclipped, kl_cov": replaced(prefix, surrogate="unclipped", weighting="kl_cov", cov_share=0.2),
    }


@dataclass(frozen=True)
class Layout:
    """A layout of the minibatch.

    Attributes:
        microbatches: Number of microbatches on each data-parallel rank, a multiple of `multiple`; the last ones may be empty.
        order: Seed of the order in which the sequences are packed.
    """

    cp: int
    dp: int
    max_tokens: int
    microbatches: int
    order: int
    multiple: int = 1
    shared: bool = False


ALONE = Layout(1, 1, 400, 1, 0)
LAYOUTS = {
    "4 microbatches": Layout(1, 1, 60, 4, 1),
    "DP2": Layout(1, 2, 200, 1, 2),
    "DP2, 3 microbatches": Layout(1, 2, 45, 3, 3),
    "CP2": Layout(2, 1, 400, 1, 4),
    "CP2, 3 microbatches": Layout(2, 1, 90, 3, 5),
    "CP2 DP2": Layout(2, 2, 200, 1, 6),
    "CP2 DP2, 4 microbatches": Layout(2, 2, 60, 4, 7, multiple=4),
    "CP4": Layout(4, 1, 400, 1, 8),
    "CP4, 4 microbatches": Layout(4, 1, 80, 4, 9),
    "shared": Layout(1, 1, 400, 1, 10, shared=True),
    "CP2, shared": Layout(2, 1, 400, 1, 11, shared=True),
    "CP4, 2 microbatches, shared": Layout(4, 1, 160, 2, 13, shared=True),
}


class Laid:
    """The minibatch as flat fp32 tensors and as token sequences to be packed; the fourth response was written in two turns."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.masks = [torch.arange(3 + (5 * i) % 6 + n) >= 3 + (5 * i) % 6 for i, n in enumerate(RESPONSES)]
        prompts = [int(m.int().argmax()) if n else m.numel() for m, n in zip(self.masks, RESPONSES, strict=True)]
        self.prefix_groups = PrefixGroups.of(prompts, prompts, 1, 0)
        self.masks[3] = torch.cat([self.masks[3][:9], torch.zeros(4, dtype=torch.bool), self.masks[3][9:]])
        assert int(self.masks[3].int().diff().abs().sum()) == 3
        self.ids = [torch.arange(m.numel()) + 1 for m in self.masks]
        self.first = [sum(RESPONSES[:i]) for i in range(len(RESPONSES))]
        self.inputs_N = inputs_of(batch, torch.float32)

    def inputs(self, token_R: Tensor, segments: Segments, weights: TokenWeights | None) -> LossInputs:
        """Return the inputs of the loss for the rows of the tokens `token_R` of the flat tensors."""
        rows = {name: x[token_R] for name, x in vars(self.inputs_N).items() if name.endswith("_R") and x is not None}
        return dataclasses.replace(self.inputs_N, **rows, segments=segments, weights=weights)

    def microbatches(self, layout: Layout, rank: int) -> list[PackedMicrobatch]:
        """Return this rank's part of the minibatch."""
        order = torch.randperm(len(RESPONSES), generator=torch.Generator().manual_seed(layout.order)).tolist()
        lengths, alignment = [self.ids[i].numel() for i in order], Alignment(cp=layout.cp)
        plan = plan_microbatches(lengths, layout.dp, layout.max_tokens, alignment, layout.multiple)
        assert len(plan[0]) == layout.microbatches, f"{layout} gives {len(plan[0])} microbatches"
        dp_rank, cp_rank = divmod(rank, layout.cp)
        prefix_groups = self.prefix_groups if layout.shared else None
        packed = [
            pack(self.ids, self.masks, self.first, [order[i] for i in indices], alignment, cp_rank, prefix_groups=prefix_groups)
            for indices in plan[dp_rank]
        ]
        assert any(m.starts is not None for m in packed) == layout.shared
        return packed


def backward(laid: Laid, objective: Objective, packed: list[PackedMicrobatch], group: Any) -> tuple[Tensor, Counter, Counter]:
    """Return this rank's part of [loss, d logprob_N, d entropy_N], and the collectives of forward and backward."""
    logprob_N = laid.batch.logprob.float().requires_grad_()
    entropy_N = laid.batch.entropy.float().requires_grad_()
    statistics = None
    if objective.needs_batch_statistics:
        statistics = objective.batch_statistics(TokenStats(logprob_N, entropy_N), laid.inputs_N, laid.batch.keys)
    total = torch.zeros(())
    counts: tuple[Counter, Counter] = (Counter(), Counter())
    for m in packed:
        weights = None if statistics is None else statistics.rows(m.token_R)
        inputs = laid.inputs(m.token_R, Segments.of(m, group), weights)
        with counted(counts[0]):
            out = objective(TokenStats(logprob_N[m.token_R], entropy_N[m.token_R]), inputs)
        with counted(counts[1]):
            out.loss.backward()
        total += out.loss.detach()
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in (logprob_N, entropy_N)]
    return torch.cat([total[None], *grads]), *counts


@contextlib.contextmanager
def counted(counts: Counter) -> Iterator[None]:
    real = dist.all_reduce

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        counts["all_reduce"] += 1
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", wrapper)
        yield


def every_layout(rank: int, batch: Batch) -> dict[str, Any]:
    """{layout: {objective: ([loss, gradients] over all ranks, collectives in forward, in backward)}}."""
    dist.init_process_group("gloo")
    groups = {1: None}
    for cp in (2, 4):
        for start in range(0, RANKS, cp):
            group = dist.new_group(list(range(start, start + cp)))
            if start <= rank < start + cp:
                groups[cp] = group
    laid, out = Laid(batch), {}
    for name, layout in ({"alone": ALONE} | LAYOUTS).items():
        has_part = rank < layout.dp * layout.cp
        packed = laid.microbatches(layout, rank) if has_part else []
        parts = {o: backward(laid, objective, packed, groups[layout.cp]) for o, objective in objectives().items()}
        whole = torch.stack([part for part, _, _ in parts.values()])
        dist.all_reduce(whole)  # a rank without a part has added zeros
        out[name] = {o: (row, *parts[o][1:]) for o, row in zip(parts, whole, strict=True)}
    return out


@pytest.fixture(scope="module")
def batch() -> Batch:
    """A batch in which no number is near a threshold of any of the objectives."""
    for seed in range(100):
        batch = draw(seed, RESPONSES)
        if all(expected(method_of(o), batch)[0].margin >= MARGIN for o in objectives().values()):
            return batch
    raise AssertionError("every batch has a number near a threshold")


@pytest.fixture(scope="module")
def results(batch: Batch) -> dict[str, Any]:
    return run_world(RANKS, every_layout, batch)[0]


def compare(a: Tensor, b: Tensor, what: str) -> None:
    """Loss, and each gradient by 2-norm."""
    n = (len(b) - 1) // 2
    assert abs(a[0] - b[0]) <= TOLERANCE * max(1.0, abs(b[0])), f"{what}: loss {a[0]} instead of {b[0]}"
    for part, x, y in (("d logprob", a[1 : n + 1], b[1 : n + 1]), ("d entropy", a[n + 1 :], b[n + 1 :])):
        assert (x.double() - y.double()).norm() <= TOLERANCE * y.double().norm(), f"{what}: {part}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_on_every_layout(results: dict[str, Any], layout: str) -> None:
    for name, (row, _, _) in results[layout].items():
        compare(row, results["alone"][name][0], f"{name} on {layout}")


COLLECTIVES = {  # all-reduces of one microbatch over context-parallel ranks: forward, backward
    "grpo": (0, 0),
    "reinforce": (0, 0),
    "kl_cov": (0, 0),
    "tepo": (1, 0),
    "gspo": (1, 0),
    "gmpo": (1, 0),
    "gmpo, tis": (1, 1),
    "sapo": (0, 0),
    "dppo": (0, 0),
    "tepo, mis": (2, 0),
    "tepo, tis": (1, 1),
    "tepo, steer": (1, 1),
    "tepo, entropy advantage": (1, 1),
    "prefix_is": (1, 1),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_of_a_microbatch(results: dict[str, Any], name: str) -> None:
    _, forward, backward = results["CP2"][name]
    assert (forward["all_reduce"], backward["all_reduce"]) == COLLECTIVES[name]
    _, forward, backward = results["4 microbatches"][name]
    assert forward.total() + backward.total() == 0
