"""tools/convert.py: round trips, every layout, what training writes, FP8, and what `verify` and `inspect` say.

The command runs in forked worlds of one rank: the pytest process itself never joins a mesh.
"""

import contextlib
import importlib
import io
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.marks import full_but, marked
from tests.parallel.cases import open_actor
from tests.tiny import hybrid_config, tensors, tiny_model, tiny_multimodal, tiny_qwen3
from tests.worlds import run_world

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
VOCAB = 70  # not a multiple of 16 tp: every layout pads it differently


@pytest.fixture(scope="module", autouse=True)
def _once() -> None:
    importlib.import_module("torch._dynamo")  # which every fork would import


def command(rank: int, words: Sequence[str]) -> tuple[int, str, str]:
    from tools.convert import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(word) for word in words])
    return status, out.getvalue(), err.getvalue()


def convert(*words: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of `tools/convert.py WORDS`."""
    return run_world(1, command, [str(word) for word in words])[0]


def succeed(*words: object) -> str:
    status, out, err = convert(*words)
    assert status == 0, err
    return out


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Assert that tensors are equal bit for bit, dtypes included."""
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)), name


def in_bf16(path: Path) -> None:
    """The same model in bf16, in two files with an index."""
    weights = {k: v.bfloat16() for k, v in tensors(path).items()}
    (path / "model.safetensors").unlink()
    names = sorted(weights)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({n: weights[n] for n in part}, path / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {n: file for file, part in files.items() for n in part}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("tied", [True, False])
def test_there_and_back_is_bitwise(tmp_path: Path, tied: bool, dtype: str) -> None:
    hf, megatron, back = (tmp_path / name for name in ("hf", "megatron", "back"))
    tiny_qwen3(hf, tied=tied, vocab_size=VOCAB)
    if dtype == "bf16":
        in_bf16(hf)
    succeed("import", "--hf", hf, "--out", megatron)
    succeed("export", "--megatron", megatron, "--out", back)
    assert_same(tensors(back), tensors(hf))
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (back / name).read_bytes() == (megatron / "hf" / name).read_bytes() == (hf / name).read_bytes()
    stated = json.loads((back / "config.json").read_text())
    assert stated == json.loads((hf / "config.json").read_text()) | {"dtype": "bfloat16" if dtype == "bf16" else "float32"}
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors(back).keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors(back).values())
    assert {p.name for p in tmp_path.iterdir()} == {"hf", "megatron", "back"}


@pytest.mark.parametrize(
    "name", ["llama", "qwen3_moe", "qwen3_5", *(marked(n, pytest.mark.full) for n in ("qwen2", "mistral", "mixtral"))]
)
def test_other_families_need_nothing_of_their_own(tmp_path: Path, name: str) -> None:
    from tests.parallel.test_families import EIGHT

    tiny_model(tmp_path / "hf", EIGHT[name](), scale=8.0)
    succeed("import", "--hf", tmp_path / "hf", "--out", tmp_path / "megatron")
    succeed("export", "--megatron", tmp_path / "megatron", "--out", tmp_path / "back")
    assert_same(tensors(tmp_path / "back"), tensors(tmp_path / "hf"))
    assert "passed" in succeed("verify", "--hf", tmp_path / "hf", "--megatron", tmp_path / "megatron")


@pytest.mark.parametrize("tied", [False, marked(True, pytest.mark.full)])
def test_what_the_text_model_lacks_is_carried_over(tmp_path: Path, tied: bool) -> None:
    """The vision tower and the layer of several tokens come back bit for bit, in their own dtype, under every option."""
    hf, megatron = tmp_path / "hf", tmp_path / "megatron"
    tiny_multimodal(hf, hybrid_config(vocab_size=VOCAB, tie_word_embeddings=tied), scale=8.0)
    before = tensors(hf)
    extra = {n for n in before if n.startswith(("model.visual.", "mtp."))}
    assert len(extra) > 10 and {n for n in extra if n.startswith("mtp.")} == {"mtp.fc.weight", "mtp.norm.weight"}
    succeed("import", "--hf", hf, "--out", megatron)
    assert tensors(megatron / "hf").keys() == extra
    succeed("export", "--megatron", megatron, "--out", tmp_path / "back")
    assert_same(tensors(tmp_path / "back"), before)
    assert "passed" in succeed("verify", "--hf", hf, "--megatron", megatron)
    succeed("export", "--megatron", megatron, "--out", tmp_path / "fp8", "--fp8-blockwise", "--dtype", "bf16")
    after = tensors(tmp_path / "fp8")
    assert_same({n: after[n] for n in extra}, {n: before[n] for n in extra})
    quantized = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert {"mtp.fc", "model.visual.blocks.0.attn.qkv"} <= set(quantized["modules_to_not_convert"])
    changed = load_file(megatron / "hf" / "carried-00000.safetensors")
    changed["mtp.fc.weight"][0, 0] += 1
    save_file(changed, megatron / "hf" / "carried-00000.safetensors", {"format": "pt"})
    status, out, _ = convert("verify", "--hf", hf, "--megatron", megatron)
    assert status == 1 and "mtp.fc.weight" in out


