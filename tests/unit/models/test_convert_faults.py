"""tools/convert.py on damaged input, full disks and kills: a message with file, tensor and fix, and nothing half-written."""

import json
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks._weights import write_model
from tepo_megatron.base.errors import CheckpointError
from tepo_megatron.checkpoint.convert import exporting
from tepo_megatron.checkpoint.convert.directories import new_directory
from tests.tiny import change_config, change_tensors, tensors, tiny_qwen3
from tests.unit.models.test_convert import ROOT, command, convert, in_bf16, succeed
from tests.worlds import run_world

pytestmark = pytest.mark.slow

UP = "model.layers.1.mlp.up_proj.weight"
SHAPE = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 1024}


def nan(weights: dict[str, torch.Tensor]) -> None:
    weights[UP][3, 3] = float("nan")


def infinite(weights: dict[str, torch.Tensor]) -> None:
    weights[UP][3, 3], weights[UP][3, 4] = float("inf"), float("-inf")


def untied(weights: dict[str, torch.Tensor]) -> None:
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1


def larger_tokenizer(path: Path) -> None:
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["<beyond>"] = 64
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))


def a_shard_less(path: Path) -> None:
    in_bf16(path)
    (path / "model-00002-of-00002.safetensors").unlink()


def an_index_less(path: Path) -> None:
    in_bf16(path)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if "00002-of" not in file}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def pointer(path: Path) -> None:
    (path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def twice(path: Path) -> None:
    shutil.copyfile(path / "model.safetensors", path / "other.safetensors")


def truncate(file: Path, by: int) -> None:
    file.write_bytes(file.read_bytes()[:-by])


BAD_HF: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (a_shard_less, "model-00002-of-00002.safetensors: missing, though the index names it"),
    "shard that the index leaves out": (an_index_less, "leaves out model-00002-of-00002.safetensors, which lies next to it"),
    "pointer": (pointer, "model.safetensors: is a Git LFS pointer"),
    "missing tensor": (lambda p: change_tensors(p, lambda w: w.pop(UP)), f"tensor {UP} (and 0 more) is missing"),
    "extra tensor": (
        lambda p: change_tensors(p, lambda w: w.update({"model.layers.1.mlp.up_proj.bias": torch.zeros(3)})),
        "tensor model.layers.1.mlp.up_proj.bias (and 0 more) is in no row of family qwen3",
    ),
    "twice": (twice, "is also in model.safetensors; remove the file that does not belong"),
    "wrong shape": (
        lambda p: change_tensors(p, lambda w: w.update({UP: w[UP][:-2]})),
        f"{UP} do not have the shapes of config",
    ),
    "wrong layers": (lambda p: change_config(p, num_hidden_layers=4), "is missing; the weights do not belong to this config"),
    "wrong size": (lambda p: change_config(p, intermediate_size=256), f"{UP} give decoder.layers.0"),
    "integers": (lambda p: change_tensors(p, lambda w: w.update({UP: w[UP].int()})), "must share one dtype"),
    "nan": (lambda p: change_tensors(p, nan), f"{UP} hold values that are not finite"),
    "infinite": (lambda p: change_tensors(p, infinite), f"{UP} hold values that are not finite"),
    "untied": (lambda p: change_tensors(p, untied), "lm_head.weight differs from model.embed_tokens.weight"),
    "architecture": (
        lambda p: change_config(p, architectures=["GPT2LMHeadModel"]),
        "architecture GPT2LMHeadModel is not supported",
    ),
    "field": (lambda p: change_config(p, rms_norm_eps="absent"), "rms_norm_eps is missing"),
    "quantized": (lambda p: change_config(p, quantization_config={"quant_method": "awq"}), "the weights are quantized"),
    "tokenizer": (larger_tokenizer, "token '<beyond>' has id 64, but config.json's vocab_size=64"),
    "truncated": (lambda p: truncate(p / "model.safetensors", 100), "model.safetensors: truncated or corrupt"),
    "no config": (lambda p: (p / "config.json").unlink(), "config.json: not found"),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "no *.safetensors found"),
    "sliding window": (lambda p: change_config(p, use_sliding_window=True), "use_sliding_window=True is not supported"),
    "no mapping": (lambda p: (p / "config.json").write_text("[]"), "config.json: holds no model config"),
    "bad index": (
        lambda p: (p / "model.safetensors.index.json").write_text('{"weight_map": {"a": '),
        "model.safetensors.index.json: not a safetensors index",
    ),
    "no directory": (shutil.rmtree, "no such directory; give a Hugging Face model directory"),
}


@pytest.mark.parametrize("how", BAD_HF)
def test_a_bad_model_is_not_imported(tmp_path: Path, how: str) -> None:
    tiny_qwen3(tmp_path / "hf")
    damage, message = BAD_HF[how]
    damage(tmp_path / "hf")
    message = message.replace(f"{UP} give decoder.layers.0", "give decoder.layers.0.mlp.linear_fc1.weight the shape (768, 128)")
    status, out, err = convert("import", "--hf", tmp_path / "hf", "--out", tmp_path / "out")
    assert status == 1 and out == "" and err.startswith("error: ") and message in err and "Traceback" not in err
    assert {p.name for p in tmp_path.iterdir()} <= {"hf"}


