"""Define a model family as a table of tensors and a table of config fields. The table of tensors is read in both directions."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tepo_megatron.errors import ConversionError
from tepo_megatron.weights.families.rope import read_rope
from tepo_megatron.weights.ops import Architecture, Experts, Op

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


@dataclass(frozen=True)
class WeightMapping:
    """A row of the table of tensors: a Megatron parameter name <-> HF tensor names.

    In names, `{layer}` is the layer's index in the whole model and `{expert}` the expert's index.

    Attributes:
        megatron: name of the Megatron parameter.
        hf: names of its HF tensors.
        op: converts the tensors in both directions.
        layers: the layers that have the parameter; every layer is either dense or sparse (with experts).
    """

    megatron: str
    hf: tuple[str, ...]
    op: Op
    layers: Literal["all", "dense", "sparse"] = "all"

    def instances(self, arch: Architecture) -> Iterator[tuple[str, ...]]:
        """Yield the HF tensor names of each parameter that this row describes in a model of this architecture."""
        sparse = set(arch.sparse_layers)
        layers = [i for i in range(arch.num_layers) if self.layers == "all" or (i in sparse) == (self.layers == "sparse")]
        experts = range(arch.experts.number) if arch.experts and "{expert}" in self.megatron else (0,)
        for layer in layers if "{layer}" in self.megatron else (0,):
            for expert in experts:
                yield tuple(n.format(layer=layer, expert=expert) for n in self.hf)


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        name: its name in messages.
        rows: the table of tensors.
        required: the family's own config fields that change the computation, with the values that are supported.
        no_effect: the family's own config fields that do not change log-probs.
        mapped: the config fields that `read_experts` reads.
        defaults: values of absent fields, as transformers has them, where published files omit the field or it matters.
        default_theta: the same for RoPE's theta; None: the config must state it.
        qk_norm: whether q and k have RMS norms per head.
        qkv_bias: whether q, k and v have biases.
        read_experts: reads the mixture of experts from a HF config; None for dense families.
        ignored_tensors: pattern of HF tensors that old files hold and transformers ignores.
    """

    name: str
    rows: tuple[WeightMapping, ...]
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
        """Return the architecture that a HF config describes.

        Raises ConversionError, naming the field, when one is missing, unknown or not supported.
        """
        self._check_fields(hf_config)
        try:
            return self._read({**self.defaults, **hf_config})
        except KeyError as e:
            raise ConversionError(f"config.json: {e.args[0]} is missing; the {self.name} family needs it") from None

    def tensor_names(self, arch: Architecture) -> set[str]:
        """Return all HF tensor names of a model of this architecture."""
        names = {n for row in self.rows for names in row.instances(arch) for n in names}
        return names - {"lm_head.weight"} if arch.tied_embeddings else names

    def ignores(self, tensor: str) -> bool:
        """Return whether the model makes no use of a HF tensor."""
        return re.search(self.ignored_tensors, tensor) is not None

    def _check_fields(self, hf_config: Mapping[str, Any]) -> None:
        """Raise ConversionError for a field that is unknown or has a value that is not supported."""
        required = {**_REQUIRED, **self.required}
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
            elif name not in _MAPPED | _NO_EFFECT | self.mapped | self.no_effect:
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
    """Return a config field that counts something.

    Args:
        hf: the HF config.
        name: name of the field.

    Raises:
        ConversionError: the value is not a positive integer.
        KeyError: the field is missing.
    """
    value = hf[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConversionError(f"config.json: {name}={value!r} is not a positive integer")
    return value
