"""The packages' kernels of linear attention against PyTorch's operations, on a GPU that has them. Not run so far."""

import pytest
import torch
from torch import Tensor

from tepo_megatron.actor.kernels import LinearChoice
from tepo_megatron.actor.linear_attention import LinearKernels, LinearLayout
from tepo_megatron.ops.gated_delta_rule import normalize

LENGTHS = (65, 1, 63, 200, 1000)
TOLERANCE = 2e-2  # of bf16 products, relative to the largest value


def compare(found: Tensor, expected: Tensor, *inputs: Tensor) -> None:
    """Assert that values and gradients agree."""
    upstream = torch.randn_like(expected)
    pairs = [(found.float(), expected)]
    grads = [torch.autograd.grad(out, inputs, upstream.to(out.dtype)) for out in (found, expected)]
    for a, b in (*pairs, *zip(*grads, strict=True)):
        assert (a.float() - b.float()).abs().max() <= TOLERANCE * b.float().abs().max()


def test_the_delta_rule_of_flash_linear_attention() -> None:
    pytest.importorskip("fla")
    device, total = torch.device("cuda"), sum(LENGTHS)
    layout = LinearLayout.of(LENGTHS, 1, device)
    torch.manual_seed(0)
    q, k = (normalize(torch.randn(total, 4, 128, device=device)).requires_grad_() for _ in range(2))
    v = torch.randn(total, 4, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
    g = (-torch.rand(total, 4, device=device)).requires_grad_()
    beta = torch.rand(total, 4, device=device, requires_grad=True)
    theirs, ours = (LinearKernels.of(choice) for choice in (LinearChoice("fla", "torch"), LinearChoice("torch", "torch")))
    compare(theirs.delta_rule(q, k, v, g, beta, layout), ours.delta_rule(q, k, v, g, beta, layout), q, k, v, g, beta)


@pytest.mark.parametrize("channels", [96, 100])
def test_the_convolution_of_causal_conv1d(channels: int) -> None:
    pytest.importorskip("causal_conv1d")
    device = torch.device("cuda")
    layout = LinearLayout.of(LENGTHS, 1, device)
    torch.manual_seed(0)
    x = torch.randn(sum(LENGTHS), channels, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(channels, 4, device=device, dtype=torch.bfloat16, requires_grad=True)
    choices = (LinearChoice("torch", "causal_conv1d"), LinearChoice("torch", "torch"))
    theirs, ours = (LinearKernels.of(choice) for choice in choices)
    compare(theirs.convolution(x, weight, layout), ours.convolution(x, weight, layout), x, weight)
