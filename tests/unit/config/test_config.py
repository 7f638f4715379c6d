"""The config tree: unknown, contradictory and malformed keys each give one message with the key and the fix."""

from pathlib import Path

import pytest

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.config import io
from tepo_megatron.config.io import load_config, plain, to_yaml, validate

MINIMAL = {"name": "run", "model": {"path": "model"}, "data": {"train": "train.jsonl"}}


def written(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_defaults_are_the_papers() -> None:
    cfg = validate(MINIMAL)
    assert (cfg.rollout.prompts_per_step, cfg.rollout.samples_per_prompt, cfg.rollout.temperature) == (64, 8, 1.0)
    assert cfg.optimizer.lr == 5e-7 and cfg.training.minibatch_prompts == 16 and cfg.training.steps == 72
    assert 64 // 16 * cfg.training.epochs == 8  # "updated 8 times"
    assert cfg.objective.name == "tepo" and cfg.parallel.world_size == 1


def test_resolved_config_loads_to_the_same(tmp_path: Path) -> None:
    cfg = validate(MINIMAL | {"optimizer": {"lr": 3e-5}, "parallel": {"tp": 2, "sequence_parallel": True}})
    assert load_config(written(tmp_path, to_yaml(cfg))) == cfg


def test_overrides_of_both_forms(tmp_path: Path) -> None:
    path = written(tmp_path, to_yaml(validate(MINIMAL)))
    cfg = load_config(path, ["--optimizer.lr", "1e-5", "--parallel.tp=2", "--name", "3", "--export_hf", "false"])
    assert (cfg.optimizer.lr, cfg.parallel.tp, cfg.name, cfg.export_hf) == (1e-5, 2, "3", False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"data": {"train": "t", "template_kwargs": {"enable_thinking": "off"}}},
            r"enable_thinking=off is text; write true or",
        ),
        (
            {"sync": {"transport": {"type": "group", "timeout_seconds": 60}}},
            r"sync.transport.timeout_seconds=60 must be below rollout.server.heartbeat_timeout=60",
        ),
        (
            {"sync": {"transport": "group"}, "parallel": {"timeout_seconds": 333}},
            r"parallel.timeout_seconds=333: .* 0.9 of it must exceed the 300 s .* would count as stuck",
        ),
        (
            {"sync": {"transport": "ipc"}, "rollout": {"server": {"rendezvous": "/shared"}}},
            r"sync\.transport=ipc shares memory of this machine's processes.*use sync\.transport=group, or shm",
        ),
        (
            {"rollout": {"server": {"rendezvous": "/shared"}}},
            r"sync\.transport\.folder is not set, and shared memory does not reach",
        ),
        ({"sync": {"quantize": "fp8"}, "platform": "cpu"}, r"sync\.quantize=fp8 needs platform=cuda"),
        (
            {"sync": {"quantize": "fp8"}, "platform": "cuda", "rollout": {"server": {"precision": "fp32"}}},
            r"to be served in bf16, not fp32; set rollout\.server\.precision=bf16",
        ),
        (
            {"sync": {"quantize": "fp8"}, "platform": "cuda", "rollout": {"only": True}},
            r"sync\.quantize=fp8 has servers wait for their first weights",
        ),
        ({"parallel": {"sequence_parallel": True}}, "parallel: sequence_parallel=true needs tp > 1"),
        ({"parallel": {"vpp": 2}}, "parallel: vpp=2 needs pp > 1"),
        ({"parallel": {"ep": 3, "dp": 2}}, r"ep=3 does not divide dp\*cp=2"),
        ({"rollout": {"prompts_per_step": 8}}, "minibatch_prompts=16 exceeds rollout.prompts_per_step=8"),
        ({"platform": "cpu", "model": {"path": "m", "attention": "te"}}, "model.attention=te needs platform=cuda"),
        (
            {"training": {"share_prompts": "always"}, "model": {"path": "m", "attention": "te"}},
            "training.share_prompts=always with model.attention=te.*set model.attention to sdpa",
        ),
        (
            {"parallel": {"cp": 2}, "model": {"path": "m", "attention": "te", "precision": "fp32"}, "platform": "cuda"},
            "precision=fp32 with model.attention=te and parallel.cp=2: .*set model.attention to auto or sdpa",
        ),
        ({"evaluation": {"samples": 4, "temperature": 0}}, "samples=4 at temperature=0 would all be the same"),
        ({"name": ".."}, r"name='\.\.' must be a plain folder name"),
        ({"evaluation": {"every": 5}}, r"evaluation\.every=5 needs data\.eval"),
        (
            {"evaluation": {"benchmarks": ["amc"], "every": 3}, "checkpoint": {"every": 2, "keep_best": True}},
            r"evaluation\.every=3 is no multiple of checkpoint\.every=2; make it one",
        ),
        ({"evaluation": {"patience": 2}}, r"evaluation\.patience=2 counts evaluations .* evaluation\.every=0 makes none"),
        ({"checkpoint": {"every": 2, "keep_best": True}}, "keep_best=true needs a checkpoint of every step that is evaluated"),
        ({"evaluation": {"benchmark_prompt": "<problem> <problem>"}}, "must hold <problem> once"),
        ({"rollout": {"temperature": 0.001}}, "rollout.temperature: .*greater than or equal to 0.01"),
        ({"evaluation": {"temperature": 0.001}}, "temperature=0.001 is raised to 0.01 by vLLM"),
        ({"optimizer": {"lr": float("inf")}}, "optimizer.lr: .*finite number"),
        ({"training": {"steps": True}}, "training.steps: .*integer"),
        ({"rollout": {"colocate": "both"}}, "rollout.colocate: .*boolean"),
        (
            {"rollout": {"colocate": True, "max_staleness": 1}},
            "max_staleness=1 samples while .*set max_staleness to 0, or colo",
        ),
        ({"training": {"stream": "arrival"}, "rollout": {"colocate": True}}, "training.stream=arrival trains while the engine"),
        ({"training": {"stream": "arrival", "minibatch_prompts": 64}}, "the only minibatch waits for all groups; lower"),
        ({"training": {"stream": "prompt"}}, "filter_uniform_groups=true with rollout.oversample=1 chooses them later"),
        (
            {"training": {"stream": "prompt"}, "rollout": {"filter_uniform_groups": False, "oversample": 1.5}},
            "filter_uniform_groups=false with rollout.oversample=1.5 chooses them later; set these to false and 1",
        ),
        ({"rollout": {"colocate": True, "replay": "runs/a"}}, "replay=runs/a starts no engine; remove one of them"),
        ({"rollout": {"colocate": True, "only": True}}, "only=true trains nothing; remove one of them"),
    ],
)
def test_a_wrong_config_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(MINIMAL | change)


