"""Fields of Megatron-Core's configs that this project sets itself, and what sets each.

A config that passes one of them through would contradict a key of this project, or break a rule that the loss depends on.
"""

from collections.abc import Mapping

_NETWORK = "it follows from config.json in model.path"
_PRECISION = "it follows from model.precision"
_RECOMPUTE = "it follows from training.recompute"
_LENGTHS = "packed microbatches differ in length"
_FUSION = "the layers of this project need one value"
_INITIALIZATION = "the weights of model.path overwrite all weights"
_HOOK = "the training step sets this function"
_DISTRIBUTED = "gradients are summed in fp32, and masters and moments are divided over dp x cp"

OWNED: Mapping[str, Mapping[str, str]] = {
    "transformer": {
        **dict.fromkeys((
            "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
            "normalization", "layernorm_epsilon", "qk_layernorm", "gated_linear_unit", "activation_func", "add_bias_linear",
            "add_qkv_bias", "softmax_scale", "num_moe_experts", "moe_ffn_hidden_size", "moe_layer_freq", "moe_router_topk",
            "moe_router_pre_softmax",
        ), _NETWORK),
        **dict.fromkeys(("hidden_dropout", "attention_dropout"), "dropout would change every log-prob; it is 0"),
        "tensor_model_parallel_size": "it is parallel.tp",
        "pipeline_model_parallel_size": "it is parallel.pp",
        "virtual_pipeline_model_parallel_size": "it is parallel.vpp",
        "context_parallel_size": "it is parallel.cp",
        "expert_model_parallel_size": "it is parallel.ep",
        "expert_tensor_parallel_size": "it is parallel.tp",
        "sequence_parallel": "it is parallel.sequence_parallel",
        **dict.fromkeys(("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
                        "it follows from parallel.pp"),
        **dict.fromkeys(("variable_seq_lengths", "overlap_p2p_comm", "batch_p2p_comm"), _LENGTHS),
        **dict.fromkeys((
            "params_dtype", "pipeline_dtype", "bf16", "fp16", "fp8", "fp8_recipe", "fp8_param", "fp8_wgrad",
            "fp8_dot_product_attention", "fp8_multi_head_attention", "fp8_amax_history_len", "fp8_amax_compute_algo",
        ), _PRECISION),
        **dict.fromkeys(("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"), _RECOMPUTE),
        **dict.fromkeys((
            "use_cpu_initialization", "perform_initialization", "init_method", "output_layer_init_method",
            "embedding_init_method",
        ), _INITIALIZATION),
        "calculate_per_token_loss": "gradients are divided once, by the token count of the whole minibatch",
        "moe_token_dispatcher_type": "packed microbatches of several stages need alltoall",
        "moe_enable_routing_replay": "it is rollout.replay_experts",
        "moe_router_dtype": "the choice of experts must not depend on bf16 rounding",
        **dict.fromkeys(("moe_router_load_balancing_type", "moe_aux_loss_coeff"),
                        "the objective has no auxiliary loss of the routers"),
        "moe_grouped_gemm": "it follows from model.attention, which chooses the layers",
        **dict.fromkeys(("masked_softmax_fusion", "bias_dropout_fusion", "bias_activation_fusion", "apply_rope_fusion"),
                        _FUSION),
        **dict.fromkeys(("no_sync_func", "finalize_model_grads_func", "grad_scale_func"), _HOOK),
    },
    "ddp": {
        **dict.fromkeys(("grad_reduce_in_fp32", "use_distributed_optimizer"), _DISTRIBUTED),
        "average_in_collective": "gradients are divided once, by the token count of the whole minibatch",
        "fp8_param_gather": _PRECISION,
    },
    "optimizer": {
        "optimizer": "it is adam",
        "lr": "it is optimizer.lr",
        "min_lr": "the rate is constant after optimizer.warmup_steps",
        **dict.fromkeys(("params_dtype", "bf16", "fp16"), _PRECISION),
        **dict.fromkeys(("use_distributed_optimizer", "main_params_dtype", "main_grads_dtype"), _DISTRIBUTED),
        "overlap_param_gather": "it is megatron.ddp.overlap_param_gather",
        "use_precision_aware_optimizer": "it follows from exp_avg_dtype, exp_avg_sq_dtype and optimizer_offload_fraction",
        **dict.fromkeys(("optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d"),
                        "it follows from optimizer_offload_fraction"),
    },
}  # fmt: skip
