"""Gated delta nets inside vLLM on CPU, in PyTorch and fp32, where vLLM's own kernels end the server.

Facts are of vLLM 0.32. Its CPU kernels take bf16 and heads of 64 or 128 channels, as many for values as for keys. A server with
another model starts, is healthy, and ends at its first request; so does one whose prefill is a single token. The layer here
computes these cases with `gated_delta` and leaves all others to vLLM. Both keep their states in vLLM's cache, in one layout.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

KERNEL_HEADS = (64, 128)  # channels of a head for which vLLM has CPU kernels
NORM_EPS = 1e-6  # of the norm of queries and keys, as in transformers


@dataclass(frozen=True)
class Requests:
    """The requests of one step, one after another in the step's tokens."""

    starts: list[int]  # index of each request's first token, and the number of tokens
    slots_R: Tensor  # slot of each request in the caches
    fresh_R: Tensor  # whether a request begins here, so that its slot holds another request's state

    @classmethod
    def of(cls, metadata: Any) -> "Requests":
        """Return the requests of vLLM's metadata of a layer. Padding at the end is left out."""
        count = metadata.num_decodes + metadata.num_prefills
        starts = metadata.non_spec_query_start_loc[: count + 1].tolist()
        fresh_R = torch.zeros(count, dtype=torch.bool)
        if metadata.num_prefills:
            fresh_R[metadata.num_decodes :] = ~metadata.has_initial_state[metadata.num_decodes : count]
        return cls(starts, metadata.non_spec_state_indices_tensor[:count].long(), fresh_R)


class TorchGatedDeltaNet(QwenGatedDeltaNetAttention):
    """vLLM's layer, with PyTorch in place of CPU kernels that cannot compute a step."""

    def forward_cpu(self, hidden_states: Tensor) -> Tensor:
        """Map the step's hidden states [tokens, hidden] to the layer's output of the same shape."""
        all_metadata = get_forward_context().attn_metadata
        metadata = all_metadata[self.prefix] if isinstance(all_metadata, dict) else None
        if metadata is None or not metadata.num_actual_tokens or self._has_kernels(hidden_states.dtype, metadata):
            return super().forward_cpu(hidden_states)
        if metadata.spec_sequence_masks is not None:
            raise RuntimeError("speculative decoding of a gated delta net on CPU needs bf16 and heads of 64 or 128 channels")
        keys, values = self.key_dim // self.tp_size, self.value_dim // self.tp_size
        qkv, z = self.in_proj_qkvz(hidden_states)[0].split((2 * keys + values, values), -1)
        b, a = self.in_proj_ba(hidden_states)[0].chunk(2, -1)
        out = torch.zeros(len(hidden_states), values // self.head_v_dim, self.head_v_dim, dtype=hidden_states.dtype)
        requests = Requests.of(metadata)
        tokens = requests.starts[-1]
        convolved = self._convolve(qkv[:tokens].float(), requests)
        q, k, v = convolved.split((keys, keys, values), -1)
        q, k, v = (
            t.unflatten(-1, (-1, size)) for t, size in ((q, self.head_k_dim), (k, self.head_k_dim), (v, self.head_v_dim))
        )
        decay = -self.A_log.float().exp() * F.softplus(a[:tokens].float() + self.dt_bias.float())
        states, heads = self.kv_cache[1], values // self.head_v_dim
        states = states.view(len(states), heads, self.head_k_dim, self.head_v_dim)  # as vLLM's CPU kernels read it
        out[:tokens] = gated_delta(q, k, v, decay, b[:tokens].float().sigmoid(), states, requests).to(out.dtype)
        return self._output_projection(out, z.unflatten(-1, (-1, self.head_v_dim)))

    def _has_kernels(self, dtype: torch.dtype, metadata: Any) -> bool:
        fits = self.head_k_dim == self.head_v_dim and self.head_k_dim in KERNEL_HEADS
        return fits and dtype == torch.bfloat16 and metadata.num_prefill_tokens != 1

    def _convolve(self, x_T: Tensor, requests: Requests) -> Tensor:
        """Return the causal convolution of each request, after SiLU, and keep its last inputs in the cache.

        `x_T`: inputs of the step's tokens, [tokens, channels], fp32.
        """
        weight = getattr(self.conv1d, "_cpu_unpacked_conv_weight", self.conv1d.weight).float()
        weight = weight.reshape(len(weight), -1)  # [channels, width]
        width, cache = weight.size(1), self.kv_cache[0]
        cache = cache if is_conv_state_dim_first() else cache.transpose(-1, -2)  # [slots, channels, width - 1]
        before = cache[requests.slots_R].float().masked_fill(requests.fresh_R[:, None, None], 0.0).transpose(1, 2)
        parts, places, end = [], [], 0
        for i, state in enumerate(before):
            start, stop = requests.starts[i : i + 2]
            parts += [state, x_T[start:stop]]
            places.append(torch.arange(end, end + stop - start))
            end += width - 1 + stop - start
        x, place_T = torch.cat(parts), torch.cat(places)
        ends = torch.tensor([place[-1] + width for place in places])
        last = x[ends[:, None] + torch.arange(1 - width, 0)]
        cache[requests.slots_R] = last.transpose(1, 2).to(cache.dtype)
        return F.silu(sum((x[place_T + i] * weight[:, i] for i in range(width)), torch.zeros(())))


def gated_delta(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Tensor, requests: Requests) -> Tensor:
    """Return the outputs of the gated delta rule, [tokens, value heads, value channels], and update the states.

    The rule is applied token by token, to all requests at once that have a token left. Value head h reads key head
    h // (value heads / key heads).

    Args:
        q, k: Queries and keys, [tokens, key heads, key channels], fp32.
        v: Values, [tokens, value heads, value channels], fp32.
        decay: Logarithm of the decay of each token, [tokens, value heads], fp32.
        beta: Share of the error that each token writes, [tokens, value heads], fp32.
    """
    per_key = v.size(1) // k.size(1)
    q, k = (t * torch.rsqrt((t * t).sum(-1, keepdim=True) + NORM_EPS) for t in (q, k))
    q, k = (t.repeat_interleave(per_key, 1) for t in (q * k.size(-1) ** -0.5, k))
    starts_R = torch.tensor(requests.starts)
    lengths_R, longest_first = starts_R.diff().sort(descending=True, stable=True)
    starts_R, slots_R = starts_R[longest_first], requests.slots_R[longest_first]
    state = states[slots_R].float().masked_fill(requests.fresh_R[longest_first][:, None, None, None], 0.0)
    out, forget = torch.zeros_like(v), decay.exp()
    for i in range(int(lengths_R[0])):
        n = int((lengths_R > i).sum())
        at = starts_R[:n] + i
        now = state[:n].mul_(forget[at][:, :, None, None])  # a view
        error = (v[at] - (now * k[at][..., None]).sum(-2)) * beta[at][..., None]
        now.add_(k[at][..., None] * error[..., None, :])
        out[at] = (now * q[at][..., None]).sum(-2)
    states[slots_R] = state.to(states.dtype)
    return out


PluggableLayer.register_oot(name=QwenGatedDeltaNetAttention.__name__)(TorchGatedDeltaNet)
