"""output_layer_stats against the whole logits in fp64: values, gradients, what is kept and what is computed again."""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tepo_megatron.ops import output_layer
from tepo_megatron.ops.vocab_parallel import token_stats
from tests.parallel.test_statistics import counting
from tests.token_statistics import reference
from tests.worlds import run_world

TOKENS, VOCAB, PADDED, HIDDEN, TEMPERATURE = 48, 70, 80, 16, 0.8
ROWS = torch.tensor([1, 2, 3, 9, 10, 11, 12, 20, 21, 30, 31, 32, 33, 34, 46, 47, 5])  # response rows; not all, in any order
CHUNK = 5
ALL, SOME = 10**9, 2 * CHUNK * PADDED  # bytes


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden [TOKENS, HIDDEN], weight [PADDED, HIDDEN], labels and input tokens."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(PADDED, HIDDEN, generator=generator).to(dtype)
    labels = torch.randint(0, VOCAB, ROWS.shape, generator=generator)
    return hidden, weight, labels, torch.randint(0, VOCAB, (TOKENS,), generator=generator)


def loss_of(logprob: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    factor = torch.linspace(-1, 2, ROWS.numel()).to(logprob)
    return (logprob * factor).sum() - 0.5 * (entropy.square() * factor.flip(0)).sum()


def expected(dtype: torch.dtype, tied: bool = False) -> list[torch.Tensor]:
    """[log-prob, entropy, gradient of hidden, of the weight] in fp64 of the same inputs."""
    hidden, weight, labels, tokens = inputs(dtype)
    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    states = h + w[tokens] if tied else h
    logprob, entropy = reference((states @ w.t())[ROWS], labels, TEMPERATURE, VOCAB)
    loss_of(logprob, entropy).backward()
    assert h.grad is not None and w.grad is not None
    return [logprob.detach(), entropy.detach(), h.grad, w.grad]


def on_rank(
    rank: int, size: int, dtype: torch.dtype, parallel: str, ways: Sequence[tuple[int, bool]]
) -> dict[tuple[int, bool], dict[str, Any]]:
    """Compute each way in a forked rank. A way is a budget for logits in bytes and whether the weight has a main_grad."""
    from megatron.core import parallel_state

    from tepo_megatron.dist.platform import activate

    activate("cpu")
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    return {way: one_way(rank, size, dtype, parallel, *way) for way in ways}


def one_way(rank: int, size: int, dtype: torch.dtype, parallel: str, budget: int, main_grad: bool) -> dict[str, Any]:
    from megatron.core import tensor_parallel

    hidden, weight, labels, _ = inputs(dtype)
    sequence_parallel = parallel == "sequence"
    h = (hidden.chunk(size)[rank] if sequence_parallel else hidden).clone().requires_grad_()
    w = weight.chunk(size)[rank].clone().requires_grad_()
    if main_grad:
        w.main_grad = torch.full(w.shape, 0.25)
    states = (
        tensor_parallel.gather_from_sequence_parallel_region(h, tensor_parallel_output_grad=True) if sequence_parallel else h
    )
    counts: Counter = Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_layer, "CHUNK_ROWS", CHUNK)
        patch.setattr(output_layer, "CHUNK_COLUMNS", 7)
        stats = output_layer.output_layer_stats(
            states[ROWS], w, labels, TEMPERATURE, dist.group.WORLD, VOCAB,
            logits_budget=budget, sum_hidden_gradient=not sequence_parallel,
        )  # fmt: skip
        counting(counts, patch)
        loss_of(stats.logprob_R, stats.entropy_R).backward()
    weight_grad = w.main_grad - 0.25 if main_grad else w.grad
    assert not main_grad or w.grad is None
    return {
        "values": [stats.logprob_R.detach(), stats.entropy_R.detach(), h.grad, weight_grad],
        "backward": sum(counts.values()),
    }


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b).norm() / b.norm()).item()


@pytest.fixture(scope="module")
def every_way() -> Callable[[int, str], list[dict[tuple[int, bool], dict[str, Any]]]]:
    """Return the results of each way on the ranks of a world; one world for all ways."""

    @functools.cache
    def run(size: int, parallel: str) -> list[Any]:
        ways = tuple(itertools.product((0, SOME, ALL), (False, True)))
        return run_world(size, on_rank, size, torch.float32, parallel, ways)

    return run


@pytest.mark.parametrize("main_grad", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("budget", [0, SOME, ALL], ids=["none kept", "some kept", "all kept"])
@pytest.mark.parametrize(("size", "parallel"), [(1, "tensor"), (2, "tensor"), (2, "sequence"), (4, "sequence")])
def test_fp32_equals_the_whole_logits_in_fp64(
    every_way: Callable[[int, str], Any], size: int, parallel: str, budget: int, main_grad: bool
) -> None:
    ranks = [ways[budget, main_grad] for ways in every_way(size, parallel)]
    logprob, entropy, grad_hidden, grad_weight = expected(torch.float32)
    for r in ranks:
        assert torch.equal(r["values"][0], ranks[0]["values"][0]) and torch.equal(r["values"][1], ranks[0]["values"][1])
        assert r["backward"] == (1 if size > 1 and parallel == "tensor" else 0)  # Megatron's reduce-scatter is not counted
    assert relative(ranks[0]["values"][0], logprob) <= 2e-6 and relative(ranks[0]["values"][1], entropy) <= 2e-6
    ours = torch.cat([r["values"][2] for r in ranks]) if parallel == "sequence" else ranks[0]["values"][2]
    assert relative(ours, grad_hidden) <= 1e-5
    assert relative(torch.cat([r["values"][3] for r in ranks]), grad_weight) <= 1e-5


@pytest.mark.parametrize("budget", [0, ALL], ids=["none kept", "all kept"])
def test_bf16_weight_gradient_is_summed_in_fp32(budget: int) -> None:
    """Exactly the bf16 gradients of bf16 logits, multiplied by the hidden states and added without rounding to bf16."""
    logprob, _, _, grad_weight = run_world(1, on_rank, 1, torch.bfloat16, "tensor", [(budget, True)])[0][budget, True]["values"]
    hidden, weight, labels, _ = inputs(torch.bfloat16)
    logits = torch.cat([h @ weight.t() for h in hidden[ROWS].split(CHUNK)]).requires_grad_()
    stats = token_stats(logits, labels, TEMPERATURE, None, VOCAB)
    loss_of(stats.logprob_R, stats.entropy_R).backward()
    assert grad_weight.dtype == torch.float32 and torch.equal(logprob, stats.logprob_R)
    assert relative(grad_weight, logits.grad.double().t() @ hidden[ROWS].double()) <= 1e-6
