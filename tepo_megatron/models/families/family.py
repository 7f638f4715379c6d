"""Define a model family as a table of tensors and a table of config fields, and the rows of tensors that families share.

The table of tensors is read in both directions.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tepo_megatron.base.errors import ConversionError
from tepo_megatron.models.families.rope import read_rope
from tepo_megatron.models.ops import (
    Architecture,
    Experts,
    FusedGateUp,
    FusedQKV,
    LinearAttention,
    Op,
    Replicated,
    Split,
    Vocabulary,
)

# Fields of every decoder that `Architecture` represents.
_MAPPED = frozenset({
    "architectures", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "rope_theta", "rope_scaling",
    "rope_parameters",
})  # fmt: skip

# Fields without effect on log-probs: bookkeeping, initialisation, and what only generate() or other heads use.
_NO_EFFECT = frozenset({
    "model_type", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "name_or_path", "_attn_implementation",
    "attn_implementation", "torchscript", "tokenizer_class", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id",
    "initializer_range", "use_cache", "keys_to_ignore_at_inference", "output_attentions", "output_hidden_states",
    "return_dict", "use_return_dict", "id2label", "label2id", "problem_type", "chunk_size_feed_forward", "is_decoder",
    "do_sample", "temperature", "top_p", "top_k", "max_length", "repetition_penalty",
})  # fmt: skip

# Fields that change the computation, with the supported values. In a list, each element must be one of them.
_REQUIRED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "partial_rotary_factor": (1, None),
    "pruned_heads": ({}, None),
    "layer_types": ("full_attention", None),
}


_FIXES = dict.fromkeys(
    ("sliding_window", "use_sliding_window", "layer_types"),
    "; full attention is the same where no sequence is longer than the window: say so in config.json, or choose another model",
)


Layers = Literal["all", "dense", "sparse", "full", "linear"]


@dataclass(frozen=True)
class WeightMapping:
    """A row of the table of tensors: a Megatron parameter name <-> HF tensor names.

    In names, `{layer}` is the layer's index in the whole model and `{expert}` the expert's index.
    """

    megatron: str
    hf: tuple[str, ...]
    op: Op  # converts the tensors in both directions
    # the layers that have the parameter. Every layer is either dense or sparse (with experts), and has either full attention or
    # linear attention.
    layers: Layers = "all"

    def is_in(self, arch: Architecture, layer: int) -> bool:
        """Return whether a layer has the parameter."""
        kinds = "sparse" if layer in arch.sparse_layers else "dense", "linear" if layer in arch.linear_layers else "full"
        return self.layers == "all" or self.layers in kinds

    def instances(self, arch: Architecture) -> Iterator[tuple[str, ...]]:
        """Yield the HF tensor names of each parameter that this row describes in a model of this architecture."""
        layers = [i for i in range(arch.num_layers) if self.is_in(arch, i)]
        experts = range(arch.experts.number) if arch.experts and "{expert}" in self.megatron else (0,)
        for layer in layers if "{layer}" in self.megatron else (0,):
            for expert in experts:
                yield tuple(n.format(layer=layer, expert=expert) for n in self.hf)


@dataclass(frozen=True)
class Family:
    """A model family."""

    name: str
    rows: tuple[WeightMapping, ...]
    # the family's own config fields that change the computation, with the values that are supported
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    no_effect: frozenset[str] = frozenset()  # the family's own config fields that do not change log-probs
    mapped: frozenset[str] = frozenset()  # the config fields that `read_experts` reads
    # values of absent fields, as transformers has them, where published files omit the field or it matters
    defaults: Mapping[str, Any] = field(default_factory=dict)
    default_theta: float | None = None  # the same for RoPE's theta; None: the config must state it
    qk_norm: bool = False  # whether q and k have RMS norms per head
    qkv_bias: bool = False  # whether q, k and v have biases
    # reads the mixture of experts from a HF config; None for dense families
    read_experts: Callable[[Mapping[str, Any]], Experts] | None = None
    # reads the gated delta rule from a HF config; None for families without it
    read_linear_attention: Callable[[Mapping[str, Any]], LinearAttention] | None = None
    attention_output_gate: bool = False  # whether attention has an output gate
    zero_centered_norms: bool = False  # whether RMS norms multiply by 1 + w
    # part of a head's channels that RoPE rotates; None: all, and the config cannot change it
    default_rotary_percent: float | None = None
    # field of config.json that holds the config of the text model; None: config.json itself is that config
    text_config: str | None = None
    outer_fields: frozenset[str] = frozenset()  # the fields next to `text_config` that do not change log-probs of text
    ignored_tensors: str = r"(?!)"  # pattern of HF tensors that old files hold and transformers ignores
    carried_tensors: str = r"(?!)"  # pattern of HF tensors that are not loaded. An export copies them from the base model.

    @property
    def embedding(self) -> str:
        """Return the name of the HF tensor of the embedding."""
        return next(row.hf[0] for row in self.rows if row.megatron == "embedding.word_embeddings.weight")

    def architecture(self, hf_config: Mapping[str, Any]) -> Architecture:
        """Return the architecture that a HF config describes.

        Raises ConversionError, naming the field, when one is missing, unknown or not supported.
        """
        text = self._text_config(hf_config)
        self._check_fields(text)
        try:
            return self._read({**self.defaults, **text})
        except KeyError as e:
            raise ConversionError(f"config.json: {e.args[0]} is missing; the {self.name} family needs it") from None

    def tensor_names(self, arch: Architecture) -> set[str]:
        """Return all HF tensor names of a model of this architecture."""
        names = {n for row in self.rows for names in row.instances(arch) for n in names}
        return names - {"lm_head.weight"} if arch.tied_embeddings else names

    def ignores(self, tensor: str) -> bool:
        """Return whether the model makes no use of a HF tensor."""
        return re.search(self.ignored_tensors, tensor) is not None or self.carries(tensor)

    def carries(self, tensor: str) -> bool:
        """Return whether an export copies a HF tensor from the base model."""
        return re.search(self.carried_tensors, tensor) is not None

    def _text_config(self, hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the config of the text model, with what the fields next to it say about that model."""
        if self.text_config is None:
            return hf_config
        text = hf_config.get(self.text_config)
        if not isinstance(text, Mapping):
            raise ConversionError(f"config.json: {self.text_config} is missing; the {self.name} family needs it")
        tied, outer = "tie_word_embeddings", {k: v for k, v in hf_config.items() if k != self.text_config}
        for name in sorted(outer.keys() - _NO_EFFECT - self.outer_fields - {"architectures", tied}):
            raise ConversionError(
                f"config.json: field {name} is not known next to {self.text_config} for the {self.name} family; it may change "
                "what the model computes. If it does not, remove it from config.json"
            )
        if text.get(tied, outer.get(tied, False)) != outer.get(tied, False):  # transformers reads the outer one
            raise ConversionError(
                f"config.json: {tied}={outer.get(tied, False)} and {self.text_config}.{tied}={text[tied]} differ; "
                "give both the value that the weights have: true if there is no lm_head.weight"
            )
        return {**text, tied: outer.get(tied, False)}

    def _check_fields(self, hf_config: Mapping[str, Any]) -> None:
        """Raise ConversionError for a field that is unknown or has a value that is not supported."""
        partial = set() if self.default_rotary_percent is None else {"partial_rotary_factor"}
        required = {k: v for k, v in {**_REQUIRED, **self.required}.items() if k not in partial | self.mapped}
        for name, value in {**self.defaults, **hf_config}.items():
            if name in required:
                for v in value if isinstance(value, list) else [value]:
                    if v not in required[name]:
                        only = " or ".join(json.dumps(x) for x in required[name])
                        absent = " (what transformers takes when it is absent)" if name not in hf_config else ""
                        raise ConversionError(
                            f"config.json: {name}={v!r}{absent} is not supported for {self.name}; only {only} is"
                            + _FIXES.get(name, "")
                        )
            elif name not in _MAPPED | _NO_EFFECT | self.mapped | self.no_effect | partial:
                raise ConversionError(
                    f"config.json: field {name} is not known for the {self.name} family; it may change what the model "
                    "computes. If it does not, remove it from config.json"
                )

    def _read(self, hf: Mapping[str, Any]) -> Architecture:
        """Read the architecture. Raises KeyError for a missing field, ConversionError for a wrong value."""
        heads, hidden = positive(hf, "num_attention_heads"), positive(hf, "hidden_size")
        head_dim = hf.get("head_dim") or hidden // heads
        groups = heads if hf["num_key_value_heads"] is None else positive(hf, "num_key_value_heads")
        positions = positive(hf, "max_position_embeddings")
        rope = read_rope(hf, self.name, self.default_theta, head_dim, positions, self.default_rotary_percent)
        experts = self.read_experts(hf) if self.read_experts else None
        linear = self.read_linear_attention(hf) if self.read_linear_attention else None
        if experts and experts.normalized and experts.per_token == 1:
            raise ConversionError("config.json: num_experts_per_tok=1 with normalized weights leaves the router no gradient")
        return Architecture(
            num_layers=positive(hf, "num_hidden_layers"),
            hidden_size=hidden,
            ffn_size=positive(hf, "intermediate_size"),
            num_heads=heads,
            num_query_groups=groups,
            head_dim=head_dim,
            vocab_size=positive(hf, "vocab_size"),
            max_positions=positions,
            norm_eps=hf["rms_norm_eps"],
            rotary_base=rope.theta,
            tied_embeddings=hf.get("tie_word_embeddings", False),
            qk_norm=self.qk_norm,
            qkv_bias=self.qkv_bias,
            rotary_table=rope.table,
            experts=experts if experts and experts.sparse_layers else None,
            linear_attention=linear if linear and linear.layers else None,
            attention_output_gate=self.attention_output_gate,
            rotary_percent=rope.percent,
            zero_centered_norms=self.zero_centered_norms,
        )


