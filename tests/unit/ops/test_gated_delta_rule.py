"""The operators of linear attention against transformers, one sequence at a time, in fp64: values, gradients, borders."""

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

from tepo_megatron.actor.linear_attention import packed_convolution, positions
from tepo_megatron.ops.gated_delta_rule import SequenceChunks, gated_delta_rule, normalize
from tests.reference.hybrid import widen

TOLERANCE = 1e-10
HEADS, K, V, WIDTH = 3, 8, 5, 4
LENGTHS = ([0], [1], [63], [64], [65], [1000], [1, 1, 1], [5, 0, 9], [65, 1, 0, 63, 130], [3, 200, 1, 64, 2, 128, 17, 65, 1])
CPU = torch.device("cpu")

widen()


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """Return queries, keys, values, log decays and strengths; some heads forget at once, some nearly nothing."""
    total = sum(lengths)
    q, k, v = drawn(total, HEADS, K, seed=1), drawn(total, HEADS, K, seed=2), drawn(total, HEADS, V, seed=3)
    decay = -F.softplus(drawn(total, HEADS, seed=4)) * torch.tensor([1e-3, 0.3, 20.0])
    return tuple(x.requires_grad_() for x in (q, k, v, decay, drawn(total, HEADS, seed=5).sigmoid()))


def ours(lengths: Sequence[int], size: int = 64) -> Callable[..., Tensor]:
    chunks = SequenceChunks.of(lengths, CPU, size)
    return lambda q, k, v, g, beta: gated_delta_rule(normalize(q), normalize(k), v, g, beta, chunks)


def theirs(lengths: Sequence[int]) -> Callable[..., Tensor]:
    def rule(*tensors: Tensor) -> Tensor:
        parts = [
            modeling.torch_chunk_gated_delta_rule(*(x[None] for x in one), use_qk_l2norm_in_kernel=True)[0][0]
            for one in zip(*(x.split(list(lengths)) for x in tensors), strict=True)
            if one[0].size(0)
        ]
        return torch.cat(parts) if parts else tensors[2]

    return rule


def definition(lengths: Sequence[int]) -> Callable[..., Tensor]:
    """Return the rule token by token, from its formula."""

    def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        q, k, out = normalize(q) * K**-0.5, normalize(k), []
        for start, end in itertools.pairwise([0, *itertools.accumulate(lengths)]):
            state = v.new_zeros(HEADS, K, V)
            for t in range(start, end):
                state = state * g[t].exp()[:, None, None]
                change = (v[t] - torch.einsum("hkv,hk->hv", state, k[t])) * beta[t, :, None]
                state = state + torch.einsum("hk,hv->hkv", k[t], change)
                out.append(torch.einsum("hkv,hk->hv", state, q[t]))
        return torch.stack(out) if out else v

    return rule


def check_same(found: Callable[..., Tensor], expected: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> None:
    """Assert that values and gradients agree, relative to the largest of each tensor."""
    pairs, weight = [], None
    for rule in (found, expected):
        out = rule(*tensors)
        weight = drawn(*out.shape, seed=9) if weight is None else weight
        pairs.append((out, *torch.autograd.grad((out * weight).sum(), tensors, allow_unused=True)))
    for a, b in zip(*pairs, strict=True):
        a, b = (torch.zeros(1, dtype=torch.float64) if x is None or not x.numel() else x for x in (a, b))
        assert a.shape == b.shape
        assert (a - b).abs().max() <= TOLERANCE * max(b.abs().max().item(), 1e-30)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_rule_is_that_of_transformers(lengths: list[int]) -> None:
    check_same(ours(lengths), theirs(lengths), inputs(lengths))


@pytest.mark.parametrize("size", [1, 16, 64])
def test_the_rule_is_its_definition(size: int) -> None:
    lengths = [3, 70, 1, 0, 33]
    check_same(ours(lengths, size), definition(lengths), inputs(lengths))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_convolution_is_that_of_transformers(lengths: list[int]) -> None:
    def expected(x: Tensor, weight: Tensor) -> Tensor:
        parts = [
            F.silu(F.conv1d(F.pad(one.T[None], (WIDTH - 1, 0)), weight[:, None], groups=6))[0].T
            for one in x.split(lengths)
            if one.size(0)
        ]
        return torch.cat(parts) if parts else x * weight[:, 0]

    place = positions(lengths, CPU)
    assert place.tolist() == [t for length in lengths for t in range(length)]
    tensors = (drawn(sum(lengths), 6, seed=6).requires_grad_(), drawn(6, WIDTH, seed=7).requires_grad_())
    check_same(lambda x, weight: packed_convolution(x, weight, place), expected, tensors)


@pytest.mark.parametrize("lengths", [x for x in LENGTHS if len(x) > 1], ids=str)
def test_nothing_crosses_the_border_of_two_sequences(lengths: list[int]) -> None:
    """The outputs of a sequence have a gradient of exactly 0 with respect to all inputs of the others."""
    rule, place, kernel = ours(lengths), positions(lengths, CPU), drawn(6, WIDTH, seed=7)
    x = drawn(sum(lengths), 6, seed=6).requires_grad_()
    tensors = inputs(lengths)
    convolved, out = packed_convolution(x, kernel, place), rule(*tensors)
    for start, end in itertools.pairwise([0, *itertools.accumulate(lengths)]):
        for result, of in ((convolved, (x,)), (out, tensors)):
            for gradient in torch.autograd.grad(result[start:end].sum(), of, retain_graph=True):
                assert not gradient[:start].any() and not gradient[end:].any()


def test_a_sequence_is_computed_as_if_it_were_alone() -> None:
    """Only the order of sums within a chunk may differ, where neighbours change the size of the chunks."""
    lengths, tensors = [70, 130, 5, 64], inputs([70, 130, 5, 64])
    packed = ours(lengths)(*tensors).split(lengths)
    for i, one in enumerate(zip(*(x.split(lengths) for x in tensors), strict=True)):
        chunks = SequenceChunks.of([lengths[i]], CPU)
        alone = gated_delta_rule(normalize(one[0]), normalize(one[1]), *one[2:], chunks)
        torch.testing.assert_close(packed[i], alone, rtol=1e-12, atol=1e-13)
