"""Shared parts of the tests of the token statistics: the back ends that can run in this process, and the fp64 reference."""

import math
import os
from importlib.util import find_spec

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = find_spec("triton") is not None
# In the interpreter, tests/unit/ops/test_triton_interpreter.py starts a process of its own: triton
# must see it when first imported.
BACKENDS = ["torch"] + (["triton"] if HAS_TRITON and (INTERPRETED or torch.cuda.is_available()) else [])


def device_of(backend: str) -> torch.device:
    """Return the device on which a back end is tested."""
    return torch.device("cuda" if backend == "triton" and not INTERPRETED else "cpu")


def reference(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-prob and entropy in fp64, differentiable by autograd."""
    logp = torch.log_softmax(logits.double()[:, :vocab_size] / temperature, dim=-1)
    return logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def fp32_bound(logits: torch.Tensor, temperature: float, logprob_R: torch.Tensor) -> float:
    """Return the bound on the error of a log-prob or entropy that is computed in fp32 from these logits [R, V].

    log p = (z/T - m) - log sum exp(z/T - m). Each number is rounded by 2^-24 of its size: z/T twice (of the label, and in the
    sum; T = 1 divides nothing), the two differences and the result, none above the largest -log p; the sum by log2 V additions,
    and its logarithm, which is at most log2 V.
    """
    size = 0.0 if temperature == 1 else float(logits.abs().max()) / temperature
    return 2**-24 * (2 * size + 3 * float(logprob_R.detach().abs().max()) + 2 * math.log2(logits.size(1)))


def to_bf16(x: torch.Tensor, backend: str) -> torch.Tensor:
    """Round fp32 to bf16 as a back end stores it: to nearest, except that Triton's interpreter (3.9) truncates the low bits."""
    if backend == "triton" and INTERPRETED:
        return (x.view(torch.int32) & -(1 << 16)).view(torch.float32).bfloat16()
    return x.bfloat16()