def change_metadata(path: Path, change: Callable[[object], object]) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def lost_key(path: Path) -> None:
    change_metadata(path, lambda m: m.state_dict_metadata.pop("decoder.layers.mlp.linear_fc2.weight"))


def stray_key(path: Path) -> None:
    def add(m: object) -> None:
        m.state_dict_metadata["decoder.layers.mlp.linear_fc2.bias"] = m.state_dict_metadata["decoder.final_layernorm.weight"]

    change_metadata(path, add)


def lost_piece(path: Path) -> None:
    def remove(m: object) -> None:
        m.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].chunks.pop(1)
        (index,) = (i for i in m.storage_data if i.fqn.endswith("linear_fc2.weight") and i.offset[0] == 1)
        del m.storage_data[index]

    change_metadata(path, remove)


def overwrite(path: Path, fraction: float, value: bytes) -> None:
    """Bytes in the middle of the file."""
    file = path / "__0_0.distcp"
    with file.open("r+b") as f:
        f.seek(int(file.stat().st_size * fraction) // 64 * 64)
        f.write(value)


def garbled_archive(path: Path) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    (place,) = (p for i, p in metadata.storage_data.items() if i.fqn == "decoder.final_layernorm.weight")
    with (path / place.relative_path).open("r+b") as f:
        f.seek(place.offset)
        f.write(bytes(place.length))


BAD_MEGATRON: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda p: truncate(p / "__0_0.distcp", 1000), "__0_0.distcp: truncated to"),
    "missing file": (lambda p: (p / "__0_0.distcp").unlink(), "__0_0.distcp: missing, but .metadata puts"),
    "no metadata": (lambda p: (p / ".metadata").unlink(), ".metadata: not found"),
    "bad metadata": (lambda p: truncate(p / ".metadata", 50), ".metadata: truncated or corrupt"),
    "other pickle": (lambda p: (p / ".metadata").write_bytes(pickle.dumps([1])), ".metadata: holds no checkpoint metadata"),
    "no common": (lambda p: (p / "common.pt").unlink(), "common.pt: not found"),
    "bad common": (lambda p: truncate(p / "common.pt", 300), "common.pt: truncated or corrupt"),
    "lost key": (lost_key, "tensor decoder.layers.mlp.linear_fc2.weight is missing"),
    "stray key": (stray_key, "tensor decoder.layers.mlp.linear_fc2.bias (and 0 more) has no place"),
    "lost piece": (lost_piece, "lists no data for a part of decoder.layers.mlp.linear_fc2.weight"),
    "garbled": (garbled_archive, ".distcp: the piece of decoder.final_layernorm.weight at byte"),
    "nan": (lambda p: overwrite(p, 0.5, b"\x00\x00\xc0\x7f" * 16), "hold values that are not finite"),
    "no hf": (lambda p: shutil.rmtree(p / "hf"), "give the model's Hugging Face directory with --hf"),
    "other config": (lambda p: change_config(p / "hf", hidden_size=256), "but config.json asks for"),
    "larger vocabulary": (lambda p: change_config(p / "hf", vocab_size=65), "word_embeddings.weight has the shape (64, 128)"),
    "untied": (lambda p: change_config(p / "hf", tie_word_embeddings=False), "tensor output_layer.weight is missing"),
    "no directory": (shutil.rmtree, "no such directory; give a Megatron checkpoint"),
}  # fmt: skip


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("imported")
    tiny_qwen3(path / "hf")
    succeed("import", "--hf", path / "hf", "--out", path / "megatron")
    return path / "megatron"


@pytest.mark.parametrize("how", BAD_MEGATRON)
def test_a_bad_checkpoint_is_not_exported(tmp_path: Path, imported: Path, how: str) -> None:
    shutil.copytree(imported, tmp_path / "megatron")
    damage, message = BAD_MEGATRON[how]
    damage(tmp_path / "megatron")
    status, out, err = convert("export", "--megatron", tmp_path / "megatron", "--out", tmp_path / "out")
    assert status == 1 and out == "" and err.startswith("error: ") and message in err and "Traceback" not in err
    assert {p.name for p in tmp_path.iterdir()} <= {"megatron"}


def test_values_that_overflow_the_dtype_are_refused(tmp_path: Path) -> None:
    tiny_qwen3(tmp_path / "hf")
    change_tensors(tmp_path / "hf", lambda w: w[UP].mul_(1e6))
    succeed("import", "--hf", tmp_path / "hf", "--out", tmp_path / "megatron")
    status, _, err = convert("export", "--megatron", tmp_path / "megatron", "--out", tmp_path / "out", "--dtype", "fp16")
    assert status == 1 and f"{UP} in float16 (give another --dtype, or none)" in err and not (tmp_path / "out").exists()


