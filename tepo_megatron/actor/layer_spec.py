"""Name the modules of each layer: Megatron's layer specs with the norms, the core attention and the gated delta rule."""

from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from tepo_megatron.actor.attention import SDPACoreAttention
from tepo_megatron.actor.kernels import KernelChoice, LinearChoice
from tepo_megatron.actor.linear_attention import GatedDeltaNet, GatedDeltaNetSubmodules, LinearKernels
from tepo_megatron.models.ops import Architecture
from tepo_megatron.ops.output_layer import add_product


class RMSNorm(torch.nn.RMSNorm):
    """PyTorch's RMS norm with the constructor that Megatron's layer specs call.

    Megatron's own fallback (`WrappedTorchNorm`, 0.16) refuses sequence parallelism. Under sequence parallelism each rank
    normalizes its part of the tokens, so the weight's gradient must be summed over tp. Megatron does that for parameters marked
    `sequence_parallel`.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class ZeroCenteredRMSNorm(RMSNorm):
    """RMS norm that multiplies by 1 + w, in fp32: rounding 1 + w to bf16 would lose the low bits of a small w."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized tensor: [..., hidden_size] in the model's dtype -> the same shape and dtype."""
        weight = 1 + self.weight.float()
        return torch.nn.functional.rms_norm(x.float(), self.normalized_shape, weight, self.eps).to(x.dtype)


class ApexRMSNorm(torch.nn.Module):
    """RMS norm with Apex's kernel. Like PyTorch's it saves the input for backward and computes in fp32."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        self.shape, self.eps = (hidden_size,), eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized tensor: [..., hidden_size] in the model's dtype -> the same shape and dtype."""
        from apex.normalization.fused_layer_norm import fused_rms_norm_affine

        return fused_rms_norm_affine(x, self.weight, self.shape, self.eps)


class WeightGradient:
    """A replacement for Apex's extension, with the one function that Megatron calls when gradients are reduced in fp32.

    Megatron's linear layers call Apex's extension `fused_weight_gradient_mlp_cuda` for that. Where Apex is not installed,
    PyTorch's own products do the same (`ops/output_layer.py`), on a GPU and on a CPU. Transformer Engine's layers have their
    own fusion. The output layer is Megatron's in any case, and Megatron refuses the fusion without the extension.
    """

    @staticmethod
    def wgrad_gemm_accum_fp32(hidden: Tensor, gradient: Tensor, main_grad: Tensor) -> None:
        """Add gradient.T @ hidden to `main_grad` in place.

        Args:
            hidden: [T, H], input of the linear layer.
            gradient: [T, V], gradient of its output.
            main_grad: fp32 [V, H].
        """
        add_product(main_grad, gradient, hidden)


def install_in_megatron() -> None:
    """Install `WeightGradient` as what `TransformerConfig.gradient_accumulation_fusion` calls, unless Apex's is installed."""
    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = WeightGradient
        layers._grad_accum_fusion_available = True


def layer_spec(
    config: TransformerConfig, arch: Architecture, kernels: KernelChoice, linear: LinearChoice, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Return the specs of the layers of a model chunk."""
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=kernels.layers == "te", normalization="RMSNorm", vp_stage=vp_stage
    )
    if kernels.layers != "te":
        # Apex has no norm that multiplies by 1 + w
        norm = ZeroCenteredRMSNorm if arch.zero_centered_norms else ApexRMSNorm if kernels.norms == "apex" else RMSNorm
        for layer in spec.layer_specs:
            layer.submodules.input_layernorm = norm
            layer.submodules.pre_mlp_layernorm = norm
            attention = layer.submodules.self_attention.submodules
            attention.core_attention = SDPACoreAttention
            if config.qk_layernorm:
                attention.q_layernorm = attention.k_layernorm = norm
        spec.layer_norm = norm
    if arch.linear_attention is None:
        return spec
    offset = get_transformer_layer_offset(config, vp_stage=vp_stage)
    replaced = {i for i in range(len(spec.layer_specs)) if offset + i in arch.linear_layers}
    net = {"linear": arch.linear_attention, "kernels": LinearKernels.of(linear)}
    layers = [_with_delta_rule(layer, net) if i in replaced else layer for i, layer in enumerate(spec.layer_specs)]
    return replace(spec, layer_specs=layers)


def _with_delta_rule(layer: ModuleSpec, net: dict[str, object]) -> ModuleSpec:
    """Return the spec of a layer with the gated delta rule in the place of attention, on the same kinds of linear layers."""
    attention = layer.submodules.self_attention.submodules
    projections = GatedDeltaNetSubmodules(in_proj=attention.linear_qkv, out_proj=attention.linear_proj)
    delta_rule = ModuleSpec(module=GatedDeltaNet, params=net, submodules=projections)
    # checkpoints name the norm as Transformer Engine does, which fuses it into the projection
    keys = {key: name.replace("linear_qkv", "in_proj") for key, name in layer.submodules.sharded_state_dict_keys_map.items()}
    submodules = replace(layer.submodules, self_attention=delta_rule, sharded_state_dict_keys_map=keys)
    return replace(layer, submodules=submodules)
