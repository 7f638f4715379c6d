"""Flash attention that returns its log-sum-exp, so that calls over different keys can be merged into one softmax.

Legend: n sequences, H heads, K key-value heads (K divides H), Lq queries and Lk keys of a sequence, D channels; Q queries and U
keys of all sequences, packed.

The backward of flash attention stores no probabilities. It recomputes exp(score - log-sum-exp), and derives the gradient of the
scores from that, the output and the output's gradient (arXiv 2205.14135, algorithm 4). No step needs the other keys. A call
whose keys are a part of a softmax, given the output and the log-sum-exp of the whole softmax, therefore returns the exact
contribution of its keys to the gradients.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tepo_megatron.base.errors import ConfigError

aten = torch.ops.aten
_LSE_ALIGNMENT = 32  # rows to which CUDA's memory-efficient attention pads its log-sum-exp
_BIAS_ALIGNMENT = 8  # elements to which it requires the rows of a bias to be aligned
_MOST_CHANNELS = 256  # of CUDA's flash attention


@dataclass(frozen=True)
class AttendedKeys:
    """The keys that a query attends to: by default all of them."""

    causal: bool = False  # only the keys up to the query itself (Lq = Lk)
    mask: Tensor | None = None  # bool [n or 1, 1, Lq, Lk], True where a query attends to a key. None: no mask.

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """Return the mask as a bias of the scores, 0 where a query attends to a key and -inf elsewhere; None without a mask."""
        if self.mask is None:
            return None
        return torch.zeros(self.mask.shape, dtype=dtype, device=self.mask.device).masked_fill_(~self.mask, -torch.inf)


class FlashAttention(Protocol):
    """The flash attention of a platform."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keys: AttendedKeys, scale: float | None) -> tuple[Tensor, Tensor]:
        """Return the output [n, H, Lq, D] and the log-sum-exp of the scores [n, H, Lq] (fp32; fp64 for fp64 inputs).

        `scale`: factor of the scores. None: 1 / sqrt(D).
        """

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, keys: AttendedKeys, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v. `scale`: factor of the scores. None: 1 / sqrt(D)."""


class _Cpu:
    """PyTorch's flash attention for the CPU, in fp32, fp64 and bf16. It takes grouped heads without repeating them."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keys: AttendedKeys, scale: float | None) -> tuple[Tensor, Tensor]:
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, keys.causal, attn_mask=keys.bias(q.dtype), scale=scale
        )

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, keys: AttendedKeys, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, keys.causal, attn_mask=keys.bias(q.dtype), scale=scale
        )


class _Cuda:
    """CUDA's memory-efficient attention, for fp32, which `PackedFlash` does not take.

    It takes no grouped heads, so keys and values are repeated, and it takes a mask only as a bias.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keys: AttendedKeys, scale: float | None) -> tuple[Tensor, Tensor]:
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
        out, lse, _, _ = aten._scaled_dot_product_efficient_attention(
            q, k, v, self._bias(q, keys), True, 0.0, keys.causal, scale=scale
        )
        return out, lse[:, :, : q.size(2)]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, keys: AttendedKeys, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = q.size(1) // k.size(1)
        lse = F.pad(lse, (0, -lse.size(2) % _LSE_ALIGNMENT)).contiguous()
        state = torch.zeros((), dtype=torch.int64, device=q.device)  # the random generator's state, unused without dropout
        grad_q, grad_k, grad_v, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, *(x.repeat_interleave(heads, dim=1) for x in (k, v)), self._bias(q, keys), out, lse, state, state, 0.0,
            [True, True, True, False], keys.causal, scale=scale,
        )  # fmt: skip
        grad_k, grad_v = (x.unflatten(1, (-1, heads)).sum(2) for x in (grad_k, grad_v))
        return grad_q, grad_k, grad_v

    @staticmethod
    def _bias(q: Tensor, keys: AttendedKeys) -> Tensor | None:
        if (bias := keys.bias(q.dtype)) is None:
            return None
        length = bias.size(-1)
        bias = F.pad(bias, (0, -length % _BIAS_ALIGNMENT))[..., :length]
        return bias.expand(q.size(0), q.size(1), -1, -1)


_PLATFORMS: dict[str, FlashAttention] = {"cpu": _Cpu(), "cuda": _Cuda()}


def flash_attention_of(device: torch.device) -> FlashAttention:
    """Return the flash attention of a device's platform. Raises ConfigError if the platform has none."""
    if device.type not in _PLATFORMS:
        raise ConfigError(
            f"training.share_prompts needs attention that returns its log-sum-exp, and {device.type} has none; set "
            f"training.share_prompts=never"
        )
    return _PLATFORMS[device.type]