def test_missing_keys_are_named_together() -> None:
    with pytest.raises(ConfigError) as e:
        validate({"name": "run"})
    assert "model: this key is required" in str(e.value) and "data: this key is required" in str(e.value)


@pytest.mark.parametrize(
    ("text", "lines"),
    [("seed: 1\noptimizer: {lr: 1}\nname: a\noptimizer: {}", "optimizer is written twice, in lines 2 and 4"),
     ("optimizer:\n  lr: 1\n  lr: 1", "lr is written twice, in lines 2 and 3"), ("sft: {data: a, data: b}", "lines 1 and 1")],
)  # fmt: skip
def test_a_key_that_is_written_twice_is_refused(tmp_path: Path, text: str, lines: str) -> None:
    with pytest.raises(ConfigError, match=lines):
        load_config(written(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "value"),
    [(text, text) for text in ("010", "1_000", "12:30", "1.10", "on", "off", "yes", "2026-01-01", "+5", "0x10")]
    + [("10", 10), ("-3", -3), ("0.5", 0.5), ("1.0e-06", 1e-6), (".inf", float("inf")), ("True", True), ("null", None)],
)
def test_a_value_is_what_it_looks_like(text: str, value: object) -> None:
    assert io.parse_overrides(["--x", text]) == [("x", value)]


def test_a_value_that_is_text_is_read_by_its_field_or_refused(tmp_path: Path) -> None:
    path = written(tmp_path, to_yaml(validate(MINIMAL)))
    cfg = load_config(path, ["--name", "010", "--data.check_answers", "off", "--export_hf", "off", "--optimizer.lr", "0.10"])
    assert (cfg.name, cfg.data.check_answers, cfg.export_hf, cfg.optimizer.lr) == ("010", "off", False, 0.1)
    assert load_config(written(tmp_path, to_yaml(cfg))) == cfg
    with pytest.raises(ConfigError, match=r"training\.steps: .*valid integer \(got '010'\)"):
        load_config(path, ["--training.steps", "010"])


OF_PROFILES = {"kuberay", "skypilot"}
PARENTS = {
    "sync.transport": {"type": "group"},
    "reward.terms.judge": {"type": "judge", "model": "j", "url": "http://judge/v1", "question": "{response}"},
}


@pytest.mark.parametrize("removed", sorted(io.REMOVED.keys() - OF_PROFILES))
def test_a_removed_key_is_refused_with_what_answers_instead(removed: str) -> None:
    """As somebody had it in a file: each row of the table is met."""
    name, _, value = removed.partition("=")
    section, _, key = name.rpartition(".")
    content = PARENTS.get(section, {}) | MINIMAL.get(section, {}) | {key: value or 1}
    if section == "reward.terms.judge":
        tree = {"reward": {"terms": [{"type": "math"}, content]}}
    else:
        first, _, second = section.partition(".")
        tree = {first: {second: content} if second else content}
    with pytest.raises(ConfigError) as refused:
        validate(MINIMAL | tree)
    said = str(refused.value)
    assert f"{key}{'=' + value if value else ''} was removed: {io.REMOVED[removed]}; see CHANGELOG.md" in said


def test_a_config_of_before_has_the_defaults_of_today_or_stays_as_it_is() -> None:
    assert io.resolved_today(MINIMAL) == plain(validate(MINIMAL))
    assert io.resolved_today({"name": "a", "rollout": {"attempts": 7}}) == {"name": "a", "rollout": {"attempts": 7}}