def positive(hf: Mapping[str, Any], name: str) -> int:
    """Return a config field that counts something.

    Raises:
        ConversionError: the value is not a positive integer.
        KeyError: the field is missing.
    """
    value = hf[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConversionError(f"config.json: {name}={value!r} is not a positive integer")
    return value


_MEGATRON, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."


def _qkv(part: str) -> WeightMapping:
    hf = tuple(_HF + f"self_attn.{x}_proj.{part}" for x in "qkv")
    return WeightMapping(_MEGATRON + f"self_attention.linear_qkv.{part}", hf, FusedQKV())


# Embeddings and norms
OUTER = (
    WeightMapping("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Vocabulary()),
    WeightMapping("output_layer.weight", ("lm_head.weight",), Vocabulary()),
    WeightMapping("decoder.final_layernorm.weight", ("model.norm.weight",), Replicated()),
    WeightMapping(_MEGATRON + "input_layernorm.weight", (_HF + "input_layernorm.weight",), Replicated()),
    WeightMapping(_MEGATRON + "pre_mlp_layernorm.weight", (_HF + "post_attention_layernorm.weight",), Replicated()),
)

# With the projections of attention
DECODER = (
    *OUTER,
    _qkv("weight"),
    WeightMapping(_MEGATRON + "self_attention.linear_proj.weight", (_HF + "self_attn.o_proj.weight",), Split(dim=1)),
)

QKV_BIAS = (_qkv("bias"),)

QK_NORM = (
    WeightMapping(_MEGATRON + "self_attention.q_layernorm.weight", (_HF + "self_attn.q_norm.weight",), Replicated()),
    WeightMapping(_MEGATRON + "self_attention.k_layernorm.weight", (_HF + "self_attn.k_norm.weight",), Replicated()),
)


def swiglu(layers: Literal["all", "dense"] = "all") -> tuple[WeightMapping, ...]:
    """Return the rows of a dense SwiGLU feed-forward block."""
    gate_up = tuple(_HF + f"mlp.{x}_proj.weight" for x in ("gate", "up"))
    return (
        WeightMapping(_MEGATRON + "mlp.linear_fc1.weight", gate_up, FusedGateUp(), layers),
        WeightMapping(_MEGATRON + "mlp.linear_fc2.weight", (_HF + "mlp.down_proj.weight",), Split(dim=1), layers),
    )


def experts(block: str, gate: str, up: str, down: str) -> tuple[WeightMapping, ...]:
    """Return the rows of a router and SwiGLU experts."""
    of_expert = _HF + block + ".experts.{expert}."
    mine, gate_up = _MEGATRON + "mlp.experts.{expert}.", tuple(of_expert + f"{x}.weight" for x in (gate, up))
    return (
        WeightMapping(_MEGATRON + "mlp.router.weight", (_HF + block + ".gate.weight",), Replicated(), "sparse"),
        WeightMapping(mine + "linear_fc1.weight", gate_up, FusedGateUp(), "sparse"),
        WeightMapping(mine + "linear_fc2.weight", (of_expert + f"{down}.weight",), Split(dim=1), "sparse"),
    )