@dataclass(frozen=True)
class PackedCall:
    """Attention of packed sequences of any length, each over keys of its own."""

    query_rows: Tensor | None  # int64 [Q], the rows of the queries. None: all rows, in their order.
    # int64 [U], the rows of the keys; a row may be there several times. None: all rows, in their order.
    key_rows: Tensor | None
    cu_q: Tensor  # int32 [n + 1], the start of each sequence in the queries, and Q
    cu_k: Tensor  # int32 [n + 1], the same of the keys, and U
    longest_q: int
    longest_k: int
    # The last query of a sequence attends to all of its keys, the one before to all but the last, and so on. Otherwise all of
    # them attend to all.
    causal: bool


class PackedFlash:
    """CUDA's flash attention for packed sequences, in fp16 and bf16. It pads nothing and takes grouped heads as they are.

    cuDNN's attention, which `scaled_dot_product_attention` prefers on Hopper, compiles a plan for each new shape; packed
    sequences give new shapes in every microbatch.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: PackedCall, scale: float | None) -> tuple[Tensor, Tensor]:
        """Return the output [Q, H, D] and the log-sum-exp of the scores, fp32 [H, Q].

        Args:
            q: Queries [Q, H, D], in the call's order.
            k: Keys [U, K, D], likewise.
            v: Values [U, K, D], likewise.
            scale: Factor of the scores. None: 1 / sqrt(D).
        """
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, call.cu_q, call.cu_k, call.longest_q, call.longest_k, 0.0, call.causal, False, scale=scale
        )
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: PackedCall, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v.

        Args:
            grad: Gradient of the output, [Q, H, D].
            out: Output of the whole softmax, [Q, H, D].
            lse: Log-sum-exp of the whole softmax, [H, Q].
            scale: Factor of the scores. None: 1 / sqrt(D).
        """
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the random generator's, unused without dropout
        gradients: tuple[Tensor, Tensor, Tensor] = aten._flash_attention_backward(
            grad, q, k, v, out, lse, call.cu_q, call.cu_k, call.longest_q, call.longest_k, 0.0, call.causal, state,
            q.new_empty(0), scale=scale,
        )  # fmt: skip
        return gradients


def packed_flash_of(query: Tensor) -> PackedFlash | None:
    """Return the kernel that takes these queries [..., D] packed; None if there is none for their device, type or D."""
    taken = query.dtype in (torch.bfloat16, torch.float16) and query.size(-1) <= _MOST_CHANNELS and query.size(-1) % 8 == 0
    return PackedFlash() if query.is_cuda and taken else None


def merge(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over two sets of keys into one softmax over both.

    Args:
        out: Output over the first keys, [..., D].
        lse: Log-sum-exp of their scores, [...].
        more_out: Output over the other keys, [..., D].
        more_lse: Log-sum-exp of their scores, [...].
    Returns:
        The output, in the type of `out`, and the log-sum-exp.
    """
    whole = torch.logaddexp(lse, more_lse)
    weight, more_weight = ((x - whole).exp().unsqueeze(-1) for x in (lse, more_lse))
    return (out * weight + more_out * more_weight).to(out.dtype), whole
