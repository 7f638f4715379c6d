"""Runs of every engine with trainers of several layouts: what it samples with is what the actor has, to the last bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import Qwen3MoeConfig

from tests.tiny import VOCAB_SIZE, tiny_model

pytestmark = [pytest.mark.server, pytest.mark.e2e]
STEPS = 5
LAYOUTS = {"TP2": {"tp": 2}, "PP2": {"tp": 1, "pp": 2}, "TP2xPP2": {"tp": 2, "pp": 2}, "EP2": {"tp": 1, "ep": 2, "dp": 2}}
# both sizes of each engine, and all layouts with each; weights through process groups once
CASES = [
    pytest.param(engine, tp, layout, "shm", id=f"{engine}-tp{tp}-{layout}", marks=pytest.mark.full)
    for engine in ("vllm", "sglang")
    for layout, tp in zip(LAYOUTS, (1, 2, 1, 2), strict=True)
] + [pytest.param("vllm", 1, "PP2", "group", id="vllm-tp1-PP2-group", marks=pytest.mark.full)]


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """A random mixture of experts with the base model's problems: it learns nothing, but its weights move.

    vLLM on CPU pads and packs experts of this width, which an update has to undo.
    """
    out = tmp_path_factory.mktemp("mixture") / "model"
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=256, moe_intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
        max_position_embeddings=512, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    tiny_model(out, config, seed=1, scale=2.0)
    for name in ("train.jsonl", "eval.jsonl"):
        (out / name).write_text((base / name).read_text())
    return out


@pytest.mark.parametrize(("engine", "tp", "layout", "transport"), CASES)
def test_rollouts_are_of_the_actors_weights(
    tepo, arguments, base: Path, mixture: Path, tmp_path: Path, engine: str, tp: int, layout: str, transport: str
) -> None:
    overrides = {f"parallel__{axis}": size for axis, size in LAYOUTS[layout].items()}
    overrides |= {
        "rollout__engine": engine,
        "rollout__server__tp": tp,
        "sync__transport": transport,
        "training__steps": STEPS,
        "name": "run",
    }
    overrides |= {"optimizer__warmup_steps": 0, "evaluation__max_problems": 8, "optimizer__lr": "1e-3"}
    model = base
    if layout == "EP2":
        model = mixture  # which never solves a problem: the entropy moves its weights
        overrides |= {"rollout__filter_uniform_groups": "false", "objective__entropy_coefficient": 0.1}
        overrides |= {"training__epochs": 1, "rollout__prompts_per_step": 8, "training__minibatch_prompts": 4}
    command = tepo(*arguments(model, **overrides))
    assert command.wait(300) == 0, command.output
    command.assert_nothing_left()
    records = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    assert len(records) == STEPS
    print(f"largest mean log-prob difference: {max(r['rollout/logprob_diff_mean'] for r in records):.1e}")
    for r in records:
        assert r["rollout/logprob_diff_mean"] <= 1e-5 and r["actor/grad_norm"] > 0 and r["rollout/staleness"] == 0
