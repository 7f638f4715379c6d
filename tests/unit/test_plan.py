"""`tepo plan`: sizes that are published, what is refused and why, the command, the recipes, and the pages that quote it."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.plan import ROWS, PublishedRun, predicted_seconds
from tepo_megatron.actor.precision import optimizer_fields
from tepo_megatron.base.hardware import GPUS
from tepo_megatron.command.parsers import main
from tepo_megatron.config import Config, MegatronConfig, ModelConfig, ParallelConfig
from tepo_megatron.config.io import load_config, to_yaml, validate
from tepo_megatron.doctor.plan.command import MEASURED, PlanRequest, plan, predictor_of, read_model
from tepo_megatron.doctor.plan.inputs import Placement, max_generation_rounds, placement_of
from tepo_megatron.doctor.plan.memory import (
    FP8_WORKSPACES,
    MOMENT,
    TEACHER_ON_HOST,
    TrainerMemory,
    host_bytes,
    kv_bytes,
    state_bytes,
)
from tepo_megatron.doctor.plan.parameters import held, sequence_state_bytes, total_parameters
from tepo_megatron.doctor.plan.search import judge, search
from tepo_megatron.service.method import resolve

RECIPES = sorted(Path("examples/recipes").glob("*.yaml"))
# parameters that the model's page on Hugging Face counts in its safetensors
PUBLISHED = {
    "Qwen2.5-7B": 7_615_616_512,
    "DeepSeek-R1-Distill-Qwen-7B": 7_615_616_512,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Llama-3.1-8B": 8_030_261_248,
    "DeepSeek-R1-Distill-Llama-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Mistral-7B-Instruct-v0.2": 7_241_732_096,
}


def config(model: str = "models/Qwen2.5-7B", **sections: Any) -> Config:
    tree: dict[str, Any] = {"name": "planned", "model": {"path": model}, "data": {"train": "unused"}}
    for name, keys in sections.items():
        tree[name] = {**tree.get(name, {}), **keys}
    return validate(tree)


def run(cfg: Config, **request: Any) -> tuple[int, str]:
    lines: list[str] = []
    asked = PlanRequest(**request)
    return plan(predictor_of(cfg, asked), asked, lines.append), "\n".join(lines)


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_of_known_models(name: str) -> None:
    family, arch = read_model(f"models/{name}")
    assert total_parameters(family.rows, arch) == PUBLISHED[name]


def both_moments(kind: str) -> dict[str, Any]:
    return {"exp_avg_dtype": kind, "exp_avg_sq_dtype": kind}


@pytest.mark.parametrize(
    ("precision", "keys", "element"),
    [
        ("bf16", {}, 12),
        ("bf16", both_moments("bf16"), 6),  # of the masters the 16 bits that the weights lack
        ("bf16", both_moments("fp8"), 4),
        ("bf16", {"optimizer_offload_fraction": 0.75}, 3),
        ("fp32", {}, 8),
        ("fp32", both_moments("bf16"), 8),
        ("fp32", {"optimizer_offload_fraction": 1.0}, 0),
    ],
)
def test_the_optimizers_bytes_of_an_element(precision: str, keys: dict[str, Any], element: float) -> None:
    family, arch = read_model("Qwen2.5-7B")
    mine = held(family.rows, arch, ParallelConfig(dp=4), 0)
    megatron = MegatronConfig(optimizer=keys)
    adam = megatron.known_optimizer
    found = state_bytes(mine, precision, adam)
    assert found["optimizer"] == pytest.approx(element * mine.owned)
    assert found | {"optimizer": 0} == state_bytes(mine, precision) | {"optimizer": 0}
    moments = optimizer_fields(ModelConfig(path="m"), megatron, "cuda")
    assert MOMENT[adam.exp_avg_dtype] == moments.get("exp_avg_dtype", torch.float32).itemsize


def test_an_offloaded_optimizer_takes_host_memory_and_time() -> None:
    """State that leaves the GPU is in host memory, with gradients, for each rank of a machine; the update waits for it."""
    here, there = (
        predictor_of(
            config(megatron={"optimizer": {"optimizer_offload_fraction": share}}, checkpoint={"every": 0}, parallel={"dp": 4}),
            PlanRequest(),
        )
        for share in (0.0, 1.0)
    )
    whole = total_parameters(here.model.family.rows, here.model.arch)
    parts = host_bytes(there.cfg, there.model)
    assert parts["optimizer's share of the host"] == 16 * whole, "all ranks of the machine together"
    assert parts.keys() - host_bytes(here.cfg, here.model).keys() == {"optimizer's share of the host"}
    assert there.optimizer_seconds()[1] > 5 * here.optimizer_seconds()[1]


@pytest.mark.parametrize(("gpus", "verdict"), [(8, "fits: "), (4, "does not fit: 8 GPUs are needed, 4 are available; lower ")])
def test_the_last_line_says_whether_it_fits(gpus: int, verdict: str) -> None:
    parallel = {"dp": 4, "tp": 2, "sequence_parallel": True}
    training = {"max_tokens_per_microbatch": 10240, "recompute": "full"}
    cfg = config(rollout={"colocate": True, "servers": 4, "server": {"tp": 2}}, parallel=parallel, training=training)
    status, text = run(cfg, gpus=gpus)
    assert text.splitlines()[-1].startswith(verdict) and status == int(gpus == 4)


def placed(cfg: Config) -> Placement:
    return placement_of(cfg.parallel.world_size, cfg.rollout)


def test_trainer_and_engine_are_placed_on_the_gpus_of_the_config() -> None:
    server = {"tp": 2}
    apart = config(rollout={"servers": 2, "server": {**server, "rendezvous": "x"}}, sync={"transport": "group"})
    assert (placed(apart).kind, placed(apart).gpus) == ("disaggregated", 5)
    turns = config(rollout={"colocate": True, "servers": 2, "server": server}, parallel={"dp": 4})
    assert (placed(turns).kind, placed(turns).gpus) == ("colocated", 4)
    here = placed(config(rollout={"servers": 2, "server": server}))
    assert (here.kind, here.gpus, here.fault) == ("disaggregated", 5, "")
    assert "9 GPUs of ranks and servers do not fit" in placed(config(rollout={"servers": 4, "server": server})).fault


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"parallel": {"tp": 8, "sequence_parallel": True}}, "parallel.tp=8 does not divide num_query_groups=4"),
        (
            {"parallel": {"pp": 32}, "rollout": {"server": {"rendezvous": "x"}}, "sync": {"transport": {"folder": "x"}}},
            "pp=32 exceeds",
        ),
        ({"parallel": {"dp": 16}, "rollout": {"colocate": True}}, "the first of 2 machines"),
        ({"parallel": {"tp": 2, "dp": 4}, "rollout": {"colocate": True}, "training": {"max_tokens_per_microbatch": 10**5}},
         r"GiB too much to train; the greatest part is activations, [\d.]+ GiB: lower training.max_tokens_per_microbatch"),
        ({"parallel": {"dp": 8}, "rollout": {"colocate": True}}, "the greatest part is (activations|gradients)"),
        ({"rollout": {"colocate": True, "server": {"extra_args": ["--gpu-memory-utilization", "0.2"]}},
          "parallel": {"tp": 4, "cp": 2, "sequence_parallel": True}},
         "holds no sequence"),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_fit_says_why(sections: dict[str, Any], why: str) -> None:
    status, output = run(config(**sections))
    assert status == 1
    assert re.search(why, output.splitlines()[-1]), output.splitlines()[-1]


def test_a_teacher_has_an_output_layer_hidden_states_and_a_pass() -> None:
    training = {"logits_budget_mib": 256, "minibatch_prompts": 8}
    rollout = {"colocate": True, "server": {"tp": 4}, "samples_per_prompt": 4}
    exact, sampled = (
        predictor_of(
            config(rollout=rollout, training=training, objective={"name": "grpo", "ref_kl": {"beta": 0.1, "estimator": kind}}),
            PlanRequest(),
        )
        for kind in ("full", "k3")
    )
    arch, rows = exact.model.arch, exact.cfg.training.max_tokens_per_microbatch
    parts = TrainerMemory.of(exact.cfg, exact.model).state().parts
    assert parts["teacher"] == (arch.vocab_size / exact.cfg.parallel.tp + rows) * arch.hidden_size * 2
    assert "teacher" not in TrainerMemory.of(sampled.cfg, sampled.model).state().parts
    kept, ranks = host_bytes(exact.cfg, exact.model, 100)[TEACHER_ON_HOST], exact.cfg.parallel.world_size
    assert kept == ranks * 8 * 4 * 100 / exact.cfg.parallel.dp * arch.hidden_size * 2
    assert TEACHER_ON_HOST not in host_bytes(sampled.cfg, sampled.model)
    its, others = exact.step().phases, sampled.step().phases
    assert its["teacher"] > others["reference log-probs"] > 0 == its["reference log-probs"] == others["teacher"]


def test_the_search_ranks_the_layouts_that_fit() -> None:
    cfg = load_config("examples/recipes/qwen2.5-7b-8gpu-colocated.yaml")
    predictor = predictor_of(cfg, PlanRequest())
    found = search(predictor, 8)
    assert found.seen == len(found.best) + sum(map(len, found.refused.values()))
    speeds = [layout.step.tokens_per_second for layout in found.best if layout.step]
    assert len(speeds) == len(found.best) and speeds == sorted(speeds, reverse=True)
    assert any("does not divide num_query_groups=4" in why for why in found.refused)
    for layout in found.best:  # what the search says of a layout is what it says of the config alone
        assert layout.cfg.parallel.world_size == 8 and layout.fullest.total <= GPUS["H100"].memory
    alone = judge(predictor_of(found.best[-1].cfg, PlanRequest()))
    assert alone.step is not None and alone.step.seconds == found.best[-1].step.seconds
    more = search(replace(predictor, gpu=GPUS["H200"]), 8)
    assert len(more.best) > len(found.best)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipes_in_fp8_allow_for_its_rounding(path: Path) -> None:
    """0.012 nats, the emulated error of 3 layers (docs/precision.md), grown with the square root of depth, twice over."""
    cfg = load_config(path)
    layers = {"qwen2.5-7b": 28, "qwen3-14b": 40, "qwen3.5-9b": 32, "qwen3.5-27b": 64}[path.stem.partition("b-")[0] + "b"]
    in_fp8 = cfg.model.precision.startswith("fp8")
    assert in_fp8 == ("fp8" in path.stem)
    assert (cfg.sync.max_logprob_diff > 2 * 0.012 * (layers / 3) ** 0.5) is in_fp8
    assert cfg.sync.max_logprob_diff < 0.5  # what wrong weights gave


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipes_fit_an_h100(path: Path) -> None:
    cfg = load_config(path)
    gpus = int(re.search(r"(\d+)gpu", path.stem)[1])
    assert cfg.name == path.stem and placed(cfg).gpus == gpus
    layout = judge(predictor_of(cfg, PlanRequest()))
    assert layout.why == "" and layout.fullest.total < 0.95 * GPUS["H100"].memory  # with a margin for what is not modelled
    assert cfg.rollout.colocate == path.stem.endswith("colocated")


def test_the_command_writes_json_and_refuses_wrong_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, file = "examples/recipes/qwen2.5-7b-8gpu-colocated.yaml", tmp_path / "plan.json"
    assert main(["plan", recipe, "--gpu", "H200", "--json", str(file), "--parallel.cp", "1", "--parallel.dp", "4"]) == 0
    out = json.loads(file.read_text())
    assert out["gpu"] == "H200" and out["given"]["fits"] and out["best"][0]["tokens_per_second"] > 0
    assert "tp2+sp dp4" in capsys.readouterr().out
    assert main(["plan", recipe, "--parallel.tp", "8"]) == 1
    for words, message in (
        (["--dropped", "1"], "--dropped 1: a share of at least 0 and below 1"),
        (["--model.path", "models/nobody"], "nobody is none of the models whose sizes are known"),
    ):
        assert main(["plan", recipe, *words]) == 1
        assert message in capsys.readouterr().err


HYBRID_27B = "models/Qwen3.5-27B"


def test_the_sizes_of_hybrids_are_those_that_their_names_say() -> None:
    for name, billions in (("Qwen3.5-9B", 8.95), ("Qwen3.5-27B", 26.9)):
        family, arch = read_model(f"models/{name}")
        assert total_parameters(family.rows, arch) / 1e9 == pytest.approx(billions, rel=0.001)
        assert len(arch.linear_layers) == 3 * arch.num_layers // 4


def test_fp8_copies_of_weights() -> None:
    """The copies of Qwen3-14B with tp=4 take two bytes per element of the four linear modules of 40 layers."""
    cfg = load_config("examples/recipes/qwen3-14b-16gpu-colocated.yaml")
    fp8 = replace(cfg.model, precision="fp8-current")
    layer = 5120 * ((40 + 2 * 8) * 128 + 40 * 128 + 3 * 17408) / cfg.parallel.tp
    ends = {"num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 2}
    in_bf16 = MegatronConfig(transformer={"first_last_layers_bf16": True, **ends})
    for model, megatron, expected in (
        (cfg.model, cfg.megatron, None),
        (fp8, cfg.megatron, 2 * 40 * layer),
        (fp8, in_bf16, 2 * 36 * layer),
        (replace(fp8, precision="fp8-blockwise"), cfg.megatron, (2 + 8 / 128**2) * 40 * layer),
    ):
        predictor = predictor_of(replace(cfg, model=model, megatron=megatron), PlanRequest())
        assert TrainerMemory.of(predictor.cfg, predictor.model).state().parts.get(FP8_WORKSPACES) == expected


@pytest.mark.parametrize("path", [*RECIPES, *sorted(Path("examples/paper").glob("table*/*.yaml"))], ids=lambda p: p.stem)
def test_refills_are_those_of_the_run(path: Path) -> None:
    cfg = load_config(path)
    assert max_generation_rounds(cfg.rollout, cfg.objective) == resolve(cfg).max_generation_rounds


def test_an_engine_of_a_hybrid_caches_keys_of_some_layers_and_a_state_per_sequence() -> None:
    _, arch = read_model(HYBRID_27B)
    assert kv_bytes(arch, 1) == 2 * 16 * 4 * 256 * 2 and kv_bytes(arch, 4) == kv_bytes(arch, 1) / 4
    state = 48 * (48 * 128 * 128 * 4 + 3 * 10240 * 2)
    assert sequence_state_bytes(arch, 1) == state and sequence_state_bytes(arch, 2) == state / 2


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_a_published_step_is_predicted_within_35_percent(row: PublishedRun) -> None:
    assert 0.65 <= predicted_seconds(row) / row.seconds <= 1.35


RECIPE = "examples/recipes/qwen3-14b-16gpu-apart.yaml"
SECONDS = {"rollout": 210.0, "old_stats": 31.0, "update": 140.0, "sync": 9.0, "total": 402.0}
PROMPT, RESPONSE, GROUPS, KEPT = 180, 2500, 80, 64


@pytest.fixture
def recorded_run(tmp_path: Path) -> Path:
    """A run of the recipe whose later steps took SECONDS; its first ones took longer."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(load_config(RECIPE, [])))
    samples = load_config(RECIPE, []).rollout.samples_per_prompt
    rows = []
    for step in range(1, 11):
        seconds = {name: value * (3 if step < 4 else 1) for name, value in SECONDS.items()}
        row = {"step": step, "rollout/kept_groups": KEPT, "rollout/sampled_groups": GROUPS, "rollout/stale_groups": 0}
        row |= {"rollout/response_tokens_mean": RESPONSE} | {f"seconds/{name}": value for name, value in seconds.items()}
        row["tokens_per_second"] = KEPT * samples * (PROMPT + RESPONSE) / seconds["total"]
        rows.append(json.dumps(row))
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    return folder


