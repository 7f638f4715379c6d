"""`tepo evaluate` and `tepo compare` with a scripted engine: everything else is real, grading and conversion too."""

import json
import math
import os
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.base.errors import CheckpointError, ConfigError, DataError
from tepo_megatron.base.seeding import derive_seed
from tepo_megatron.base.types import Prompt, Rollout, SamplingParams
from tepo_megatron.command import parsers
from tepo_megatron.config import Config
from tepo_megatron.data import load_tokenizer
from tepo_megatron.engines.engine_api import LaunchSpec
from tepo_megatron.evaluation.benchmarks import BENCHMARKS
from tepo_megatron.evaluation.command import EvaluationRequest, hf_model, run, settings
from tepo_megatron.evaluation.folder import read_record
from tepo_megatron.evaluation.results import result
from tepo_megatron.evaluation.samples import read_samples
from tests.e2e.scripted_service import ScriptedEngine
from tests.report_runs import write_run
from tests.tiny import change_tensors, tiny_qwen3
from tests.worlds import run_world

WORDS = {
    "platform": "cpu",
    "data.max_prompt_tokens": "256",
    "evaluation.benchmark_folder": "tests/problems",
    "evaluation.benchmark_prompt": "'<problem>'",
    "evaluation.benchmark_tokens": "48",
    "reward.timeout_seconds": "30",
    "reward.workers": "1",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "my-Qwen2.5-7B"
    tiny_qwen3(folder, layers=1)
    return folder


def request(
    model: Path, out: Path, *, against: Path | None = None, config: str | None = None, **words: Any
) -> EvaluationRequest:
    pairs = WORDS | {key.replace("__", "."): str(value) for key, value in words.items()}
    return EvaluationRequest(model, config, [w for k, v in pairs.items() for w in (f"--{k}", v)], out, against, "auto")


class Engines:
    """Makes scripted engines and remembers what they were started with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TEPO_TEST_ENGINE", "good")
        self.launches: list[LaunchSpec] = []
        self.configs: list[Config] = []

    def __call__(self, cfg: Config, launch: LaunchSpec, log_path: Path) -> ScriptedEngine:
        self.launches.append(launch)
        self.configs.append(cfg)
        return ScriptedEngine(cfg)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    return Engines(monkeypatch)


@pytest.mark.slow
def test_all_seven_from_rows_to_tables(
    model: Path, engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []
    out = run(request(model, tmp_path / "a"), lines.append, engines)
    assert engines.launches[0].max_model_len == 256 + 48 and engines.launches[0].model_path == model
    record = read_record(out)
    assert list(record["benchmarks"]) == list(BENCHMARKS) and record["checkpoint"] == str(model)
    for name, entry in BENCHMARKS.items():
        samples = read_samples(out / f"{name}.jsonl")
        problems = len((Path("tests/problems") / f"{name}.jsonl").read_text().splitlines())
        assert len(samples) == problems * entry.samples
        assert [s.sample for s in samples[: entry.samples]] == list(range(entry.samples))
        assert {(s.answer == s.gold, s.score, s.status in ("exact", "equal")) for s in samples} <= {
            (True, 1, True),
            (False, 0, False),
        }
        assert record["benchmarks"][name]["result"]["accuracy"]["mean"] == result(samples).accuracy.mean
    printed, kept = capsys.readouterr().out, (out / "evaluation.md").read_text()
    mean = 100 * record["benchmarks"]["amc"]["result"]["accuracy"]["mean"]
    for text in (printed, kept):
        assert "Table 1: Qwen2.5-7B, TEPO" in text and "43.48" in text and f"{mean:.2f}" in text and "Qwen3-14B" not in text
    assert "Not the paper's protocol: 3 problems instead of 83 (AMC)." in kept
    assert "Not the paper's protocol: another prompt (AIME24, AIME25, AMC, MATH-500," in kept
    assert f"AMC: avg@32 {mean:.2f} %" in lines

    with pytest.raises(ConfigError, match=r"holds an evaluation already; give another --out, .* --resume true"):
        run(request(model, tmp_path / "a"), lines.append, engines)


def test_files_are_asked_as_they_are_and_graded_by_the_runs_reward(
    model: Path, engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f" {n}+1?\n", "answer": str(n + 1)} for n in range(8)]
    file, folder = tmp_path / "sums.jsonl", tmp_path / "run"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder.mkdir()
    terms = [{"type": "math"}, {"type": "length", "min_tokens": 1, "max_tokens": 1, "weight": 2.0}]
    evaluation = {"every": 2, "benchmarks": ["amc"], "samples": 2}
    rollout = {"max_response_tokens": 24, "top_k": 5}
    data = {"train": "t.jsonl", "max_prompt_tokens": 32}
    write_run(folder, [], data=data, reward={"terms": terms, "workers": 1}, evaluation=evaluation, rollout=rollout, resume=True)
    shutil.copytree(model, folder / "hf")
    asked: list[Prompt] = []

    def recorded(cfg: Config, launch: LaunchSpec, log_path: Path) -> ScriptedEngine:
        engine = engines(cfg, launch, log_path)
        sample = engine.generate

        def generate(prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> list[Rollout]:
            asked.extend(prompts)
            assert (sampling.samples, sampling.max_tokens, sampling.top_k) == (2, 24, 5)
            assert seed == derive_seed(cfg.seed, "evaluation")  # as data.eval during the run
            return sample(prompts, sampling, seed)

        engine.generate = generate  # type: ignore[method-assign]
        return engine

    def evaluated(out: str, *words: str, against: Path | None = None, data: str = str(file)) -> Path:
        return run(EvaluationRequest(folder, None, words, tmp_path / out, against, "auto", [data]), print, recorded)

    first = evaluated("first")
    tokenizer = load_tokenizer(str(model), tmp_path)
    assert [tokenizer.decode(prompt.token_ids) for prompt in asked] == [row["prompt"] for row in rows]
    samples = read_samples(first / "sums.jsonl")
    assert [s.gold for s in samples[::2]] == [row["answer"] for row in rows]
    assert [s.reward for s in samples] == [pytest.approx(s.score + 2 / s.tokens) for s in samples]
    (recorded_result,) = (each["result"] for each in read_record(first)["benchmarks"].values())
    rewards = [(a.reward + b.reward) / 2 for a, b in zip(samples[::2], samples[1::2], strict=True)]
    assert recorded_result["reward"] == pytest.approx(statistics.fmean(rewards))
    assert recorded_result["reward_error"] == pytest.approx(statistics.stdev(rewards) / math.sqrt(8))

    other = ["--reward.terms", "[{type: answer_line}]"]
    evaluated("second", *other, against=first)
    printed = capsys.readouterr().out
    assert "sums: the two runs also differ in grader." in printed and "to the paper" not in printed
    assert "no sample was graded above 0" not in printed
    (tmp_path / "none.py").write_text("def none(prompt, response, answer):\n    return 0.0\n")
    evaluated("none", "--reward.terms", f"[{{type: custom, function: '{tmp_path}/none.py:none'}}]")
    printed = capsys.readouterr().out
    assert "sums: no sample was graded above 0; see" in printed and "sums: avg@2 0.00 %" in printed
    (tmp_path / "half.py").write_text("def half(prompt, response, answer):\n    return 0.5\n")
    evaluated("half", "--reward.terms", f"[{{type: custom, function: '{tmp_path}/half.py:half'}}]")
    assert "sums: mean score 50.00 %" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"sums: grader was .* and is .*; resume with what it was"):
        evaluated("first", *other, "--resume", "true")
    with pytest.raises(ConfigError, match=r"amc\.jsonl: the name 'amc' is a benchmark's or another file's; rename the file"):
        evaluated("third", data="tests/problems/amc.jsonl")
    with pytest.raises(ConfigError, match="--data takes the place of the benchmarks"):
        evaluated("third", "--evaluation.benchmarks", "[amc]")


@pytest.mark.full
def test_it_goes_on_where_it_was_killed_and_ends_the_same(model: Path, engines: Engines, tmp_path: Path) -> None:
    whole = run(request(model, tmp_path / "whole", evaluation__benchmarks="[amc, minerva]"), print, engines)
    part = run(request(model, tmp_path / "part", evaluation__benchmarks="[amc]"), print, engines)
    before = (part / "amc.jsonl").stat().st_mtime_ns
    lines: list[str] = []
    wanted = {"evaluation__benchmarks": "[amc, minerva]", "resume": "true"}
    run(request(model, part, **wanted), lines.append, engines)
    assert "AMC: evaluated before, kept" in lines and (part / "amc.jsonl").stat().st_mtime_ns == before
    for name in ("amc.jsonl", "minerva.jsonl", "evaluation.json"):
        assert (part / name).read_bytes() == (whole / name).read_bytes()
    assert len(engines.launches) == 3
    run(request(model, part, **wanted), lines.append, engines)
    assert len(engines.launches) == 3  # nothing was left to do
    samples = (part / "amc.jsonl").read_bytes()
    for damaged in (samples[:-9], samples[samples.index(b"\n") + 1 :], b"\0" + samples, b""):
        (part / "amc.jsonl").write_bytes(damaged)
        run(request(model, part, **wanted), lines.append, engines)
        assert (part / "amc.jsonl").read_bytes() == (whole / "amc.jsonl").read_bytes(), "damaged samples are taken again"


def _another_template(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": "{{ messages[0].content }}"}))


def _another_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tree = json.loads(path.read_text())
    tree["added_tokens"][0]["lstrip"] = True
    path.write_text(json.dumps(tree))


def _other_weights(folder: Path) -> None:
    change_tensors(folder, lambda weights: weights["model.norm.weight"].add_(1))


OTHERS: list[tuple[Any, dict[str, Any], str]] = [
    (_another_template, {}, "model.path: the chat template"),
    (_another_tokenizer, {}, "model.path: the tokenizer"),
    (_other_weights, {}, "its weights"),
    (None, {"seed": 1}, "seed"),
    (None, {"rollout__stop_token_ids": "[7]"}, "stop tokens"),
    (None, {"evaluation__benchmark_samples": 2}, "amc: samples"),
    (None, {"evaluation__benchmark_tokens": 40}, "amc: max_tokens"),
    ("problem", {}, "amc: its prompts and answers"),
    ("answer", {}, "amc: its prompts and answers"),
]


def test_a_resume_with_something_else_is_refused(model: Path, engines: Engines, tmp_path: Path) -> None:
    """Else one folder would hold benchmarks of two protocols, tokenizers or data."""
    own, data = tmp_path / "model", tmp_path / "amc.jsonl"
    rows = [json.loads(line) for line in Path("tests/problems/amc.jsonl").read_text().splitlines()]
    short = {
        "evaluation__benchmarks": "[amc]",
        "evaluation__benchmark_samples": 1,
        "evaluation__benchmark_folder": str(tmp_path),
    }

    def write(first: dict[str, Any]) -> None:
        """Put the model there as it was, and the rows with another first one."""
        shutil.copytree(model, own, dirs_exist_ok=True)
        data.write_text("".join(json.dumps(row) + "\n" for row in [first, *rows[1:]]))

    write(rows[0])
    out = run(request(own, tmp_path / "out", **short), print, engines)
    before = (out / "amc.jsonl").read_bytes()
    for change, words, name in OTHERS:
        write(rows[0] | ({change: "1"} if isinstance(change, str) else {}))
        if callable(change):
            change(own)
        with pytest.raises(DataError, match=f"{name} was .* and is .*; resume with what it was, give another --out"):
            run(request(own, out, **short | words, resume="true"), print, engines)
        assert (out / "amc.jsonl").read_bytes() == before
    write(rows[0])
    run(request(own, out, **short, resume="true"), print, engines)


@pytest.mark.parametrize(
    ("config", "words", "message"),
    [
        ({"max_position_embeddings": 303}, {}, r"evaluation\.benchmark_tokens = 304 tokens, and the model has .*=303"),
        (
            {},
            {"rollout__server__kv_cache_gib": 1e-5},
            r"kv_cache_gib=1e-05 holds \d+ tokens, and .* \+ evaluation",
        ),
    ],
)
def test_a_context_that_does_not_fit_is_refused_before_an_engine_starts(
    model: Path, engines: Engines, tmp_path: Path, config: dict[str, Any], words: dict[str, Any], message: str
) -> None:
    own = Path(shutil.copytree(model, tmp_path / "model"))
    path = own / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(ConfigError, match=message):
        run(request(own, tmp_path / "out", **words), print, engines)
    assert engines.launches == []


def test_a_training_config_gives_the_settings(model: Path, tmp_path: Path) -> None:
    recipe = "examples/paper/models/mistral-7b.yaml"
    alone, from_recipe = settings(request(model, tmp_path)), settings(request(model, tmp_path, config=recipe, name="x"))
    assert set(alone.evaluation.benchmarks) == set(BENCHMARKS) and "aime24" not in from_recipe.evaluation.benchmarks
    assert (from_recipe.reward.workers, from_recipe.rollout.server.extra_args[0]) == (1, "--gpu-memory-utilization")
    with pytest.raises(ConfigError, match=r"command line: evaluation\.benchmark: unknown key; did you mean benchmarks\?"):
        settings(request(model, tmp_path, evaluation__benchmark="[amc]"))
    with pytest.raises(ConfigError, match=r"benchmark_prompt='solve' must hold <problem> once"):
        settings(request(model, tmp_path, evaluation__benchmark_prompt="solve"))
    trainer = {"parallel.tp": 2, "rollout.colocate": "true", "rollout.max_staleness": 0}
    cfg = settings(request(model, tmp_path, **trainer, rollout__server__urls="['http://elsewhere:8000']"))
    assert cfg.rollout.only and cfg.parallel.world_size == 1 and not cfg.rollout.colocate  # and no folder for weights is needed


def test_a_model_is_found_in_a_folder_a_run_or_a_checkpoint(model: Path, tmp_path: Path) -> None:
    finished = tmp_path / "run"
    shutil.copytree(model, finished / "hf")
    for given, found in ((model, model), (finished, finished / "hf")):
        with hf_model(given, tmp_path, print) as folder:
            assert folder == found
    (tmp_path / "empty").mkdir()
    with (
        pytest.raises(CheckpointError, match=r"empty: neither a Hugging Face model .* nor a Megatron checkpoint"),
        hf_model(tmp_path / "empty", tmp_path, print),
    ):
        pass
    with (
        pytest.raises(CheckpointError, match="no such directory; give a Hugging Face model, a run, or"),
        hf_model(tmp_path / "nowhere", tmp_path, print),
    ):
        pass


def converted_and_evaluated(rank: int, model: Path, engines: Engines, tmp_path: Path) -> None:
    """Evaluate in a world of its own, since the conversion joins one."""
    from tepo_megatron.checkpoint.convert.importing import import_hf

    run_folder = tmp_path / "run"
    for step in (1, 2):
        import_hf(model, run_folder / "checkpoints" / f"step-{step:08d}")
    lines: list[str] = []
    out = run(request(run_folder, tmp_path / "a", evaluation__benchmarks="[minerva]"), lines.append, engines)
    assert f"{run_folder / 'checkpoints' / 'step-00000002'} is converted to a Hugging Face model" in lines
    assert engines.launches[0].model_path.parent.parent == out and not engines.launches[0].model_path.exists()
    direct = run(request(model, tmp_path / "b", evaluation__benchmarks="[minerva]"), lines.append, engines)
    assert (out / "minerva.jsonl").read_bytes() == (direct / "minerva.jsonl").read_bytes()
    assert sorted(os.listdir(out)) == ["evaluation.json", "evaluation.md", "minerva.jsonl"]


@pytest.mark.slow
def test_a_megatron_checkpoint_is_converted_and_what_was_made_is_removed(model: Path, engines: Engines, tmp_path: Path) -> None:
    run_world(1, converted_and_evaluated, model, engines, tmp_path)


def test_the_command_refuses_in_one_line(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, phrase in (
        (["evaluate", str(model), "--published", "gpt"], "--published gpt: the paper has no such rows; use one of auto, all,"),
        (["evaluate", str(tmp_path / "x"), "--out", str(tmp_path / "o")], "no such directory; give a Hugging Face model"),
        (["compare", str(tmp_path), str(tmp_path), "--seed", "1"], "tepo compare takes no --seed"),
    ):
        assert parsers.main(words) == 1
        assert phrase in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parsers.main(["evaluate", "--out", "x", str(model)])
    assert "the checkpoint comes first" in capsys.readouterr().err
    assert json.loads((model / "config.json").read_text())["num_hidden_layers"] == 1
