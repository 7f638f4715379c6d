"""`tepo plan`: FP8 copies, a sleeping engine, page-locked memory, refills, evaluations, checkpoints."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.config import Config, MegatronConfig
from tepo_megatron.config.io import load_config
from tepo_megatron.controller.method import resolve
from tepo_megatron.evaluation import benchmarks
from tepo_megatron.plan.command import PlanRequest, predictor_of
from tepo_megatron.plan.gpus import ASSUMED, GPUS
from tepo_megatron.plan.memory import FP8_WORKSPACES, TrainerMemory, host_bytes, states
from tepo_megatron.plan.memory_parts import MemoryState, PlannedModel
from tepo_megatron.plan.models import read_model
from tepo_megatron.plan.parameters import held, total_parameters
from tepo_megatron.plan.step import REFILLS
from tepo_megatron.plan.whole_run import BENCHMARKS, WholeRun, asked, time_range, whole_run
from tepo_megatron.plan.workload import Workload, max_generation_rounds
from tepo_megatron.utils.host_sizes import block_bytes
from tests.unit.test_plan import RECIPES, config


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


def states_of(cfg: Config, model: PlannedModel, gpu: str) -> list[MemoryState]:
    return states(TrainerMemory.of(cfg, model), cfg.rollout, cfg.sync, GPUS[gpu])


def test_fp8_copies_go_with_the_parameters() -> None:
    for recipe, where in (("colocated", ["train"]), ("apart", ["train", "sync"])):
        predictor = predictor_of(load_config(f"examples/recipes/qwen3-14b-16gpu-fp8-{recipe}.yaml"), PlanRequest())
        found = states_of(predictor.cfg, predictor.model, "H100")
        assert [state.name for state in found if FP8_WORKSPACES in state.parts] == where


@pytest.mark.parametrize(
    ("engine", "tp", "args", "gives_back"),
    [
        ("sglang", 1, [], 0),
        ("vllm", 2, [], ASSUMED.graphs),
        ("vllm", 2, ["--enable-nccl-comm-suspend"], ASSUMED.graphs + ASSUMED.nccl),
        ("vllm", 1, ["--enable-nccl-comm-suspend"], ASSUMED.graphs),
    ],
)
def test_a_sleeping_engine_keeps_its_assumed_memory(engine: str, tp: int, args: list[str], gives_back: int) -> None:
    server = {"tp": tp, "extra_args": args}
    cfg = config(rollout={"engine": engine, "colocate": True, "server": server}, parallel={"dp": tp})
    family, arch = read_model(cfg.model.path)
    train = next(state for state in states_of(cfg, PlannedModel(family, arch), "H200") if state.name == "train")
    assert train.parts["sleeping engine"] == ASSUMED.asleep - gives_back > 0


def test_page_locked_memory_of_a_machine() -> None:
    """Qwen3-14B locks all weights twice over cp, and the optimizer's state once; of two machines the fuller one counts."""
    predictor = predictor_of(load_config("examples/recipes/qwen3-14b-8gpu-colocated.yaml"), PlanRequest())
    whole = total_parameters(predictor.model.family.rows, predictor.model.arch)
    found = host_bytes(predictor.cfg, predictor.model)["weights and optimizer while the engine has the GPU"]
    assert found == pytest.approx((2 * 2 + 12) * whole, rel=1e-3)
    family, arch = read_model("models/Llama-3.1-8B")  # whose last stages have the norm besides
    cfg = config(
        "models/Llama-3.1-8B", objective={"ref_kl": {"beta": 0.1}}, parallel={"tp": 8, "pp": 2, "sequence_parallel": True},
        rollout={"server": {"rendezvous": "x"}}, sync={"transport": "group"},
    )  # fmt: skip
    stages_ = [held(family.rows, arch, cfg.parallel, rank).parameters for rank in range(2)]
    assert stages_[1] == stages_[0] + arch.hidden_size
    assert host_bytes(cfg, PlannedModel(family, arch)) == {"reference policy": 8 * block_bytes(2 * stages_[1])}


@pytest.mark.parametrize("path", [*RECIPES, *sorted(Path("examples/paper").glob("table*/*.yaml"))], ids=lambda p: p.stem)
def test_refills_are_those_of_the_run(path: Path) -> None:
    cfg = load_config(path)
    assert max_generation_rounds(cfg.rollout, cfg.objective) == resolve(cfg).max_generation_rounds