def test_what_exists_is_left_alone(tmp_path: Path, imported: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("kept")
    for words in (["import", "--hf", imported.parent / "hf"], ["export", "--megatron", imported]):
        status, _, err = convert(*words, "--out", out)
        assert status == 1 and err == f"error: {out}: exists already; remove it, or give another --out\n"
    assert [p.name for p in tmp_path.iterdir()] == ["out"] and (out / "mine").read_text() == "kept"


def on_a_full_disk(rank: int, words: list[str], limit: int) -> tuple[int, str, str]:
    """The system refuses to let a file grow beyond `limit` bytes, in the middle of a write."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return command(rank, words)


@pytest.mark.parametrize("words", [["import", "--hf", "hf"], ["export", "--megatron", "megatron"]], ids=["import", "export"])
def test_a_full_disk_leaves_nothing(tmp_path: Path, imported: Path, words: list[str]) -> None:
    words = [*words[:2], str(imported.parent / words[2]), "--out", str(tmp_path / "out")]
    status, _, err = run_world(1, on_a_full_disk, words, 500_000)[0]
    assert status == 1 and err.startswith(f"error: {tmp_path / 'out'}") and "File too large" in err
    assert "free" in err and list(tmp_path.iterdir()) == []


def test_too_small_a_disk_is_known_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"1073741824.00 GiB are needed, .* GiB are free; free some space"):  # noqa: SIM117
        with new_directory(tmp_path / "out", 2**60):
            raise AssertionError("entered")
    assert list(tmp_path.iterdir()) == []


def test_two_conversions_to_one_place(tmp_path: Path, imported: Path) -> None:
    with new_directory(tmp_path / "out", 0) as partial:
        (partial / "mine").write_text("kept")
        status, _, err = convert("export", "--megatron", imported, "--out", tmp_path / "out")
        assert status == 1 and "out.partial: another conversion writes it" in err and (partial / "mine").exists()
    assert (tmp_path / "out/mine").exists()


def test_an_id_that_the_hub_does_not_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    status, _, err = convert("import", "--hf", "nobody/no-such-model", "--out", tmp_path / "out")
    assert status == 1 and err.startswith("error: nobody/no-such-model: neither a directory nor a model that can be fetched")
    assert "give the directory" in err and not (tmp_path / "out").exists()


def start(*words: object) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, str(ROOT / "tools/convert.py"), *map(str, words)], text=True, **pipes)


@pytest.mark.full
@pytest.mark.parametrize("direction", ["import", "export"])
def test_a_kill_in_the_middle_leaves_no_output_and_is_made_good_by_the_next_run(tmp_path: Path, direction: str) -> None:
    shape = SHAPE | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12}
    source = write_model(shape, tmp_path, torch.bfloat16)  # 400 MB: far more than is written between two looks
    words = ["import", "--hf", source]
    if direction == "export":
        succeed("import", "--hf", source, "--out", tmp_path / "megatron")
        words = ["export", "--megatron", tmp_path / "megatron"]
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    process = start(*words, "--out", out)
    try:
        deadline = time.monotonic() + 60
        while not (partial.exists() and any(f.stat().st_size > 2**20 for f in partial.iterdir())):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL and partial.exists() and not out.exists()
    assert not (partial / ".metadata").exists() and not (partial / "model.safetensors.index.json").exists()
    (partial / "stale").write_text("of the killed run")
    succeed(*words, "--out", out)
    assert not partial.exists() and not (out / "stale").exists()
    if direction == "import":
        succeed("export", "--megatron", out, "--out", tmp_path / "back")
    back, before = tensors(tmp_path / "back" if direction == "import" else out), tensors(source)
    assert back.keys() == before.keys() and all(torch.equal(back[n], before[n]) for n in before)


def peak_of(rank: int, words: list[str]) -> int:
    """Return the largest resident set of a conversion, in KiB, with exported files of at most 64 MiB."""
    exporting.FILE_BYTES = 2**26
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak until now
    assert command(rank, words)[0] == 0
    return int(re.findall(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[0])


@pytest.mark.full
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Forty layers instead of two, 800 MB instead of 40: the peak grows by less than a twentieth and one exported file."""
    peaks = {}
    for layers in (2, 40):
        shape = SHAPE | {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": layers}
        folder = tmp_path / str(layers)
        source = write_model(shape, folder, torch.bfloat16)
        for words in (
            ["import", "--hf", str(source), "--out", str(folder / "m")],
            ["export", "--megatron", str(folder / "m"), "--out", str(folder / "x")],
        ):
            peaks[words[0], layers] = run_world(1, peak_of, words)[0] * 1024
    size = sum(p.stat().st_size for p in (tmp_path / "40/model").iterdir())
    assert peaks["import", 40] - peaks["import", 2] < size / 20
    assert peaks["export", 40] - peaks["export", 2] < size / 20 + 2**26