def test_fp8_leaves_the_gates_of_the_delta_rule_whole(tmp_path: Path) -> None:
    """Decays and strengths of writes are products of many tokens, so an error of 2^-4 would grow; they are 1 % of the rows."""
    hf = tmp_path / "hf"
    tiny_model(hf, hybrid_config(vocab_size=VOCAB))
    in_bf16(hf)
    succeed("import", "--hf", hf, "--out", tmp_path / "megatron")
    succeed("export", "--megatron", tmp_path / "megatron", "--out", tmp_path / "fp8", "--fp8-blockwise")
    before, after = tensors(hf), tensors(tmp_path / "fp8")
    linear = {n.removesuffix("_scale_inv") for n in after if n.endswith("_scale_inv")}
    kinds = {n.split("layers.0.")[1] for n in linear if "layers.0." in n}
    assert kinds == {f"linear_attn.{x}.weight" for x in ("in_proj_qkv", "in_proj_z", "out_proj")} | {
        f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")
    }
    assert_same({n: after[n] for n in before.keys() - linear}, {n: before[n] for n in before.keys() - linear})


LAYOUTS: dict[str, dict[str, int]] = {
    "1 rank": {},
    "TP2": {"tp": 2},
    "PP2": {"pp": 2},
    "PP2 VPP2": {"pp": 2, "vpp": 2},
    "TP2 PP2": {"tp": 2, "pp": 2},
    "CP2 DP2": {"cp": 2, "dp": 2},
}


def chunks_of(layout: dict[str, int], model: Path) -> tuple[Any, list[Any], Any, Any]:
    """The mesh, this rank's empty model chunks, and what the config says."""
    from tepo_megatron.actor import build
    from tepo_megatron.config import ModelConfig, ParallelConfig
    from tepo_megatron.dist import parallel
    from tepo_megatron.dist.platform import activate
    from tepo_megatron.models.families import find_family, read_config

    cfg = ParallelConfig(**layout)
    groups = parallel.initialize(cfg, activate("cpu"), 0)
    family = find_family(read_config(model))
    arch = family.architecture(read_config(model))
    model_cfg = ModelConfig(path=str(model), precision="fp32")
    config = build.transformer_config(arch, model_cfg, cfg, groups.device)
    return groups, build.build_chunks(config, arch, model_cfg, groups), family, arch


