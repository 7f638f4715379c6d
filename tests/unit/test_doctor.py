"""`tepo doctor`, without its step (tests/e2e/test_doctor.py takes one): every fault is named, with its fix."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tepo_megatron.base.errors import ConfigError, escaped
from tepo_megatron.command.start import preflight
from tepo_megatron.config import Config
from tepo_megatron.config.io import validate
from tepo_megatron.data import stop_tokens
from tepo_megatron.doctor import machine
from tepo_megatron.doctor.examine import examine, print_findings
from tepo_megatron.doctor.examine import step as make_step
from tepo_megatron.doctor.findings import Finding
from tepo_megatron.engines.servers.environment import cache_tokens
from tests.tiny import change_tensors, hybrid_config, tiny_multimodal, tiny_qwen3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_qwen3(path, layers=2)
    rows = [{"prompt": f"1+{i}?\n", "answer": str(1 + i)} for i in range(40)]
    (path / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


Make = Callable[..., Config]


@pytest.fixture
def made(model: Path, tmp_path: Path) -> Make:
    def make(**sections: Any) -> Config:
        tree: dict[str, Any] = {
            "name": "run", "output": str(tmp_path / "runs"), "platform": "cpu",
            "model": {"path": str(model), "precision": "fp32"},
            "data": {"train": str(model / "train.jsonl"), "max_prompt_tokens": 16},
            "rollout": {"prompts_per_step": 8, "samples_per_prompt": 2, "max_response_tokens": 16},
            "training": {"minibatch_prompts": 4, "max_tokens_per_microbatch": 64},
        }  # fmt: skip
        return validate({**tree, **{k: {**tree.get(k, {}), **v} if isinstance(v, dict) else v for k, v in sections.items()}})

    return make


def nothing(*_: Any, **__: Any) -> None:
    raise AssertionError("nothing is started")


def findings(cfg: Config) -> dict[str, Finding]:
    found: dict[str, Finding] = {}
    for finding in examine(cfg, preflight, nothing, nothing, quick=True):
        found.setdefault(finding.check, finding)
    return found


def test_a_sound_run_passes(made: Make) -> None:
    found = findings(made())
    of_the_moment = ("a step", "memory", "disk speed")  # a disk that others write to is slow
    assert {name: f for name, f in found.items() if f.verdict != "pass" and name not in of_the_moment} == {}
    looked_at = "kernels,conversion,vocabulary,stop tokens,prompt lengths,config,cores,memory,shared memory,disk,disk speed"
    assert found.keys() >= {*looked_at.split(","), "packages", "data", "grading"}
    assert "Adam: this package" in found["kernels"].said
    assert "24 of 24 tensors" in found["conversion"].said
    assert "40 prompts" in found["data"].said and "40 right answers" in found["grading"].said
    assert found["a step"].verdict == "skip" and "--quick" in found["a step"].said


@pytest.mark.slow
def test_what_is_refused_is_a_finding_and_the_rest_is_looked_at(made: Make, model: Path, tmp_path: Path) -> None:
    found = findings(made(parallel={"tp": 3}))
    assert found["config"].verdict == "fail" and "parallel.tp=3" in found["config"].said and "data" in found

    (tmp_path / "bad.jsonl").write_text('{"prompt": "1+1?"}\n')
    found = findings(made(data={"train": str(tmp_path / "bad.jsonl")}))
    assert found["data"].verdict == "fail" and "bad.jsonl:1" in found["data"].said and "disk" in found

    found = findings(made(rollout={"prompts_per_step": 64}))
    assert found["prompts"].verdict == "fail" and "rollout.prompts_per_step=64" in found["prompts"].said


CODES = "\x1b]0;owned\x07\x1b[2J\x1b[31m\u202e\rpass  everything is well\npass  config          nothing to see"


def test_what_files_say_cannot_drive_a_terminal(
    made: Make, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fields of a config.json and columns of a dataset, whose names errors quote; nor can they look like findings."""
    (tmp_path / "bad.jsonl").write_text(json.dumps({CODES: "1+1?"}) + "\n")
    for cfg in (
        made(model={"path": str(copied(model, tmp_path / "odd", **{CODES: 1}))}),
        made(data={"train": str(tmp_path / "bad.jsonl")}),
        made(model={"path": str(copied(model, tmp_path / CODES.replace("/", "")))}),
    ):
        print_findings(examine(cfg, preflight, nothing, nothing, quick=True))
        out = capsys.readouterr().out
        assert "\\x1b]0;owned" in out and out == escaped(out), out
        heads = [line.split()[1] for line in out.splitlines() if re.match("(pass|warn|fail|skip) ", line)]
        assert heads.count("config") == 1 and not {"everything"} & set(heads), out


