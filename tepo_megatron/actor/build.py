"""Build this rank's Megatron GPTModel chunks, their DDP wrappers and the optimizer from the architecture and the config."""

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

from tepo_megatron.actor import precision, rotary
from tepo_megatron.actor.kernels import choose, choose_linear, installed
from tepo_megatron.actor.layer_spec import install_in_megatron, layer_spec
from tepo_megatron.actor.layout import check_shared_prompts, stage_layers
from tepo_megatron.actor.passed_fields import passed_fields
from tepo_megatron.base.errors import ConfigError
from tepo_megatron.config import MegatronConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from tepo_megatron.dist.parallel import ParallelDims
from tepo_megatron.models.ops import Architecture, padded_vocab_size

_TRAINING, _MEGATRON = TrainingConfig(), MegatronConfig()


def shares_prompts(
    training: TrainingConfig, model: ModelConfig, device: torch.device, cp: int, arch: Architecture | None = None
) -> bool:
    """Return whether sequences of a microbatch share prompts. `auto` shares none in a model with the gated delta rule.

    `arch`: architecture of the model; None: all layers have attention. Raises ConfigError if share_prompts is always, but the
    config selects Transformer Engine's attention or the model has the gated delta rule, which cannot share them.
    """
    if arch is not None and arch.linear_attention is not None:
        check_shared_prompts(arch, training)
        return False
    if training.share_prompts == "always" and choose(model, _MEGATRON, device.type, installed(), cp=cp).layers == "te":
        raise ConfigError(
            "training.share_prompts=always, and model.attention=auto takes Transformer Engine, whose packed attention cannot "
            "give several responses the keys of one prompt; set model.attention to sdpa, or share_prompts to auto or never"
        )
    return training.shares_prompts(device.type)


def transformer_config(
    arch: Architecture,
    model: ModelConfig,
    parallel: ParallelConfig,
    device: torch.device,
    training: TrainingConfig = _TRAINING,
    replay_experts: bool = False,
    share_prompts: bool = False,
    megatron: MegatronConfig = _MEGATRON,
) -> TransformerConfig:
    """Return Megatron's config of this architecture on this mesh; install our rotary embedding and weight gradient in it."""
    rotary.install_in_megatron(share_prompts)
    install_in_megatron()
    own = own_fields(arch, model, parallel, device, training, replay_experts, megatron)
    return TransformerConfig(**own | passed_fields(megatron, "transformer"))


def own_fields(
    arch: Architecture,
    model: ModelConfig,
    parallel: ParallelConfig,
    device: torch.device,
    training: TrainingConfig,
    replay_experts: bool,
    megatron: MegatronConfig,
) -> dict[str, Any]:
    """Return the fields of TransformerConfig that this project sets itself."""
    kernels = choose(
        model, megatron, device.type, installed(), cp=parallel.cp, offload_activations=training.offload_activations
    )
    return dict(
        **_network(arch),
        **_hybrid(arch),
        **precision.transformer_fields(model, megatron),
        **precision.recompute_fields(training, arch.experts is not None),
        **_mesh(arch, parallel),
        tp_comm_overlap=megatron.tp_comm_overlap,
        # Megatron's initialisation also marks the parameters that are split over tp. Without the marks the gradient norm counts
        # rank 0's shards only, and perform_initialization=False loses them (0.16). So it runs with methods that fill nothing.
        use_cpu_initialization=device.type == "cpu",
        init_method=_left_to_the_checkpoint,
        output_layer_init_method=_left_to_the_checkpoint,
        embedding_init_method=_left_to_the_checkpoint,
        # gradients are divided once, by the token count of the whole minibatch
        calculate_per_token_loss=True,
        **_mixture_of_experts(arch, kernels.layers == "te"),
        moe_token_dispatcher_type="alltoall",
        moe_enable_routing_replay=replay_experts,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=True,  # SwiGLU as one function that saves only its input; compiled on a GPU
        gradient_accumulation_fusion=kernels.gradient_accumulation != "separate",
        apply_rope_fusion=True,  # Transformer Engine's, or the one in rotary.py
    )


