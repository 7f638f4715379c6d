"""The model of `make smollm`: the hub's folder, or a GGUF file that becomes the folder that it was made of."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import gguf
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from examples.smollm.model import HUB, LAYER_NAMES, from_gguf

HIDDEN, HEADS, GROUPS, LAYERS = 64, 4, 2, 2
WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "12"]
FACTS = {
    "context_length": 128, "embedding_length": HIDDEN, "block_count": LAYERS, "feed_forward_length": 128,
    "vocab_size": len(WORDS), "head_count": HEADS, "head_count_kv": GROUPS, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 1e5,
    "rope_dimension_count": HIDDEN // HEADS,
}  # fmt: skip


def write_gguf(model: LlamaForCausalLM, file: Path, pre: str = "smollm") -> None:
    """Write a model as llama.cpp's converter does: its names, and the halves of each head interleaved."""
    writer = gguf.GGUFWriter(file, "llama")
    for name, value in FACTS.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(WORDS)
    writer.add_token_types([3] * 3 + [1] * (len(WORDS) - 3))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    names = {hf: f"blk.{{}}.{name}.weight" for name, hf in LAYER_NAMES.items()}
    for name, weight in model.state_dict().items():
        parts = name.removesuffix(".weight").split(".")
        if name == "lm_head.weight":
            continue  # tied
        if parts[1] == "layers":
            kind = ".".join(parts[3:])
            heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": GROUPS}.get(kind)
            if heads:
                weight = weight.view(heads, 2, -1, HIDDEN).transpose(1, 2).reshape(weight.shape)
            writer.add_tensor(names[kind].format(parts[2]), weight.numpy())
        else:
            writer.add_tensor({"embed_tokens": "token_embd", "norm": "output_norm"}[parts[1]] + ".weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=HIDDEN,
            intermediate_size=128,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=GROUPS,
            max_position_embeddings=128,
            rope_theta=1e5,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        )
    )


def test_the_folder_computes_what_the_model_computed(model: LlamaForCausalLM, tmp_path: Path) -> None:
    write_gguf(model, tmp_path / "m.gguf")
    from_gguf(tmp_path / "m.gguf", tmp_path / "hf")
    again, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=0)
    assert tokenizer.tokenize("ab12") == ["ab", "1", "2"], "every digit is a token, though the vocabulary has 12"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}])["input_ids"][-1] == tokenizer.eos_token_id == 2
    assert again.generation_config.eos_token_id == 2 and again.config.tie_word_embeddings


def test_another_kind_of_file_is_refused(model: LlamaForCausalLM, tmp_path: Path) -> None:
    write_gguf(model, tmp_path / "m.gguf", pre="llama-bpe")
    with pytest.raises(SystemExit, match=r"holds \('llama', 'gpt2', 'llama-bpe'\)"):
        from_gguf(tmp_path / "m.gguf", tmp_path / "hf")


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """What `huggingface_hub` asks for the model: its files at a commit, and each of them."""

    files: dict[str, bytes]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, headers = self.path.partition("?")[0], {}
        resolve = f"/{HUB}/resolve/{COMMIT}/"
        if path.startswith(f"/api/models/{HUB}/tree/{COMMIT}"):
            oids = {name: hashlib.sha1(data).hexdigest() for name, data in self.files.items()}
            tree = [{"type": "file", "path": name, "size": len(self.files[name]), "oid": oid} for name, oid in oids.items()]
            body = json.dumps(tree).encode()
        elif path.startswith(f"/api/models/{HUB}"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in self.files.items()]
            body = json.dumps({"id": HUB, "modelId": HUB, "sha": COMMIT, "siblings": siblings}).encode()
        elif path.startswith(resolve) and path.removeprefix(resolve) in self.files:
            body = self.files[path.removeprefix(resolve)]
            headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
        else:
            self.send_error(404)
            return
        self.send_response(200)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def test_the_hub_is_taken_where_it_answers(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """Serve the files of a repository, of which one has a form that is not loaded; the tool runs as a user runs it."""
    model.save_pretrained(tmp_path / "repository")
    wanted = {path.name: path.read_bytes() for path in (tmp_path / "repository").iterdir()}
    hub = type("TheHub", (Hub,), {"files": wanted | {"pytorch_model.bin": b"pickle", "README.md": b"# SmolLM2"}})
    with ThreadingHTTPServer(("127.0.0.1", 0), hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        unset = {name: value for name, value in os.environ.items() if not name.upper().startswith(("HF_", "HTTP", "ALL_PROXY"))}
        environment = unset | {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-m", "examples.smollm.model", "--out", str(tmp_path / "out")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        server.shutdown()
    assert done.returncode == 0 and f"{HUB} at {COMMIT}" in done.stdout, done.stdout + done.stderr
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.name != "origin.txt"} == wanted
