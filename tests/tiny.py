"""Random models of half a million parameters or less with a character tokenizer, as Hugging Face directories."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3Config,
)

VOCAB_SIZE = 64
PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
CHARACTERS = "0123456789+-*/=?.,() \n\\{}" + "abcdefghijklmnopqrstuvwxyz"


def char_tokenizer(words: int = 0) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character and VOCAB_SIZE ids; ids 0-3 are pad, bos, eos, unknown.

    `words`: number of further ids, whose tokens are ~0, ~1, ... in hexadecimal.
    """
    tokens = [PAD, BOS, EOS, UNKNOWN, *CHARACTERS]
    tokens += [f"<extra_{i}>" for i in range(len(tokens), VOCAB_SIZE)] + [f"~{i:x}" for i in range(words)]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token=UNKNOWN))
    pattern = Regex(r"~[0-9a-f]+|[\s\S]" if words else r"[\s\S]")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


def tiny_qwen3(
    path: Path,
    *,
    tied: bool = True,
    seed: int = 0,
    layers: int = 3,
    scale: float = 4.0,
    vocab_size: int = VOCAB_SIZE,
    **sizes: int,
) -> PreTrainedModel:
    """Write a Qwen3 and its tokenizer to `path`; return the model (fp32, eval)."""
    shape = {
        "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    } | sizes  # fmt: skip
    config = Qwen3Config(
        vocab_size=vocab_size,
        num_hidden_layers=layers,
        **shape,
        max_position_embeddings=512,
        rope_theta=10000.0,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="sdpa",
    )
    return tiny_model(path, config, seed=seed, scale=scale)


def hybrid_config(**fields: Any) -> Qwen3_5TextConfig:
    """Return the config of a small Qwen3.5 with odd sizes: three layers in four have the gated delta rule.

    Four key heads let every layout split them: tp * cp <= 4.
    """
    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 72, "intermediate_size": 136, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 24, "linear_num_key_heads": 4,
        "linear_num_value_heads": 8, "linear_key_head_dim": 12, "linear_value_head_dim": 10, "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "eager",
    }  # fmt: skip
    return Qwen3_5TextConfig(**shape | fields)


def tiny_multimodal(path: Path, text: Qwen3_5TextConfig, *, seed: int = 0, scale: float = 4.0) -> PreTrainedModel:
    """Write a random Qwen3.5 with a vision tower and a layer for the prediction of several tokens; return the text model."""
    model = tiny_model(path, text, seed=seed, scale=scale)
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": text.hidden_size,
        "num_position_embeddings": 16,
    }  # fmt: skip
    names = ("image", "video", "vision_start", "vision_end")
    fields = {f"{name}_token_id": text.vocab_size - 4 + i for i, name in enumerate(names)}
    fields |= {"text_config": text.to_dict(), "vision_config": vision, "tie_word_embeddings": text.tie_word_embeddings}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 1)
        whole = Qwen3_5ForConditionalGeneration(Qwen3_5Config(**fields))
        width = text.hidden_size
        extra = {"mtp.fc.weight": torch.randn(width, 2 * width), "mtp.norm.weight": torch.randn(width)}
    whole.model.language_model.load_state_dict(model.model.state_dict())
    whole.lm_head.load_state_dict(model.lm_head.state_dict())
    whole.float().save_pretrained(path)
    weights = load_file(path / "model.safetensors")
    save_file(weights | extra, path / "model.safetensors", metadata={"format": "pt"})
    return model


def tiny_model(path: Path, config: PretrainedConfig, *, seed: int = 0, scale: float = 4.0) -> PreTrainedModel:
    """Write a random model of this config, with the character tokenizer, to `path`; return the model (fp32, eval).

    The global random state stays unchanged.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).float().eval()
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.uniform_(-3, 1)  # heads that remember a whole sequence, and heads that forget within two tokens
            elif name.endswith("conv1d.weight"):
                continue
            elif weight.ndim > 1:
                weight.mul_(scale)
            else:  # a norm of all ones, or a bias of all zeros, would hide one that is never loaded
                weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(path)
    char_tokenizer().save_pretrained(path)
    return model


def change_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the weights of a model of one file."""
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file({k: v.contiguous() for k, v in weights.items()}, path / "model.safetensors", {"format": "pt"})


def change_config(path: Path, **fields: object) -> None:
    """Set fields of config.json; "absent" removes one."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({k: v for k, v in (config | fields).items() if v != "absent"}))


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a model."""
    return {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}