def test_rounds_of_a_step() -> None:
    cfg = config(rollout={"prompts_per_step": 64, "max_generation_rounds": 10})
    assert Workload.of(cfg).dropped == ASSUMED.uniform_groups
    assert Workload(1, 1, 1, 0.5).rounds(cfg.rollout, cfg.objective) == ([64, 32, 16, 8, 4, 2, 1], 64)
    assert Workload(1, 1, 1).rounds(cfg.rollout, cfg.objective) == ([64], 64)
    few = config(rollout={"prompts_per_step": 64, "max_generation_rounds": 2, "oversample": 1.25})
    assert Workload(1, 1, 1, 0.5).rounds(few.rollout, few.objective) == ([80, 30], 55)
    everything = config(rollout={"filter_uniform_groups": False})
    assert Workload.of(everything, dropped=0.5).rounds(everything.rollout, everything.objective) == ([64], 64)


def test_refills_take_time_and_what_is_dropped_is_not_learned_from() -> None:
    once, again = (predictor_of(config(rollout={"max_generation_rounds": n}), PlanRequest()) for n in (1, 10))
    none = predictor_of(config(rollout={"max_generation_rounds": 10}), PlanRequest(dropped=0.0))
    steps = [p.step() for p in (once, again, none)]
    assert steps[1].phases["sample"] == steps[0].phases["sample"] == steps[2].phases["sample"]
    assert steps[1].phases[REFILLS] > 0 == steps[0].phases[REFILLS] == steps[2].phases[REFILLS]
    assert steps[0].tokens == pytest.approx(0.6 * steps[1].tokens, rel=0.02) and steps[1].tokens == steps[2].tokens
    assert steps[1].seconds - steps[2].seconds == pytest.approx(steps[1].phases[REFILLS])


def test_the_plans_benchmarks_are_those_of_evaluations() -> None:
    assert {name: (b.problems, b.samples) for name, b in benchmarks.BENCHMARKS.items()} == dict(BENCHMARKS)


def sampled(cfg: Config) -> list[tuple[int, int, int]]:
    return list(asked(cfg.data.eval, cfg.evaluation, cfg.rollout.max_response_tokens))


def test_evaluation_samples_are_counted_by_set() -> None:
    both = config(
        data={"eval": "held.jsonl[100:400]"}, rollout={"max_response_tokens": 512},
        evaluation={"samples": 4, "benchmarks": ["aime24", "math500"], "benchmark_tokens": 1024, "benchmark_samples": 16},
    )  # fmt: skip
    assert sampled(both) == [(300, 4, 512), (30, 16, 1024), (500, 1, 1024)]
    few = replace(both, evaluation=replace(both.evaluation, max_problems=50))
    assert sampled(few) == [(50, 4, 512), (30, 16, 1024), (50, 1, 1024)]
    assert sampled(config(data={"eval": "held.jsonl"})) == [(ASSUMED.held_out, 1, 8192)]


@pytest.mark.parametrize(
    ("keys", "evaluations", "checkpoints"),
    [
        ({"training": {"steps": 10}}, 2, 0),
        ({"training": {"steps": 10}, "data": {"eval": "x"}, "evaluation": {"every": 5}, "checkpoint": {"every": 4}}, 3, 3),
        ({"training": {"steps": 11}, "data": {"eval": "x"}, "evaluation": {"every": 5}, "checkpoint": {"every": 11}}, 4, 1),
        ({"training": {"steps": 10}, "rollout": {"replay": "x"}}, 0, 0),
    ],
    ids=str,
)
def test_how_often_a_run_stops(keys: dict[str, Any], evaluations: int, checkpoints: int) -> None:
    found = whole_run(predictor_of(config(**keys), PlanRequest()), 100.0)
    assert (found.evaluations, found.checkpoints) == (evaluations, checkpoints)


def test_the_time_of_a_run_adds_up_steps_evaluations_and_checkpoints() -> None:
    found = WholeRun(10, 100.0, 3, 50.0, 2, 5.0, 40.0, 8, 0.3)
    assert found.seconds == 1200 and found.gpu_hours == pytest.approx(8 / 3)
    low, high = time_range(100.0, 0.3)
    assert (low * 1.3, high * 0.7) == (pytest.approx(100), pytest.approx(100))
    waits, writes = (
        whole_run(predictor_of(config(checkpoint={"every": 5, "asynchronous": on}), PlanRequest()), 100.0)
        for on in (True, False)
    )
    assert writes.checkpoint > 10 * waits.checkpoint > 0 and waits.ending > writes.ending


def test_a_reader_that_has_seen_enough_causes_no_traceback() -> None:
    """`tepo plan ... | head -n 1`"""
    words = [sys.executable, "-m", "tepo_megatron", "plan", "examples/recipes/qwen2.5-7b-8gpu-colocated.yaml"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as plan:
        assert plan.stdout is not None and plan.stderr is not None
        assert "7B" in plan.stdout.readline()
        plan.stdout.close()
        assert plan.stderr.read() == "" and plan.wait(60) == 0
