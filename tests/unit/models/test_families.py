"""The families' tables: every config field mapped, required or without effect; rope; tensor names; how a model fits a mesh."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tepo_megatron.actor.layout import check_layout
from tepo_megatron.base.errors import ConfigError, ConversionError
from tepo_megatron.config import ParallelConfig
from tepo_megatron.models.families import check_tokenizer, find_family
from tepo_megatron.models.gather import bind
from tepo_megatron.models.ops import Architecture

_COMMON = {
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "initializer_range": 0.02,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
}  # fmt: skip


def published(name: str, model_type: str, sizes: tuple[int, ...], eps: float, positions: int, **fields: Any) -> dict[str, Any]:
    hidden, ffn, layers, heads, groups, vocab = sizes
    return _COMMON | {
        "architectures": [name], "model_type": model_type, "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": groups, "vocab_size": vocab,
        "rms_norm_eps": eps, "max_position_embeddings": positions,
    } | fields  # fmt: skip


_WINDOW = {"sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28}
_LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
# the sizes that transformers 5.19 gives as those of Qwen3.5-9B, and the fields that vLLM 0.32 reads
QWEN3_5 = published(
    "Qwen3_5ForCausalLM", "qwen3_5_text", (4096, 12288, 32, 16, 4, 248320), 1e-6, 262144, attention_bias=False, head_dim=256,
    attn_output_gate=True, output_gate_type="swish", full_attention_interval=4, mamba_ssm_dtype="float32", mlp_only_layers=[],
    linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16,
    linear_num_value_heads=32, layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 8, mtp_num_hidden_layers=1,
    mtp_use_dedicated_embeddings=False, rope_parameters={
        "rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
)  # fmt: skip
# as the config.json of published models say, transformers 4 style
PUBLISHED = {
    "Qwen2.5-1.5B": published(
        "Qwen2ForCausalLM", "qwen2", (1536, 8960, 28, 12, 2, 151936), 1e-6, 131072,
        rope_theta=1000000.0, tie_word_embeddings=True, use_mrope=False, **_WINDOW,
    ),
    "Qwen3-14B": published(
        "Qwen3ForCausalLM", "qwen3", (5120, 17408, 40, 40, 8, 151936), 1e-6, 40960, attention_bias=False, head_dim=128,
        rope_scaling=None, rope_theta=1000000, **(_WINDOW | {"sliding_window": None}),
    ),
    "Qwen3-30B-A3B": published(
        "Qwen3MoeForCausalLM", "qwen3_moe", (2048, 6144, 48, 32, 4, 151936), 1e-6, 40960, attention_bias=False, head_dim=128,
        decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True, num_experts=128,
        num_experts_per_tok=8, output_router_logits=False, router_aux_loss_coef=0.001, rope_scaling=None,
        rope_theta=1000000.0, **(_WINDOW | {"sliding_window": None}),
    ),
    "Llama-2-7b": published(
        "LlamaForCausalLM", "llama", (4096, 11008, 32, 32, 32, 32000), 1e-5, 4096, pretraining_tp=1, rope_scaling=None,
    ),
    "Llama-3.1-8B": published(
        "LlamaForCausalLM", "llama", (4096, 14336, 32, 32, 8, 128256), 1e-5, 131072, attention_bias=False, mlp_bias=False,
        pretraining_tp=1, rope_scaling=_LLAMA3, rope_theta=500000.0,
    ),
    "Mistral-7B-v0.3": published(
        "MistralForCausalLM", "mistral", (4096, 14336, 32, 32, 8, 32768), 1e-5, 32768, rope_theta=1000000.0,
        sliding_window=None,
    ),
    "Mixtral-8x7B": published(
        "MixtralForCausalLM", "mixtral", (4096, 14336, 32, 32, 8, 32000), 1e-5, 32768, rope_theta=1000000.0,
        sliding_window=None, num_experts_per_tok=2, num_local_experts=8, output_router_logits=False,
        router_aux_loss_coef=0.02,
    ),
    "Qwen3.5-9B": QWEN3_5,
}  # fmt: skip


def read(config: dict[str, Any]) -> Architecture:
    return find_family(config).architecture(config)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name: str) -> None:
    config = PUBLISHED[name]
    arch = read(config)
    assert (arch.hidden_size, arch.num_layers, arch.vocab_size) == tuple(
        config[k] for k in ("hidden_size", "num_hidden_layers", "vocab_size")
    )
    assert arch.head_dim == config.get("head_dim", 128) and arch.tied_embeddings == (name == "Qwen2.5-1.5B")
    assert arch.qkv_bias == name.startswith("Qwen2") and arch.qk_norm == name.startswith("Qwen3")
    theta = config.get("rope_theta", config.get("rope_parameters", {}).get("rope_theta", 10000.0))
    assert arch.rotary_base == theta and (arch.rotary_table is None) == (name != "Llama-3.1-8B")
    assert (arch.experts is None) == (name not in ("Qwen3-30B-A3B", "Mixtral-8x7B"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_made_up_field_is_refused(name: str) -> None:
    family = find_family(PUBLISHED[name]).name
    with pytest.raises(ConversionError, match=f"config.json: field attention_sink_tokens is not known for the {family} family"):
        read(PUBLISHED[name] | {"attention_sink_tokens": 4})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("Qwen2.5-1.5B", {"use_sliding_window": True}, "use_sliding_window=True .* only false is; full attention is the same"),
        ("Qwen2.5-1.5B", {"use_mrope": True}, "use_mrope=True"),
        ("Qwen2.5-1.5B", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types='sliding_attention'"),
        ("Qwen3-14B", {"attention_bias": True}, "attention_bias=True is not supported for qwen3; only false is"),
        ("Qwen3-14B", {"hidden_act": "gelu"}, "hidden_act='gelu' .* only \"silu\" is"),
        ("Qwen3-14B", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ("Qwen3-14B", {"rms_norm_eps": ...}, "rms_norm_eps is missing; the qwen3 family needs it"),
        ("Qwen3-14B", {"vocab_size": "151936"}, "vocab_size='151936' is not a positive integer"),
        ("Qwen3-14B", {"quantization_config": {"bits": 4}}, "field quantization_config is not known"),
        ("Llama-3.1-8B", {"mlp_bias": True}, "mlp_bias=True"),
        ("Llama-3.1-8B", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("Mistral-7B-v0.3", {"sliding_window": 4096}, "sliding_window=4096 is not .* only null is; full attention is the same"),
        ("Mistral-7B-v0.3", {"sliding_window": ...}, r"sliding_window=4096 \(what transformers takes when it is absent\)"),
        ("Mixtral-8x7B", {"router_jitter_noise": 0.01}, "router_jitter_noise=0.01"),
        ("Mixtral-8x7B", {"num_experts_per_tok": 1}, "num_experts_per_tok=1 with normalized weights"),
        ("Mixtral-8x7B", {"num_local_experts": ...}, "num_local_experts is missing"),
        ("Qwen3-30B-A3B", {"num_local_experts": 64}, "num_experts=128 and num_local_experts=64 differ"),
        ("Qwen3-30B-A3B", {"shared_expert_intermediate_size": 64}, "field shared_expert_intermediate_size is not known"),
        ("Llama-3.1-8B", {"architectures": ["FalconForCausalLM"]}, "architecture FalconForCausalLM is not supported"),
        # rope
        ("Qwen3-14B", {"rope_theta": ...}, "neither rope_theta nor rope_parameters.rope_theta"),
        (
            "Qwen3-14B",
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_scaling.rope_type='dynamic' is not supported",
        ),
        ("Qwen3-14B", {"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type='longrope' is not supported"),
        ("Qwen3-14B", {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing; rope_type=linear needs it"),
        ("Qwen3-14B", {"rope_scaling": {"type": "default", "mrope_section": [1]}}, "field rope_scaling.mrope_section is not"),
        ("Qwen3-14B", {"rope_parameters": {"rope_theta": 5.0}}, "rope_theta=1000000 and rope_parameters.rope_theta=5.0 differ"),
        ("Llama-3.1-8B", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters and rope_scaling differ"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(name: str, change: dict[str, Any], message: str) -> None:
    config = {k: v for k, v in (PUBLISHED[name] | change).items() if v is not ...}
    with pytest.raises(ConversionError, match=f"config.json: .*{message}"):
        read(config)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "llama3", **_LLAMA3},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192, "attention_factor": 1.25},
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.5,
         "beta_fast": 16, "beta_slow": 2, "truncate": False},
    ],
    ids=str,
)  # fmt: skip
def test_frequencies_are_those_of_transformers(rope: dict[str, Any]) -> None:
    config = PUBLISHED["Llama-3.1-8B"] | {"rope_scaling": rope}
    table = read(config).rotary_table
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    kind = type(model.model.rotary_emb)
    theirs = kind(model.config)
    assert table is not None and torch.equal(torch.tensor(table.inv_freq), theirs.inv_freq)
    assert table.attention_factor == theirs.attention_scaling


TINY = {
    "hidden_size": 24, "intermediate_size": 10, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 10, "vocab_size": 70,
}  # fmt: skip
TINY_HYBRID = {
    "head_dim": 8, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_key_head_dim": 4, "linear_value_head_dim": 5,
}  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_table_names_the_tensors_that_transformers_writes(tmp_path: Path, name: str, tied: bool) -> None:
    config = PUBLISHED[name] | TINY | {"tie_word_embeddings": tied}
    config |= {"num_experts": 4, "moe_intermediate_size": 6, "mlp_only_layers": [1]} if name == "Qwen3-30B-A3B" else {}
    config |= TINY_HYBRID if name == "Qwen3.5-9B" else {}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(tmp_path)
    from safetensors import safe_open

    written = json.loads((tmp_path / "config.json").read_text())
    assert read(written) == read(config)  # whichever version's names the fields have
    with safe_open(tmp_path / "model.safetensors", "pt") as f:
        assert set(f.keys()) == find_family(written).tensor_names(read(written))


@pytest.mark.parametrize(
    ("local", "name", "hf"),
    [
        (
            "mlp.experts.local_experts.1.linear_fc2.weight",
            "mlp.experts.4.linear_fc2.weight",
            ["mlp.experts.4.down_proj.weight"],
        ),
        (
            "mlp.experts.linear_fc1.weight2",  # Transformer Engine's grouped one
            "mlp.experts.5.linear_fc1.weight",
            ["mlp.experts.5.gate_proj.weight", "mlp.experts.5.up_proj.weight"],
        ),
        ("mlp.linear_fc1.weight", "mlp.linear_fc1.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"]),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight", ["post_attention_layernorm.weight"]),
    ],
)
def test_a_parameter_is_named_by_its_place_in_the_whole_model(local: str, name: str, hf: list[str]) -> None:
    """The rank's second layer is the model's eighth, and it has the fourth to the sixth of its experts."""
    layer = SimpleNamespace(layer_number=8, mlp=SimpleNamespace(local_expert_indices=[3, 4, 5]))
    parameters = {f"decoder.layers.1.{local}": torch.nn.Parameter(torch.zeros(1))}
    chunk: Any = SimpleNamespace(decoder=SimpleNamespace(layers=[None, layer]), named_parameters=parameters.items)
    config = PUBLISHED["Qwen3-30B-A3B"]
    (binding,) = bind([chunk], find_family(config), read(config))
    assert binding.name == f"decoder.layers.7.{name}"
    assert binding.hf_names == tuple(f"model.layers.7.{each}" for each in hf)


@pytest.mark.parametrize("kind", ["dict", "unigram", "added"])
def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path, kind: str) -> None:
    vocab: Any = {"a": 0, "b": 1, "<big>": 2}
    content = {"model": {"vocab": vocab}, "added_tokens": []}
    if kind == "unigram":
        content["model"]["vocab"] = [["a", 0.0], ["b", -1.0], ["<big>", -2.0]]
    elif kind == "added":
        del vocab["<big>"]
        content["added_tokens"] = [{"id": 2, "content": "<big>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    check_tokenizer(tmp_path, 3)
    with pytest.raises(ConversionError, match=r"tokenizer.json: token '<big>' has id 2, but config.json's vocab_size=2"):
        check_tokenizer(tmp_path, 2)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"tp": 3}, "parallel.tp=3 does not divide num_query_groups=4; use 1, 2 or 4"),
        ({"tp": 2}, "parallel.tp=2 with experts needs parallel.sequence_parallel=true"),
        ({"ep": 3, "dp": 3}, "parallel.ep=3 does not divide the model's 128 experts; use 1, 2, 4, 8"),
        ({"pp": 49}, "parallel.pp=49 exceeds num_layers=48; use at most 48"),
        ({"pp": 5, "vpp": 2}, r"parallel.pp \* parallel.vpp=10 does not divide num_layers=48; use 1, 2, .* or 48, or vpp=1"),
        ({"ep": 2, "dp": 2}, "parallel.ep=2: the model has no experts"),
    ],
)
def test_layouts_that_do_not_fit_the_model_are_refused(parallel: dict[str, Any], message: str) -> None:
    model = "Qwen2.5-1.5B" if "no experts" in message else "Qwen3-30B-A3B"
    with pytest.raises(ConfigError, match=message):
        check_layout(read(PUBLISHED[model]), ParallelConfig(**parallel))
