"""Runs of every engine with trainers of several layouts: what it samples with is what the actor has, to the last bits.

Each server is started once, by `tepo serve`, and serves one run after the other: none may take the weights that the run before
it left for its own.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3MoeConfig

from tepo_megatron.rollout import record
from tests.e2e.conftest import commands, settings
from tests.pairwise import pairwise
from tests.recorded import step_records
from tests.tiny import VOCAB_SIZE, tiny_model

pytestmark = [pytest.mark.server, pytest.mark.e2e, pytest.mark.full]
STEPS = 5
LAYOUTS = {"TP2": {"tp": 2}, "PP2": {"tp": 1, "pp": 2}, "TP2xPP2": {"tp": 2, "pp": 2}, "EP2": {"tp": 1, "ep": 2, "dp": 2}}
LAYOUTS["EP2 replay"] = LAYOUTS["EP2"]  # replays the engine's experts
RETURN_EXPERTS = ("sglang",)  # on a CPU
ENGINES, SERVER_TP = ("vllm", "sglang"), (1, 2)
DENSE = [("TP2", "shm"), ("PP2", "shm"), ("TP2xPP2", "shm"), ("PP2", "group")]


def cases() -> list[Any]:
    """Return each pair of engine, its tp and what a trainer of the dense model does; for a mixture of experts all of them."""
    found = [((engine, tp, "dense"), *run) for engine, tp, run in pairwise(ENGINES, SERVER_TP, DENSE)]
    for engine, tp in itertools.product(ENGINES, SERVER_TP):
        layouts = ["EP2", "EP2 replay"] if engine in RETURN_EXPERTS else ["EP2"]
        found += [((engine, tp, "mixture"), layout, "shm") for layout in layouts]
    found.sort(key=lambda case: case[0])  # a server is started once for all that it serves
    return [pytest.param(*case, id=f"{case[0][0]}-tp{case[0][1]}-{case[1]}-{case[2]}") for case in found]


@dataclass
class ServedElsewhere:
    """A server that a `tepo serve` keeps."""

    model: Path
    settings: dict[str, object]
    key: str


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


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, base: Path, mixture: Path
) -> Iterator[ServedElsewhere]:
    engine, tp, kind = request.param
    folder, model = tmp_path_factory.mktemp(f"{engine}-{tp}-{kind}"), base if kind == "dense" else mixture
    about = {"rollout__engine": engine, "rollout__server__tp": tp}
    if kind == "mixture" and engine in RETURN_EXPERTS:
        about["rollout__replay_experts"] = "true"
    where = {"rollout__server__rendezvous": folder / "servers", "sync__transport__folder": folder / "weights", "output": folder}
    with commands(folder) as tepo:
        serve = tepo("serve", "examples/demo.yaml", *settings(model, **about, **where))
        serve.until(lambda: bool(serve.ready_urls()), timeout=240)
        found = about | {"rollout__server__urls": f"[{serve.ready_urls()[0]}]"}
        yield ServedElsewhere(model, found, (folder / "servers" / "key").read_text().strip())


@pytest.mark.parametrize(("served", "layout", "transport"), cases(), indirect=["served"], scope="module")
def test_rollouts_are_of_the_actors_weights(
    tepo, arguments, served: ServedElsewhere, layout: str, transport: str, tmp_path: Path
) -> None:
    overrides = {f"parallel__{axis}": size for axis, size in LAYOUTS[layout].items()}
    overrides |= {"optimizer__warmup_steps": 0, "evaluation__max_problems": 8, "optimizer__lr": "1e-3"}
    overrides |= {"training__steps": STEPS, "rollout__prompts_per_step": 8, "training__minibatch_prompts": 4}
    overrides |= served.settings | {"name": "run", "sync__transport": transport}
    overrides |= {"sync__transport__folder": tmp_path / "weights"} if transport == "shm" else {}
    if layout == "EP2":
        overrides["rollout__replay_experts"] = "false"  # the server could report them whether or not the run asks
    if layout == "EP2 replay":
        overrides["rollout__record"] = "true"
    # which problems are solved differs from machine to machine: every step trains, and the entropy moves the weights
    overrides |= {"rollout__filter_uniform_groups": "false", "objective__entropy_coefficient": 0.1, "training__epochs": 1}
    command = tepo(*arguments(served.model, **overrides), env={"TEPO_SERVER_KEY": served.key})
    assert command.wait(240) == 0, command.output
    command.assert_nothing_left()
    records = step_records(tmp_path / "runs/run")
    assert len(records) == STEPS
    print(f"largest mean log-prob difference: {max(r['rollout/logprob_diff_mean'] for r in records):.1e}")
    for r in records:
        assert r["rollout/logprob_diff_mean"] <= 1e-5 and r["actor/grad_norm"] > 0 and r["rollout/staleness"] == 0
    if layout == "EP2 replay":
        kept, _ = record.read(tmp_path / "runs/run" / record.FOLDER, STEPS)
        assert all(r.experts_LKT is not None and r.experts_LKT.shape[1:] == (2, 2) for r in kept)