@pytest.mark.parametrize(
    ("recipe", "ahead"), [(RECIPE, 0), (RECIPE, 1), ("examples/recipes/qwen3-14b-16gpu-colocated.yaml", 0)]
)
def test_the_plan_of_the_runs_own_config_has_the_runs_seconds(recorded_run: Path, recipe: str, ahead: int) -> None:
    words = ["--rollout.max_staleness", str(ahead)]
    (recorded_run / "config.yaml").write_text(to_yaml(load_config(recipe, words)))
    cfg = load_config(str(recorded_run / "config.yaml"), [])
    step = predictor_of(cfg, PlanRequest(run=recorded_run)).step()
    assert step.seconds == pytest.approx(SECONDS["total"], rel=1e-9)
    for name, phases in MEASURED.items():
        assert sum(step.phases[phase] for phase in phases) == pytest.approx(SECONDS[name], rel=1e-9), name
    assert step.tokens == pytest.approx(KEPT * cfg.rollout.samples_per_prompt * (PROMPT + RESPONSE), rel=0.01)


def test_a_plan_from_a_run_says_what_it_corrects_and_refuses_what_is_no_run(
    tmp_path: Path, recorded_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--from", str(recorded_run)]) == 0
    text = capsys.readouterr().out
    assert "recorded: prompts of 180 tokens, responses of 2500 on average" in text and "recorded: 20% of the groups" in text
    assert "from the recorded run, times: sample" in text
    assert main(["plan", "--from", str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().err
    rows = [
        {**json.loads(line), "rollout/kept_groups": 0} for line in (recorded_run / "metrics.jsonl").read_text().splitlines()
    ]
    (recorded_run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["plan", RECIPE, "--from", str(recorded_run)]) == 1
    assert "none of its later steps learned from a group" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_causes_no_traceback() -> None:
    """`tepo plan ... | head -n 1`"""
    words = [sys.executable, "-m", "tepo_megatron", "plan", "examples/recipes/qwen2.5-7b-8gpu-colocated.yaml"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert "7B" in process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait(60) == 0