def test_right_answers_that_are_not_found_right_are_shown(made: Make, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}?", "answer": "{7" if i == 3 else str(i)} for i in range(16)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    grading = findings(made(data={"train": str(tmp_path / "train.jsonl")}))["grading"]
    assert grading.verdict == "warn" and "1 of 16 right answers" in grading.said and "'{7' (no_box)" in grading.said


@pytest.mark.parametrize(
    ("term", "verdict"),
    [({"type": "answer_line"}, "pass"), ({"type": "code"}, "skip"), ({"type": "custom", "function": "no.py:no"}, "skip")],
    ids=str,
)
def test_an_answer_is_tried_in_the_form_that_the_reward_reads(made: Make, term: dict[str, Any], verdict: str) -> None:
    """A reward that needs more than the answer cannot be tried, and is not called wrong."""
    assert findings(made(reward={"terms": [term]}))["grading"].verdict == verdict


def test_a_full_disk_and_another_package(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = machine.shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(
        machine.importlib.metadata, "requires", lambda _: ["torch>=99", "no-such-package", "vllm; extra == 'cpu'"]
    )
    found = findings(made(checkpoint={"every": 1}))
    assert [found[name].verdict for name in ("disk", "shared memory", "packages")] == ["fail"] * 3
    assert "checkpoint.keep_last" in found["disk"].fix and "sync.bucket_mib" in found["shared memory"].fix
    assert "is not >=99; no-such-package is not installed" in found["packages"].said and "vllm" not in found["packages"].said


def copied(model: Path, folder: Path, **config: Any) -> Path:
    """The model, with another config.json."""
    shutil.copytree(model, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


@pytest.mark.slow
def test_weights_that_are_not_those_of_the_config(made: Make, model: Path, tmp_path: Path) -> None:
    def conversion(folder: Path) -> Finding:
        return findings(made(model={"path": str(folder)}, parallel={"tp": 2}))["conversion"]

    sound = conversion(model)
    assert sound.verdict == "pass" and "HF -> tp=2 -> HF" in sound.said

    name, embedding = "model.layers.1.self_attn.k_proj.weight", "model.embed_tokens.weight"
    wrong: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
        f"{name}, ": lambda w: w.update({name: w[name][:-1]}),
        "not finite": lambda w: w[name][3].fill_(torch.nan),
        "shapes of config.json": lambda w: w.update({embedding: w[embedding][:-1]}),
        "visual.patch.weight": lambda w: w.update({"visual.patch.weight": torch.ones(2)}),
    }
    for said, change in wrong.items():
        folder = copied(model, tmp_path / str(len(list(tmp_path.iterdir()))))
        change_tensors(folder, change)
        found = conversion(folder)
        assert found.verdict == "fail" and said in found.said and (found.fix or "visual" in said), found
    folder = copied(model, tmp_path / "missing", num_hidden_layers=3, layer_types=["full_attention"] * 3)
    assert "model.layers.2" in conversion(folder).said


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}END{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}answer:{% if thinking %} hmm{% endif %}{% endif %}"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "data", "verdict", "said"),
    [
        (TEMPLATE.replace("END", "<eos>"), {}, "pass", "ends with 'answer:'"),
        (TEMPLATE.replace("END", "<eos>"), {"as_chat": True, "template_kwargs": {"thinking": True}}, "pass", "'answer: hmm'"),
        (TEMPLATE.replace("END", "<extra_60>"), {}, "warn", "which does not end a response here"),
        (TEMPLATE.replace("add_generation_prompt", "false"), {}, "warn", "adds no generation prompt"),
        (
            TEMPLATE.replace("END", "<eos>").replace("if thinking", "if false and thinking"),
            {"as_chat": True, "template_kwargs": {"thinking": True}},
            "warn",
            "data.template_kwargs.thinking changes nothing",
        ),
        (None, {"as_chat": True}, "fail", "data.as_chat=true"),
    ],
)
def test_a_chat_template_that_does_not_fit_the_data_is_found(
    made: Make, model: Path, tmp_path: Path, template: str | None, data: dict[str, Any], verdict: str, said: str
) -> None:
    folder = copied(model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    tree = {"data": {"max_prompt_tokens": 64, **data}, "training": {"max_tokens_per_microbatch": 128}}
    cfg = made(model={"path": str(folder)}, **tree)
    found = [f for f in examine(cfg, preflight, nothing, nothing, quick=True) if f.check == "chat template"]
    assert found[0].verdict == verdict and said in found[0].said, found
    assert (found[0].fix == "") == (verdict == "pass")


@pytest.mark.slow
def test_missing_stop_tokens_are_found(made: Make, model: Path, tmp_path: Path) -> None:
    folder = copied(model, tmp_path / "model", eos_token_id=None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    found = findings(made(model={"path": str(folder)}))["stop tokens"]
    assert found.verdict == "fail" and "rollout.stop_token_ids" in found.fix, found
    found = findings(made(model={"path": str(folder)}, rollout={"stop_token_ids": [0]}))["stop tokens"]
    assert found.verdict == "warn" and "'<pad>' (0), the pad token" in found.said, found
    found = findings(made(model={"path": str(copied(model, tmp_path / "large", vocab_size=32))}))
    assert found["vocabulary"].verdict == "fail" and "64 tokens, 32 rows" in found["vocabulary"].said


def test_prompts_at_the_length_limit_are_a_warning(made: Make, tmp_path: Path) -> None:
    rows = [{"prompt": "1+" * i + "1?", "answer": str(i + 1)} for i in range(40)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    found = findings(made(data={"train": str(tmp_path / "train.jsonl"), "max_prompt_tokens": 40}))["prompt lengths"]
    assert found.verdict == "warn" and "40 at most; data.max_prompt_tokens=40" in found.said, found


def record(**changes: float) -> dict[str, Any]:
    return {
        "rollout/logprob_diff_mean": 2e-7, "rollout/logprob_diff_max": 2e-5, "accuracy/mean": 0.3, "rollout/truncated": 0.1,
        "rollout/response_tokens_mean": 9.0, "tepo/entropy_noise_floor": 1e-8, "tepo/mask_below_noise": 0.0,
        "seconds/total": 1.0, **changes,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "check", "verdict"),
    [
        ({}, None, "pass"),
        ({"rollout/logprob_diff_mean": 1e-3}, "log-probs", "warn"),
        ({"rollout/truncated": 0.8}, "samples", "warn"),
        ({"accuracy/mean": 0.0}, "samples", "warn"),
        ({"tepo/mask_below_noise": 0.4}, "noise of dH", "warn"),
        ({"tepo/entropy_noise_floor": None}, "noise of dH", "skip"),
    ],
)
def test_metrics_of_a_step_become_findings(
    made: Make, tmp_path: Path, changes: dict[str, Any], check: str | None, verdict: str
) -> None:
    cfg = replace(made(), output=str(tmp_path))

    def start(cfg: Config) -> None:
        cfg.run_dir.mkdir(parents=True)
        (cfg.run_dir / "metrics.jsonl").write_text(json.dumps({"step": 1} | record(**changes)) + "\n")

    found = {f.check: f.verdict for f in make_step(cfg, start)}
    expected = dict.fromkeys(("engine", "log-probs", "samples", "noise of dH", "seconds"), "pass")
    assert found == expected | ({check: verdict} if check else {})


def test_a_nested_config_is_read_as_training_reads_it(made: Make, model: Path, tmp_path: Path) -> None:
    """Qwen3.5: sizes and stop tokens are in `text_config`."""
    tiny_multimodal(tmp_path / "nested", hybrid_config())
    config = json.loads((tmp_path / "nested" / "config.json").read_text())
    config["text_config"]["eos_token_id"] = [2, 7]
    (tmp_path / "nested" / "config.json").write_text(json.dumps(config))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "nested")
    assert stop_tokens(tmp_path / "nested", tokenizer, [5]) == (2, 5, 7)
    layers = config["text_config"]["layer_types"].count("full_attention")
    token = 2 * layers * config["text_config"]["num_key_value_heads"] * config["text_config"]["head_dim"] * 4
    assert cache_tokens(tmp_path / "nested", "fp32", 100 * token, 10**6) == 100
    found = findings(made(model={"path": str(tmp_path / "nested")}))
    assert found["vocabulary"].verdict == "pass" and found["stop tokens"].verdict == "pass"


def test_longer_contexts_than_the_model_or_its_cache_holds_are_refused(made: Make, model: Path, tmp_path: Path) -> None:
    short = {"path": str(copied(model, tmp_path / "short", max_position_embeddings=31))}
    keys = r"data\.max_prompt_tokens \+ rollout\.max_response_tokens = 32 tokens, and the model has max_position_embeddings=31"
    with pytest.raises(ConfigError, match=keys):
        preflight(made(model=short))
    preflight(made(model=short), {"sft.max_tokens": 31})
    with pytest.raises(ConfigError, match=r"sft\.max_tokens = 32 tokens"):
        preflight(made(model=short), {"sft.max_tokens": 32})
    assert "max_position_embeddings=31" in findings(made(model=short))["config"].said
    with pytest.raises(ConfigError, match=r"kv_cache_gib=1e-05 holds \d+ tokens, and data\.max_prompt_tokens \+ rollout"):
        preflight(made(rollout={"server": {"kv_cache_gib": 1e-5}}))
    preflight(made(rollout={"server": {"kv_cache_gib": 0.1}}))