def state_of(chunks: list[Any], metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    return {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(chunks)}


def load_both_ways(rank: int, layout: dict[str, int], hf: Path, megatron: Path) -> int:
    """Megatron-Core's load of the checkpoint against this package's of the HF directory; the number of parameters."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    from tepo_megatron.models.gather import bind, load_hf
    from tepo_megatron.models.hf_io import HfReader

    groups, chunks, family, arch = chunks_of(layout, hf)
    bindings = bind(chunks, family, arch)
    load_hf(bindings, HfReader(hf), family, arch, groups.tp)
    expected = [b.parameter.detach().clone() for b in bindings]
    with torch.no_grad():
        for b in bindings:
            b.parameter.fill_(float("nan"))
    loaded = dist_checkpointing.load(state_of(chunks), str(megatron), strict=StrictHandling.RAISE_ALL)
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{i}"])
    for b, wanted in zip(bindings, expected, strict=True):
        assert torch.equal(b.parameter, wanted), b.name
    return len(bindings)


FAST = {("TP2 PP2", True), ("TP2 PP2", False), ("TP2 PP2", "hybrid"), ("PP2 VPP2", True), ("CP2 DP2", True)}


@pytest.mark.parametrize(("name", "tied"), full_but(FAST, set(), itertools.product(LAYOUTS, (True, False, "hybrid"))))
def test_megatron_core_loads_it_on_every_layout(tmp_path: Path, name: str, tied: bool | str) -> None:
    """RAISE_ALL: no key of any layout is missing, and none is left over."""
    if tied == "hybrid":
        tiny_model(tmp_path / "hf", hybrid_config(vocab_size=VOCAB))
    else:
        tiny_qwen3(tmp_path / "hf", tied=tied, layers=4, vocab_size=VOCAB)
    succeed("import", "--hf", tmp_path / "hf", "--out", tmp_path / "megatron")
    size = math.prod(LAYOUTS[name].get(axis, 1) for axis in ("tp", "pp", "cp", "dp"))
    assert all(run_world(size, load_both_ways, LAYOUTS[name], tmp_path / "hf", tmp_path / "megatron"))


def save_with_megatron(rank: int, layout: dict[str, int], hf: Path, out: Path, metadata: dict[str, Any] | None) -> None:
    from megatron.core import dist_checkpointing

    from tepo_megatron.models.gather import bind, load_hf
    from tepo_megatron.models.hf_io import HfReader

    groups, chunks, family, arch = chunks_of(layout, hf)
    load_hf(bind(chunks, family, arch), HfReader(hf), family, arch, groups.tp)
    state = state_of(chunks, metadata) | {"iteration": 12}
    dist_checkpointing.save(state, str(out), content_metadata=metadata)


@pytest.mark.full  # Megatron-Core's writer starts processes
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *itertools.product(("stacked", "by layer"), ({"tp": 2, "pp": 2}, {"tp": 4})),
        *itertools.product(("hybrid",), ({"tp": 2, "pp": 2}, {"tp": 2, "pp": 2, "vpp": 2})),
    ],
    ids=str,
)
def test_what_megatron_core_saves_is_exported(tmp_path: Path, kind: str, layout: dict[str, int]) -> None:
    """Megatron-Core's writer shards tensors over ranks and pads the vocabulary; config and tokenizer come from --hf."""
    metadata = {"non_homogeneous_layers": True} if kind == "by layer" else None
    hf, run = tmp_path / "hf", tmp_path / "run"
    tiny_model(hf, hybrid_config(vocab_size=VOCAB) if kind == "hybrid" else four_heads(), scale=4.0)
    (run / "iter_0000012").mkdir(parents=True)
    (run / "latest_checkpointed_iteration.txt").write_text("12")
    size = layout["tp"] * layout.get("pp", 1)
    run_world(size, save_with_megatron, layout, hf, run / "iter_0000012", metadata)
    status, _, err = convert("export", "--megatron", run, "--out", tmp_path / "back")
    assert status == 1 and "hf/config.json: not found; give the model's Hugging Face directory with --hf" in err
    succeed("export", "--megatron", run, "--out", tmp_path / "back", "--hf", hf)
    assert_same(tensors(tmp_path / "back"), tensors(hf))
    assert "iteration: 12" in succeed("inspect", run)


def four_heads() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, head_dim=16, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip


def train_and_save(rank: int, cfg: Any, folder: Path) -> None:
    from tepo_megatron.checkpoint.checkpoints import Checkpoints
    from tepo_megatron.config import CheckpointConfig

    actor = open_actor(cfg)
    with Checkpoints.open(folder, CheckpointConfig(hf=False), actor.groups) as checkpoints:
        checkpoints.save(7, actor, {"policy_version": 7, "data": {}, "config": ""})
        checkpoints.wait()


def test_a_checkpoint_of_a_run_is_exported_without_its_optimizer(tmp_path: Path) -> None:
    from tests.parallel import cases

    hf = tmp_path / "hf"
    tiny_qwen3(hf, layers=4, vocab_size=VOCAB)
    (hf / "generation_config.json").write_text(json.dumps({"eos_token_id": 5, "top_k": 20}))
    cfg = cases.run_config(hf, {"tp": 2, "dp": 2})
    cfg = replace(cfg, rollout=replace(cfg.rollout, stop_token_ids=[7, 3]))
    run_world(4, train_and_save, cfg, tmp_path / "checkpoints")
    succeed("export", "--megatron", tmp_path / "checkpoints", "--out", tmp_path / "back", "--hf", hf)
    assert_same(tensors(tmp_path / "back"), tensors(hf))
    stops = {"eos_token_id": [2, 3, 5, 7], "top_k": 20}  # engines end a response where the run did
    assert json.loads((tmp_path / "back" / "generation_config.json").read_text()) == stops
    output = succeed("inspect", tmp_path / "checkpoints")
    assert "iteration: 7" in output and "(optimizer state)" in output


def test_fp8_export_has_the_layout_that_engines_load(tmp_path: Path) -> None:
    """E4m3 weights, their fp32 scales, the rest as it was, and the fields of config.json."""
    from tepo_megatron.models import fp8

    hf = tmp_path / "hf"
    tiny_qwen3(hf, tied=False, vocab_size=VOCAB)
    in_bf16(hf)
    succeed("import", "--hf", hf, "--out", tmp_path / "megatron")
    succeed("export", "--megatron", tmp_path / "megatron", "--out", tmp_path / "fp8", "--fp8-blockwise")
    before, after = tensors(hf), tensors(tmp_path / "fp8")
    linear = {n for n in before if "_proj.weight" in n}
    assert after.keys() == before.keys() | {n + "_scale_inv" for n in linear} and len(linear) == 7 * 3
    assert_same({n: after[n] for n in before.keys() - linear}, {n: before[n] for n in before.keys() - linear})
    for name in linear:
        quantized, scale = fp8.quantize(before[name])
        assert_same({"w": after[name], "s": after[name + "_scale_inv"]}, {"w": quantized, "s": scale})
    config = json.loads((tmp_path / "fp8/config.json").read_text())
    quantization = config["quantization_config"]
    whole = quantization.pop("modules_to_not_convert")
    assert quantization == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    assert {"lm_head", "model.embed_tokens", "model.norm"} <= set(whole) and config["dtype"] == "bfloat16"
    assert not {n.removesuffix(".weight") for n in linear} & set(whole)
    parameters = sum(t.numel() for t in before.values())
    inspected = succeed("inspect", tmp_path / "fp8")
    assert f"parameters: {parameters:,} (" in inspected and "in float8_e4m3fn" in inspected and "quantized: fp8" in inspected
    status, _, err = convert("import", "--hf", tmp_path / "fp8", "--out", tmp_path / "again")
    assert status == 1 and "the weights are quantized (quantization_config)" in err


def test_verify_names_what_differs(tmp_path: Path) -> None:
    hf, megatron = tmp_path / "hf", tmp_path / "megatron"
    tiny_qwen3(hf, tied=False)
    succeed("import", "--hf", hf, "--out", megatron)
    output = succeed("verify", "--hf", hf, "--megatron", megatron, "--text", "1+2=")
    assert "36 of 36 bitwise equal" in output and "over 4 tokens in fp32" in output and output.endswith("passed\n")
    weights = tensors(hf)
    name = "model.layers.1.mlp.up_proj.weight"
    changed = weights | {name: weights[name] * 1.05}
    save_file(changed, hf / "model.safetensors", {"format": "pt"})
    status, output, _ = convert("verify", "--hf", hf, "--megatron", megatron)
    assert status == 1 and f"differs: {name}" in output and "35 of 36" in output
    assert "first that differs (above 0.0001): layer 1" in output and output.endswith("FAILED\n")


def test_verify_sees_what_no_tensor_shows(tmp_path: Path) -> None:
    """Equal tensors under another config."""
    hf, megatron = tmp_path / "hf", tmp_path / "megatron"
    tiny_qwen3(hf)
    succeed("import", "--hf", hf, "--out", megatron)
    config = json.loads((hf / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 500.0
    (hf / "config.json").write_text(json.dumps(config))
    status, output, _ = convert("verify", "--hf", hf, "--megatron", megatron)
    assert status == 1 and "35 of 35 bitwise equal" in output and "layer 0" in output


def test_the_command_finds_its_folders_before_megatron_is_imported() -> None:
    """The platform redirects Megatron at its first import; a world that is forked here has activated it already."""
    code = "import sys, tepo_megatron.checkpoint.convert.directories; "
    check = "assert not any(n.startswith('megatron') for n in sys.modules)"
    subprocess.run([sys.executable, "-c", code + check], cwd=ROOT, check=True, timeout=600)


@pytest.mark.full
def test_the_command_runs_without_torchrun_from_any_folder(tmp_path: Path) -> None:
    """In a process of its own, as a user starts it."""
    tiny_qwen3(tmp_path / "hf")
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        command_line = [sys.executable, str(ROOT / "tools/convert.py"), *map(str, words)]
        return subprocess.run(command_line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)

    done = run("import", "--hf", "hf", "--out", "megatron")
    assert done.returncode == 0 and "GB/s" in done.stdout and done.stderr == ""
    done = run("export", "--megatron", "megatron", "--out", "back")
    assert done.returncode == 0 and "GB/s" in done.stdout and done.stderr == ""
    done = run("verify", "--hf", "hf", "--megatron", "megatron")
    assert done.returncode == 0 and done.stdout.endswith("passed\n") and done.stderr == ""
    done = run("import", "--hf", "hf", "--out", "megatron")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "error: megatron: exists already; remove it, or give another --out\n"
