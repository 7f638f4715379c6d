"""The gated delta rule in the place of Megatron's self-attention, for packed sequences on any layout, and its kernels.

Suffixes and dimensions: _S packed tokens of this context-parallel (CP) rank, _T of all CP ranks; D channels, C channels of a
projection, H heads, K channels of queries and keys, V channels of values.

A tensor-parallel (TP) rank has the same part of key heads and of value heads, so a value head finds its key head on its own
rank. Under CP the heads are split further, and tokens are gathered: a head's state passes through all tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor
from torch.nn import Parameter

from tepo_megatron.actor.kernels import LinearChoice
from tepo_megatron.models.ops import LinearAttention
from tepo_megatron.ops.context_parallel import zigzag_rows
from tepo_megatron.ops.gated_delta_rule import SequenceChunks, gated_delta_rule, normalize


def positions(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return the position of each token in its sequence, int64 [T]."""
    return torch.cat([torch.arange(length) for length in (*lengths, 0)]).to(device)


def packed_convolution(x_TD: Tensor, weight_DW: Tensor, position_T: Tensor) -> Tensor:
    """Return SiLU of the depthwise causal convolution over packed sequences, each channel with its own W weights, [T, D].

    The last weight belongs to the token itself. Tokens before the start of a sequence count as 0. Gradients: to `x_TD` and
    `weight_DW`, by autograd; none crosses the border of two sequences. It is computed in the dtype of the inputs.

    Args:
        x_TD: Channels of each token.
        weight_DW: Weights of each channel.
        position_T: int64, position of each token in its sequence (see `positions`).
    """
    weights = weight_DW.unbind(1)
    y = x_TD * weights[-1]
    for back in range(1, min(len(weights), x_TD.size(0))):
        inside = (position_T[back:] >= back)[:, None]
        y = y + F.pad(x_TD[:-back] * inside * weights[-1 - back], (0, 0, back, 0))
    return F.silu(y)


_CHANNELS = 8  # causal-conv1d needs a multiple of this many channels where sequences are packed


@dataclass(frozen=True)
class LinearLayout:
    """The packed sequences of a microbatch, computed once for all its layers."""

    lengths: tuple[int, ...]  # tokens of each sequence over all CP ranks, padding included
    position_T: Tensor  # position of each token in its sequence
    chunks: SequenceChunks
    # Under CP, the place in the order of packing of each token of the ranks, one rank after another. None without CP.
    rows_T: Tensor | None

    @classmethod
    def of(cls, lengths: tuple[int, ...], cp: int, device: torch.device) -> LinearLayout:
        """Return the layout of sequences."""
        starts = torch.tensor([0, *lengths]).cumsum(0)
        rows = torch.cat([zigzag_rows(starts, cp, rank) for rank in range(cp)]).to(device) if cp > 1 else None
        return cls(lengths, positions(lengths, device), SequenceChunks.of(lengths, device), rows)

    @property
    def starts(self) -> Tensor:
        """Return the start of each sequence, and the number of tokens: int64 [G + 1] on the device."""
        return torch.tensor([0, *self.lengths], device=self.position_T.device).cumsum(0)


@dataclass(frozen=True)
class LinearKernels:
    """The implementations that a layer calls."""

    # (x [T, D], weights [D, width], layout) -> SiLU of the causal convolution [T, D]
    convolution: Callable[[Tensor, Tensor, LinearLayout], Tensor]
    # (q, k [T, H, K], v [T, H, V], log decays g, strengths beta [T, H], layout) -> [T, H, V]; q, k normalized; all but v fp32
    delta_rule: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, LinearLayout], Tensor]

    @classmethod
    def of(cls, choice: LinearChoice) -> LinearKernels:
        """Return the implementations that `kernels.choose_linear` names."""
        return cls(_CONVOLUTIONS[choice.convolution], _DELTA_RULES[choice.delta_rule])


