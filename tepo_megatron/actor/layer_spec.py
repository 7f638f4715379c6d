"""Name the modules of each layer: Megatron's layer specs with the norms, the core attention and the gated delta rule."""

from dataclasses import replace

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from tepo_megatron.actor.attention import SDPACoreAttention
from tepo_megatron.actor.kernels import KernelChoice, LinearChoice
from tepo_megatron.actor.linear_attention import GatedDeltaNet, GatedDeltaNetSubmodules
from tepo_megatron.actor.linear_kernels import LinearKernels
from tepo_megatron.actor.modules import ApexRMSNorm, RMSNorm, ZeroCenteredRMSNorm
from tepo_megatron.weights.ops import Architecture


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
