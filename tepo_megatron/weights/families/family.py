"""What a model family is: a table of tensors and a table of config fields, each read in both directions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tepo_megatron.errors import ConversionError
from tepo_megatron.weights.families.rope import read_rope
from tepo_megatron.weights.ops import Architecture, Experts, Op

# Fields that every decoder here has, and what they become.
_MAPPED = frozenset({
    "architectures", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "rope_theta", "rope_scaling",
    "rope_parameters",
})  # fmt: skip

# Fields without effect on log-probs: bookkeeping, initialisation, what generate() or another head would use.
_NO_EFFECT = frozenset({
    "model_type", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "name_or_path", "_attn_implementation",
    "attn_implementation", "torchscript", "tokenizer_class", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id",
    "initializer_range", "use_cache", "keys_to_ignore_at_inference", "output_attentions", "output_hidden_states",
    "return_dict", "use_return_dict", "id2label", "label2id", "problem_type", "chunk_size_feed_forward", "is_decoder",
    "do_sample", "temperature", "top_p", "top_k", "max_length", "repetition_penalty",
})  # fmt: skip

# Fields that change the computation, with the values that are computed. In a list, each element must be one of them.
_REQUIRED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "partial_rotary_factor": (1, None),
    "pruned_heads": ({}, None),
    "layer_types": ("full_attention", None),
}


_MENDS = dict.fromkeys(
    ("sliding_window", "use_sliding_window", "layer_types"),
    "; full attention is the same where no sequence is longer than the window: say so in config.json, or choose another model",
)


@dataclass(frozen=True)
class Row:
    """Megatron parameter name <-> HF tensor names.

    `{layer}` is the layer's number in the whole model, `{expert}` the expert's. layers: those that have the row; dense and
    sparse ones together are all.
    """

    megatron: str
    hf: tuple[str, ...]
    op: Op
    layers: Literal["all", "dense", "sparse"] = "all"

    def instances(self, arch: Architecture) -> Iterator[tuple[str, ...]]:
        """The HF tensor names of each parameter of a model that this row describes."""
        sparse = set(arch.sparse_layers)
        layers = [i for i in range(arch.num_layers) if self.layers == "all" or (i in sparse) == (self.layers == "sparse")]
        experts = range(arch.experts.number) if arch.experts and "{expert}" in self.megatron else (0,)
        for layer in layers if "{layer}" in self.megatron else (0,):
            for expert in experts:
                yield tuple(n.format(layer=layer, expert=expert) for n in self.hf)


@dataclass(frozen=True)
class Family:
    """A model family.

    required: the family's own fields that change the computation -> the values that are computed; no_effect: those that do
    not; mapped: those that `read_experts` reads. defaults, default_theta: what transformers takes for a field that is absent,
    where published files leave it out or it matters. ignored_tensors: a pattern of tensors that old files hold and transformers
    ignores.
    """

    name: str
    rows: tuple[Row, ...]
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    no_effect: frozenset[str] = frozenset()
    mapped: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    default_theta: float | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    read_experts: Callable[[Mapping[str, Any]], Experts] | None = None
    ignored_tensors: str = r"(?!)"

    def architecture(self, hf_config: Mapping[str, Any]) -> Architecture:
        """What a HF config says. Raises ConversionError naming the field that is missing, unknown or not supported."""
        self._check_fields(hf_config)
        try:
            return self._read({**self.defaults, **hf_config})
        except KeyError as e:
            raise ConversionError(f"config.json: {e.args[0]} is missing; the {self.name} family needs it") from None

    def tensor_names(self, arch: Architecture) -> set[str]:
        """All HF tensor names of a model of this architecture."""
        names = {n for row in self.rows for names in row.instances(arch) for n in names}
        return names - {"lm_head.weight"} if arch.tied_embeddings else names

    def ignores(self, tensor: str) -> bool:
        """Whether a HF tensor carries nothing that the model uses."""
        return re.search(self.ignored_tensors, tensor) is not None

    def _check_fields(self, hf_config: Mapping[str, Any]) -> None:
        required = {**_REQUIRED, **self.required}
        for name, value in {**self.defaults, **hf_config}.items():
            if name in required:
                for v in value if isinstance(value, list) else [value]:
                    if v not in required[name]:
                        only = " or ".join(json.dumps(x) for x in required[name])
                        absent = " (what transformers takes when it is absent)" if name not in hf_config else ""
                        raise ConversionError(
                            f"config.json: {name}={v!r}{absent} is not supported for {self.name}; only {only} is"
                            + _MENDS.get(name, "")
                        )
            elif name not in _MAPPED | _NO_EFFECT | self.mapped | self.no_effect:
                raise ConversionError(
                    f"config.json: field {name} is not known for the {self.name} family; it may change what the model "
                    "computes. If it does not, remove it from config.json"
                )

    def _read(self, hf: Mapping[str, Any]) -> Architecture:
        heads, hidden = positive(hf, "num_attention_heads"), positive(hf, "hidden_size")
        head_dim = hf.get("head_dim") or hidden // heads
        groups = heads if hf["num_key_value_heads"] is None else positive(hf, "num_key_value_heads")
        positions = positive(hf, "max_position_embeddings")
        theta, table = read_rope(hf, self.name, self.default_theta, head_dim, positions)
        experts = self.read_experts(hf) if self.read_experts else None
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
            rotary_base=theta,
            tied_embeddings=hf.get("tie_word_embeddings", False),
            qk_norm=self.qk_norm,
            qkv_bias=self.qkv_bias,
            rotary_table=table,
            experts=experts if experts and experts.sparse_layers else None,
        )


def positive(hf: Mapping[str, Any], name: str) -> int:
    """A field that counts something. Raises ConversionError for what is no positive integer, KeyError when it is missing."""
    value = hf[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConversionError(f"config.json: {name}={value!r} is not a positive integer")
    return value