def _torch_convolution(x_TD: Tensor, weight_DW: Tensor, layout: LinearLayout) -> Tensor:
    return packed_convolution(x_TD.float(), weight_DW.float(), layout.position_T)


def _cuda_convolution(x_TD: Tensor, weight_DW: Tensor, layout: LinearLayout) -> Tensor:
    """Call causal-conv1d, whose products are 16 bits and whose sums are fp32."""
    if x_TD.size(1) % _CHANNELS:
        return _torch_convolution(x_TD, weight_DW, layout)
    from causal_conv1d import causal_conv1d_fn

    lengths = torch.tensor(layout.lengths, device=x_TD.device)
    sequence = torch.arange(lengths.numel(), device=x_TD.device, dtype=torch.int32).repeat_interleave(lengths)
    channels_last = x_TD.contiguous()[None].transpose(1, 2)
    convolved: Tensor = causal_conv1d_fn(channels_last, weight_DW.contiguous(), seq_idx=sequence[None], activation="silu")
    return convolved.transpose(1, 2)[0]


def _torch_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layout: LinearLayout) -> Tensor:
    return gated_delta_rule(q, k, v.float(), g, beta, layout.chunks)


def _fla_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layout: LinearLayout) -> Tensor:
    """Call FLA's kernels, whose products are bf16 and whose states and decays are fp32."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    half = [x.bfloat16()[None] for x in (q, k, v)]
    out: Tensor = chunk_gated_delta_rule(*half, g=g[None], beta=beta[None], cu_seqlens=layout.starts)[0]
    return out[0]


_CONVOLUTIONS = {"torch": _torch_convolution, "causal_conv1d": _cuda_convolution}
_DELTA_RULES = {"torch": _torch_delta_rule, "fla": _fla_delta_rule}


_KINDS = ("query", "key", "value", "z", "beta", "alpha")  # of rows; the names are those of Megatron-Core's own gated delta net
_SPLIT_OVER_TP = {"A_log": 0, "dt_bias": 0, "conv_weight": 0}


@dataclass(frozen=True)
class GatedDeltaNetSubmodules:
    """The specs of the linear layers: `in_proj` is column-parallel, `out_proj` row-parallel."""

    in_proj: Any
    out_proj: Any


class GatedDeltaNet(MegatronModule):
    """A layer's gated delta rule with its projections, convolution, and gated norm.

    Parameters on a rank: `in_proj` has the rows of its queries, keys, values, output gates, write strengths and decays, in this
    order; `conv_weight` the channels of its queries, keys and values; `A_log` (fp32 in any model, because exp(A_log) multiplies
    the decay of every token) and `dt_bias` its value heads. `norm_weight` is the same on all ranks.

    Collectives in addition to those of the two linear layers: under CP two all-to-alls forward and two backward; without
    sequence parallelism one all-reduce over TP of the gradient of `norm_weight`. Under sequence parallelism Megatron sums that
    gradient itself.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int,
        linear: LinearAttention,
        kernels: LinearKernels,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.layer_number, self.tp_group, self.cp_group = layer_number, groups.tp, groups.cp
        self.linear, self.kernels = linear, kernels
        tp = self.tp_group.size()
        self.sections = tuple(rows // tp for rows in linear.projected)
        values = linear.value_heads * linear.value_dim
        layer = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = _build(
            submodules.in_proj,
            config.hidden_size,
            sum(linear.projected),
            **layer | {"init_method": config.init_method, "gather_output": False, "skip_bias_add": False},
            tp_comm_buffer_name="qkv",
        )
        self.out_proj = _build(
            submodules.out_proj,
            values,
            config.hidden_size,
            **layer | {"init_method": config.output_layer_init_method, "input_is_parallel": True, "skip_bias_add": True},
            tp_comm_buffer_name="proj",
        )
        heads = linear.value_heads // tp
        self.conv_weight = Parameter(torch.empty(sum(self.sections[:3]), linear.conv_width, dtype=config.params_dtype))
        self.A_log = Parameter(torch.empty(heads, dtype=torch.float32))
        self.dt_bias = Parameter(torch.empty(heads, dtype=config.params_dtype))
        for parameter in (self.conv_weight, self.A_log, self.dt_bias):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)  # else the gradient norm counts rank 0's part alone
        self.norm_weight = Parameter(torch.empty(linear.value_dim, dtype=config.params_dtype))
        self.norm_weight.sequence_parallel = config.sequence_parallel
        self.sums_norm_gradient = tp > 1 and not config.sequence_parallel

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output of the layer, of the shape of `hidden_states`, and no bias.

        `packed_seq_params`: describes packed sequences; None: b sequences of equal length. Raises ValueError if there is a
        mask, or sequences share prompts.
        """
        if attention_mask is not None:
            raise ValueError("the gated delta rule is causal by position and takes no mask; pass None")
        projected, _bias = self.in_proj(hidden_states)
        length, batch, cp = projected.size(0), projected.size(1), self.cp_group.size()
        layout = self._layout(packed_seq_params, length, batch, projected.device)
        x = projected.transpose(0, 1).flatten(0, 1)
        if layout.rows_T is not None:
            gathered = self._tokens_of_heads(x)
            x = torch.empty_like(gathered).index_copy(0, layout.rows_T, gathered)
        out = self._mix(x, layout)
        if layout.rows_T is not None:
            out = self._heads_of_tokens(out.index_select(0, layout.rows_T), cp)
        output: tuple[Tensor, Tensor | None] = self.out_proj(out.unflatten(0, (batch, length)).transpose(0, 1).contiguous())
        return output

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the layer's part of a checkpoint, which does not depend on the layout (see `sharded_parameters`)."""
        return sharded_parameters(self, self.sections, prefix, sharded_offsets, metadata)

    def _layout(self, params: PackedSeqParams | None, length: int, batch: int, device: torch.device) -> LinearLayout:
        """Return the layout of the microbatch. The first layer stores it on `params`: reading `cu_seqlens` waits for a GPU."""
        cp = self.cp_group.size()
        if params is None:
            return LinearLayout.of((length * cp,) * batch, cp, device)
        layout: LinearLayout | None = getattr(params, "linear_layout", None)
        if layout is None:
            if any(getattr(params, "starts", None) or ()):
                raise ValueError(
                    "sequences share prompts, but the gated delta rule has one state per sequence; "
                    "set training.share_prompts to auto or never"
                )
            cu_seqlens = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
            layout = LinearLayout.of(tuple(cu_seqlens.diff().tolist()), cp, device)
            params.linear_layout = layout
        return layout

    def _mix(self, x_T: Tensor, layout: LinearLayout) -> Tensor:
        """Return [T, heads V] of the projected tokens [T, C] for this rank's heads. All between the two is fp32."""
        cp, rank = self.cp_group.size(), self.cp_group.rank()
        sections = [rows // cp for rows in self.sections]
        qkv, z, b, a = x_T.split([sum(sections[:3]), *sections[3:]], dim=-1)
        kinds = self.conv_weight.split(self.sections[:3])
        conv_weight = torch.cat([w.chunk(cp)[rank] for w in kinds]) if cp > 1 else self.conv_weight
        A_log, dt_bias = self.A_log.chunk(cp)[rank], self.dt_bias.chunk(cp)[rank]
        convolved = self.kernels.convolution(qkv, conv_weight, layout).split(sections[:3], dim=-1)
        q, k, v = (x.unflatten(-1, (-1, dim)) for x, dim in zip(convolved, self._head_dims, strict=True))
        repeats = self.linear.value_heads // self.linear.key_heads
        q, k = (normalize(x.float()).repeat_interleave(repeats, dim=1) for x in (q, k))
        g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
        out = self.kernels.delta_rule(q, k, v, g, b.float().sigmoid(), layout)
        weight = self.norm_weight
        if self.sums_norm_gradient:
            weight = tensor_parallel.copy_to_tensor_model_parallel_region(weight, group=self.tp_group)
        out = F.rms_norm(out.float(), (self.linear.value_dim,), weight.float(), self.config.layernorm_epsilon)
        gated = out * F.silu(z.float().unflatten(-1, (-1, self.linear.value_dim)))
        return gated.to(x_T.dtype).flatten(1)

    @property
    def _head_dims(self) -> tuple[int, int, int]:
        return (self.linear.key_dim, self.linear.key_dim, self.linear.value_dim)

    def _tokens_of_heads(self, x_S: Tensor) -> Tensor:
        """Return this rank's part of the heads for the tokens of all CP ranks: [S, C] -> [S cp, C / cp], rank after rank."""
        cp = self.cp_group.size()
        parts = [x.unflatten(-1, (cp, -1)) for x in x_S.split(self.sections, dim=-1)]
        by_rank = torch.cat(parts, dim=-1).transpose(0, 1).flatten(0, 1).contiguous()
        received: Tensor = tensor_parallel.all_to_all(self.cp_group, by_rank)
        return received

    def _heads_of_tokens(self, x_T: Tensor, cp: int) -> Tensor:
        """Return all heads of this rank's tokens: [S cp, C / cp] -> [S, C]."""
        received: Tensor = tensor_parallel.all_to_all(self.cp_group, x_T.contiguous())
        return received.unflatten(0, (cp, -1)).transpose(0, 1).flatten(1)


def _build(spec: Any, *sizes: int, **how: Any) -> torch.nn.Module:
    """Build a linear layer from a spec, a class or a builder: Megatron-Core 0.16 to 0.19 name them differently."""
    make = partial(build_module, spec) if isinstance(spec, ModuleSpec) else spec
    layer: torch.nn.Module = make(*sizes, **how)
    return layer


def sharded_parameters(
    layer: MegatronModule,
    sections: Sequence[int],
    prefix: str,
    sharded_offsets: tuple[Any, ...],
    metadata: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return the sharded state dict of a `GatedDeltaNet`, which does not depend on tp.

    The rows of `in_proj` and of the convolution belong to several kinds of heads, and a tensor-parallel rank has its part of
    each kind. So each kind is stored as a tensor of its own, as Megatron does with gate and up projections.
    """
    metadata = ensure_metadata_has_dp_cp_group(metadata)
    own = dict(layer.named_parameters(recurse=False))
    state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
        own, prefix, _SPLIT_OVER_TP, sharded_offsets, tp_group=layer.tp_group, dp_cp_group=metadata["dp_cp_group"]
    )
    for name, module in layer.named_children():
        state |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=layer.tp_group)
    for name, rows in (("in_proj.weight", sections), ("conv_weight", sections[:3])):
        state[prefix + name] = _by_kind(state[prefix + name], rows)
    return state


def _by_kind(whole: ShardedTensor, rows: Sequence[int]) -> ShardedTensorFactory:
    template = whole.without_data()
    at = whole.prepend_axis_num  # the dimension of the rows in the global tensor

    @torch.no_grad()
    def build(key: str, parameter: Tensor, replica_id: Any, flattened_range: slice | None) -> list[ShardedTensor]:
        assert flattened_range is None, "checkpoints of flattened parameters are not supported"
        parts, parallel = [], template.axis_fragmentations[at]
        for kind, n, data in zip(_KINDS, rows, parameter.split(list(rows)), strict=False):
            shape, offset = list(template.global_shape), list(template.global_offset)
            rank = offset[at] // parameter.size(0)
            shape[at], offset[at] = n * parallel, n * rank
            part = replace(
                template, key=f"{key}.{kind}", data=data, dtype=data.dtype, local_shape=tuple(data.shape),
                global_shape=tuple(shape), global_offset=tuple(offset), replica_id=replica_id,
            )  # fmt: skip
            parts.append(part)
        return parts

    return ShardedTensorFactory(whole.key, whole.data, build, _joined, whole.replica_id)


@torch.no_grad()
def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts)
