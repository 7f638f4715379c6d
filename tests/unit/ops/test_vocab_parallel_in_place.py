"""token_stats overwrites the logits with their gradient: when it may, when it does not, and that misuse is loud."""

from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tepo_megatron.ops.vocab_parallel import token_stats
from tests.token_statistics import BACKENDS, reference

pytestmark = pytest.mark.filterwarnings("ignore:Profiler")
ROWS, COLUMNS = 6, 40


@pytest.fixture(params=[b for b in BACKENDS if b == "torch" or not torch.cuda.is_available()])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def source() -> tuple[torch.Tensor, torch.Tensor]:
    """A leaf from which logits are computed, and labels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64).requires_grad_()
    return x, torch.randint(0, COLUMNS, (ROWS,), generator=generator)


def loss_of(logits: torch.Tensor, labels: torch.Tensor, backend: str, keep_logits: bool = False) -> torch.Tensor:
    stats = token_stats(logits, labels, 1.0, None, backend=backend, keep_logits=keep_logits)
    return (stats.logprob_R - 0.3 * stats.entropy_R).sum()


def expected_gradient(logits_of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    x, labels = source()
    logprob, entropy = reference(logits_of(x), labels, 1.0, COLUMNS)
    (logprob - 0.3 * entropy).sum().backward()
    assert x.grad is not None
    return x.grad


def test_the_gradient_takes_the_place_of_the_logits(backend: str) -> None:
    x, labels = source()
    logits = 2 * x
    seen = []
    logits.register_hook(lambda g: seen.append((g.data_ptr(), g.clone())))
    before = logits.detach().clone()
    loss = loss_of(logits, labels, backend)
    assert torch.equal(logits, before)  # forward leaves them alone
    loss.backward()
    torch.testing.assert_close(x.grad, expected_gradient(lambda x: 2 * x))
    assert seen[0][0] == logits.data_ptr() and torch.equal(logits, seen[0][1])


@pytest.mark.parametrize(
    "view",
    [lambda x: x, lambda x: x.view(1, ROWS, COLUMNS)[0], lambda x: x.unsqueeze(0).squeeze(0), lambda x: x.view_as(x)],
    ids=["leaf", "select", "squeeze", "view_as"],
)
def test_leaves_and_their_views_are_never_overwritten(backend: str, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x, labels = source()
    before = x.detach().clone()
    loss_of(view(x), labels, backend).backward()
    assert torch.equal(x, before)
    torch.testing.assert_close(x.grad, expected_gradient(view))


def test_a_second_backward_is_refused(backend: str) -> None:
    x, labels = source()
    loss = loss_of(2 * x, labels, backend)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="pass keep_logits=True"):
        loss.backward()


def test_a_second_use_of_the_same_logits_is_refused(backend: str) -> None:
    x, labels = source()
    logits = 2 * x
    loss = loss_of(logits, labels, backend) + loss_of(logits, labels, backend)
    with pytest.raises(RuntimeError, match="pass keep_logits=True"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.slow
def test_extra_memory_is_under_a_tenth_of_the_bf16_logits(dtype: torch.dtype) -> None:
    """Every allocation of PyTorch's CPU allocator during forward and backward, temporaries of operators included."""
    rows, columns = 8192, 18992
    x = torch.randn(rows, 1).to(dtype).requires_grad_()
    logits = x * torch.randn(1, columns).to(dtype)
    labels = torch.randint(0, columns, (rows,))
    peak = []
    logits.register_hook(lambda g: peak.append(g.data_ptr()))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        stats = token_stats(logits, labels, 1.0, None)
        torch.autograd.grad((stats.logprob_R + 0.1 * stats.entropy_R).sum(), logits)
    assert peak == [logits.data_ptr()]
    extra = highest(recorded)
    assert 0 < extra <= 0.1 * 2 * rows * columns, extra / (2 * rows * columns)


def highest(recorded: profile) -> int:
    """Peak of the bytes allocated since the profile began."""
    events = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    now = most = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
