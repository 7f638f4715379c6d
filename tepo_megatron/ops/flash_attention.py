"""Flash attention that tells its log-sum-exp, and the share that some keys have in a softmax over more of them.

Legend: n sequences, H heads, K key-value heads (K divides H), Lq queries and Lk keys of a sequence, D channels.

The backward of flash attention keeps no probabilities: it computes exp(score - log-sum-exp) again, and the gradient of the
scores from it, the output and its gradient (arXiv 2205.14135, algorithm 4). None of that asks where the other keys are. Given
output and log-sum-exp of a softmax over more keys than the call at hand has, it returns these keys' share of the gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tepo_megatron.errors import ConfigError

aten = torch.ops.aten
_LSE_ALIGNMENT = 32  # rows to which CUDA's memory-efficient attention pads its log-sum-exp
_BIAS_ALIGNMENT = 8  # elements to which it wants the rows of a bias aligned


@dataclass(frozen=True)
class Keys:
    """Which a query sees: all; those up to itself (causal, Lq = Lk); those where `mask`, bool [n or 1, 1, Lq, Lk], is True."""

    causal: bool = False
    mask: Tensor | None = None

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """0 where a key is seen, else -inf."""
        if self.mask is None:
            return None
        return torch.zeros(self.mask.shape, dtype=dtype, device=self.mask.device).masked_fill_(~self.mask, -torch.inf)


class Flash(Protocol):
    """Of a platform. scale: of the scores, 1 / sqrt(D) where None."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keys: Keys, scale: float | None) -> tuple[Tensor, Tensor]:
        """[n, H, Lq, D], [n, K, Lk, D] twice -> output [n, H, Lq, D], log-sum-exp [n, H, Lq] (fp32, fp64 of fp64)."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, keys: Keys, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k, v; out, lse: of the whole softmax, of which k and v may be a part."""


class _Cpu:
    """fp32, fp64, bf16; grouped heads as they are."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keys: Keys, scale: float | None) -> tuple[Tensor, Tensor]:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, keys.causal, attn_mask=keys.bias(q.dtype), scale=scale
        )
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, keys: Keys, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, keys.causal, attn_mask=keys.bias(q.dtype), scale=scale
        )
        return gradients


class _Cuda:
    """fp32, fp16, bf16 by memory-efficient attention, which knows neither grouped heads nor masks without a bias.

    Not measured: `tests/gpu/test_flash_attention.py` has not been run.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keys: Keys, scale: float | None) -> tuple[Tensor, Tensor]:
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
        out, lse, _, _ = aten._scaled_dot_product_efficient_attention(
            q, k, v, self._bias(q, keys), True, 0.0, keys.causal, scale=scale
        )
        return out, lse[:, :, : q.size(2)]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, keys: Keys, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = q.size(1) // k.size(1)
        lse = F.pad(lse, (0, -lse.size(2) % _LSE_ALIGNMENT)).contiguous()
        state = torch.zeros((), dtype=torch.int64, device=q.device)  # of the generator: there is no dropout
        grad_q, grad_k, grad_v, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, *(x.repeat_interleave(heads, dim=1) for x in (k, v)), self._bias(q, keys), out, lse, state, state, 0.0,
            [True, True, True, False], keys.causal, scale=scale,
        )  # fmt: skip
        grad_k, grad_v = (x.unflatten(1, (-1, heads)).sum(2) for x in (grad_k, grad_v))
        return grad_q, grad_k, grad_v

    @staticmethod
    def _bias(q: Tensor, keys: Keys) -> Tensor | None:
        bias = keys.bias(q.dtype)
        if bias is None:
            return None
        length = bias.size(-1)
        bias = F.pad(bias, (0, -length % _BIAS_ALIGNMENT))[..., :length]
        return bias.expand(q.size(0), q.size(1), -1, -1)


_PLATFORMS: dict[str, Flash] = {"cpu": _Cpu(), "cuda": _Cuda()}


def flash_of(device: torch.device) -> Flash:
    """Raises ConfigError on a platform without."""
    if device.type not in _PLATFORMS:
        raise ConfigError(
            f"training.share_prompts needs attention that tells its log-sum-exp, which {device.type} has not; set it to never"
        )
    return _PLATFORMS[device.type]


def merge(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """One softmax over the keys of both. out, more_out: [..., D]; lse, more_lse: [...], of the same shape otherwise."""
    whole = torch.logaddexp(lse, more_lse)
    weight, more_weight = ((x - whole).exp().unsqueeze(-1) for x in (lse, more_lse))
    return (out * weight + more_out * more_weight).to(out.dtype), whole