def _network(arch: Architecture) -> dict[str, Any]:
    return {
        "num_layers": arch.num_layers,
        "hidden_size": arch.hidden_size,
        "ffn_hidden_size": arch.ffn_size,
        "num_attention_heads": arch.num_heads,
        "num_query_groups": arch.num_query_groups,
        "kv_channels": arch.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": arch.norm_eps,
        "qk_layernorm": arch.qk_norm,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": arch.qkv_bias,
        "softmax_scale": _softmax_scale(arch),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _hybrid(arch: Architecture) -> dict[str, Any]:
    """Return the TransformerConfig fields of gated attention, zero-centred norms and the gated delta rule.

    `linear_attention_freq` makes checkpoints store every layer by itself. Megatron-Core's own gated delta net stays off:
    it needs CUDA, and it refuses context parallelism and, up to 0.18, packed sequences.
    """
    fields: dict[str, Any] = {}
    if arch.attention_output_gate:
        fields["attention_output_gate"] = True
    if arch.zero_centered_norms:
        fields["layernorm_zero_centered_gamma"] = True
    if arch.linear_layers:
        fields["linear_attention_freq"] = [int(layer in arch.linear_layers) for layer in range(arch.num_layers)]
    return fields


def _softmax_scale(arch: Architecture) -> float | None:
    """Return the factor of the attention scores; None: 1 / sqrt(D).

    YaRN's factor on cosines and sines multiplies queries and keys, so the scores are multiplied by its square.
    """
    if arch.rotary_table is None or arch.rotary_table.attention_factor == 1.0:
        return None
    return arch.rotary_table.attention_factor**2 / math.sqrt(arch.head_dim)


def _mesh(arch: Architecture, parallel: ParallelConfig) -> dict[str, Any]:
    """Return the TransformerConfig fields of the mesh, including the layers of the stages if pp does not divide them."""
    stages = stage_layers(arch.num_layers, parallel.pp)
    uneven = {"num_layers_in_first_pipeline_stage": stages[0], "num_layers_in_last_pipeline_stage": stages[-1]}
    return {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp if parallel.vpp > 1 else None,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.tp,
        "sequence_parallel": parallel.sequence_parallel,
        # packed microbatches differ in length; Megatron requires the all-to-all dispatcher with it, even for dense models
        "variable_seq_lengths": parallel.pp > 1,
        # without both of these, interleaved 1F1B over gloo gives silently wrong activations (Megatron 0.16)
        "overlap_p2p_comm": parallel.vpp > 1,
        "batch_p2p_comm": parallel.vpp == 1,
    } | (uneven if len(set(stages)) > 1 else {})


def _mixture_of_experts(arch: Architecture, transformer_engine: bool) -> dict[str, Any]:
    """Return the TransformerConfig fields of a model with experts. Only Transformer Engine's layers use a grouped GEMM."""
    if arch.experts is None:
        return {}
    return {
        "num_moe_experts": arch.experts.number,
        "moe_ffn_hidden_size": arch.experts.ffn_size,
        "moe_layer_freq": [int(i in arch.experts.sparse_layers) for i in range(arch.num_layers)],
        "moe_router_topk": arch.experts.per_token,
        # a softmax over the chosen experts' logits equals the softmax over all, renormalized over the chosen
        "moe_router_pre_softmax": not arch.experts.normalized,
        "moe_router_dtype": "fp32",  # the choice of experts must not depend on bf16 rounding
        "moe_router_load_balancing_type": "none",  # no auxiliary loss in addition to the objective
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": transformer_engine,
    }


def _left_to_the_checkpoint(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight as it is: the checkpoint overwrites every weight."""
    return weight


def build_chunks(config: TransformerConfig, arch: Architecture, model: ModelConfig, groups: ParallelDims) -> list[GPTModel]:
    """Return this rank's model chunks, one per virtual pipeline stage, on the device, with uninitialised weights."""
    kernels = choose(model, _MEGATRON, groups.device.type, installed(), cp=groups.cp.size)
    linear = choose_linear(model, groups.device.type, installed())
    chunks = []
    for chunk in range(groups.vpp):
        vp_stage = chunk if groups.vpp > 1 else None
        gpt = GPTModel(
            config=config,
            transformer_layer_spec=layer_spec(config, arch, kernels, linear, vp_stage),
            vocab_size=padded_vocab_size(arch.vocab_size, groups.tp.size),
            max_sequence_length=arch.max_positions,
            pre_process=groups.pp.rank == 0 and chunk == 0,
            post_process=groups.is_last_stage and chunk == groups.vpp - 1,
            share_embeddings_and_output_weights=arch.tied_embeddings,
            position_embedding_type="rope",
            rotary_base=arch.rotary_base,
            rotary_percent=arch.rotary_percent,
            parallel_output=True,
            vp_stage=vp_stage,
        )
        if arch.rotary_table is not None:
            gpt.rotary_pos_emb.inv_freq = torch.tensor(arch.rotary_table.inv_freq, device=groups.device)
        chunks.append(gpt.to(groups.device))
    return chunks


def wrap_ddp(
    config: TransformerConfig, chunks: list[GPTModel], megatron: MegatronConfig, platform: str
) -> list[DistributedDataParallel]:
    """Return the chunks in Megatron's DDP: gradients reduced in fp32, optimizer state sharded over dp x cp.

    If gradients are reduced during backward, the pipeline schedule delays that to the backward pass of the last microbatch.
    """
    ddp = DistributedDataParallelConfig(**precision.ddp_fields(megatron, platform) | passed_fields(megatron, "ddp"))
    wrapped = [DistributedDataParallel(config, ddp, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]
    if megatron.reduces_early(platform):
        held = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = held if len(held) > 1 else held[0]
    return wrapped


def build_optimizer(
    cfg: OptimizerConfig, model: ModelConfig, megatron: MegatronConfig, chunks: list[DistributedDataParallel], platform: str
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Return a distributed AdamW with fp32 masters and its schedule. 1-dim parameters have no weight decay."""
    adam = megatron.known_optimizer
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=cfg.lr,
            min_lr=0.0,
            weight_decay=adam.weight_decay,
            adam_beta1=adam.adam_beta1,
            adam_beta2=adam.adam_beta2,
            adam_eps=adam.adam_eps,
            clip_grad=adam.clip_grad,
            **precision.optimizer_fields(model, megatron, platform) | passed_fields(megatron, "optimizer"),
        ),
        chunks,
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=cfg.lr,
        min_lr=0.0,
        lr_warmup_steps=cfg.warmup_steps,
        lr_decay_steps=max(1, cfg.warmup_steps + 1),
        lr_decay_style="constant",
        start_wd=adam.weight_decay,
        end_wd=adam.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def open_user_buffers(fp8: bool, some_bf16: bool, tp: int, tokens: int, hidden_size: int) -> None:
    """Allocate Transformer Engine's user buffers for `megatron.transformer.tp_comm_overlap`, once per process.

    Call it after the mesh is built and before the model (Transformer Engine 2.7 and later).
    """
    from transformer_engine.pytorch.module import base

    modes = [base.UserBufferQuantizationMode.FP8 if fp8 else base.UserBufferQuantizationMode.NONE]
    if some_bf16:
        modes.append(base.UserBufferQuantizationMode.NONE)
    base.initialize_ub(shape=[tokens, hidden_size], tp_size=tp, quantization_modes=modes, bootstrap_backend=dist.get_backend())
