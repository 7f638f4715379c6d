"""Supervised fine-tuning: two updates on every layout are those of an fp64 masked cross-entropy; runs resume bit for bit."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.config import Config
from tepo_megatron.config.io import plain, validate
from tepo_megatron.trainer.sft.conversations import Demonstration
from tepo_megatron.trainer.sft.settings import CROSS_ENTROPY, supervised
from tests.marks import full_but
from tests.parallel import cases
from tests.parallel.cases import open_actor
from tests.reference import tepo as reference
from tests.tiny import tensors, tiny_qwen3
from tests.worlds import run_world

LAYOUTS = {**cases.LAYOUTS, "EP2": {"ep": 2, "dp": 2}}
LENGTHS = (18, 5, 31, 2, 40, 9, 12, 27, 6, 33)


def conversations() -> list[Demonstration]:
    """Turns of the assistant with turns of others in between, one token to learn, and the last token not learned."""
    generator, found = torch.Generator().manual_seed(3), []
    for i, length in enumerate(LENGTHS):
        ids = torch.randint(1, cases.VOCAB, (length,), generator=generator)
        mask = torch.arange(length) >= min(length - 1, 1 + i % 4)
        mask[length // 2 : length // 2 + i % 3] = False
        mask[-1] |= not mask.any()
        if i == 4:
            mask[-3:] = False
        found.append(Demonstration(ids, mask))
    return found


def config(model: Path, layout: dict[str, Any], max_tokens: int = 4096, **more: Any) -> Config:
    return validate(
        supervised({
            "name": "sft", "platform": "cpu", "model": {"path": str(model), "precision": "fp32"}, "parallel": layout,
            "optimizer": {"lr": cases.ADAM["lr"]},
            "megatron": plain(cases.run_config(model, {}))["megatron"],
            "training": {"max_tokens_per_microbatch": max_tokens},
            "sft": {"data": "unused", "max_tokens": 40, "batch_sequences": 6},
            "rollout": {"temperature": 0.5, "on_weight_update": "restart"}, "objective": {"name": "tepo"},
        } | more)
    )  # fmt: skip


def updates(rank: int, cfg: Config) -> list[dict[str, Any]]:
    """Take the two updates of a pass over the conversations, as `FineTuning` takes them."""
    from tepo_megatron.service.batch_memory import BatchMemory
    from tepo_megatron.trainer.batch_receiver import BatchReceiver
    from tepo_megatron.trainer.sft.loop import ConversationSource
    from tepo_megatron.trainer.sft.settings import TrainingPlan

    plan = TrainingPlan(len(LENGTHS), cfg.sft.batch_sequences, 1, None, cfg.seed)
    actor = open_actor(cfg)
    source = ConversationSource(plan, 0, [], actor.groups, BatchReceiver.open(actor.groups), BatchMemory(), conversations())
    out = cases.steps_of(actor, tuple(source.batch(step) for step in (1, 2)), CROSS_ENTROPY)
    return out


def expected(model: Path, plan: list[list[int]]) -> tuple[reference.Step, ...]:
    trainer, rows = reference.Trainer(model, **cases.ADAM), conversations()
    steps = []
    for indices in plan:
        total, tokens = torch.zeros((), dtype=torch.float64), 0
        for row in (rows[i] for i in indices):
            logits = trainer.model(row.token_ids_L[None]).logits[0, :-1]
            losses = torch.nn.functional.cross_entropy(logits, row.token_ids_L[1:], reduction="none")
            total = total + (losses * row.learned_mask_L[1:]).sum()
            tokens += int(row.learned_mask_L.sum())
        steps.append(trainer.take(total / tokens))
    return tuple(steps)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sft") / "model"
    tiny_qwen3(path, layers=4, vocab_size=cases.VOCAB)
    return path


@pytest.fixture(scope="module")
def steps(model: Path) -> tuple[reference.Step, ...]:
    from tepo_megatron.trainer.sft.settings import TrainingPlan

    plan = TrainingPlan(len(LENGTHS), 6, 1, None, 0)
    assert plan.steps == 2 and [len(plan.indices(step)) for step in (1, 2)] == [6, 4]
    assert sorted(plan.indices(1) + plan.indices(2)) == list(range(len(LENGTHS)))
    return expected(model, [plan.indices(1), plan.indices(2)])


@pytest.mark.parametrize(
    "name", full_but(["1 rank", "CP2 TP2"], ["PP2 VPP2", "DP2"], [name for name in LAYOUTS if name != "EP2"])
)
def test_every_layout_trains_to_the_masked_cross_entropy(model: Path, steps: tuple[reference.Step, ...], name: str) -> None:
    cfg = config(model, LAYOUTS[name])
    assert cfg.rollout.temperature == 1.0
    cases.compare(run_world(cfg.parallel.world_size, updates, cfg), steps)


MICROBATCHES = [("1 rank", 0), ("CP2", None), ("DP2", 0), ("TP2", 0)]


@pytest.mark.parametrize(("name", "budget"), full_but([("CP2", None)], [("TP2", 0)], MICROBATCHES))
def test_small_microbatches_and_chunks_of_logits(
    model: Path, steps: tuple[reference.Step, ...], name: str, budget: int | None
) -> None:
    cfg = config(model, LAYOUTS[name], training={"max_tokens_per_microbatch": 44, "logits_budget_mib": budget})
    cases.compare(run_world(cfg.parallel.world_size, updates, cfg), steps)


def run_files(folder: Path) -> Path:
    """Write a model with 24 conversations to learn and 6 held out."""
    tiny_qwen3(folder / "model", layers=2)
    for name, count in (("train", 24), ("eval", 6)):
        rows = [{"prompt": f"{i}+{i}=", "response": str(2 * i)} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_files(tmp_path_factory.mktemp("files"))


def run_once(rank: int, cfg: Config, kill_at: int) -> None:
    """Run `fine_tune`; rank 0 dies before update `kill_at`."""
    from tepo_megatron.dist.platform import activate
    from tepo_megatron.trainer.sft import loop

    if kill_at and rank == 0:
        taken = loop.ConversationSource.batch

        def deadly(self: Any, step: int) -> Any:
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return taken(self, step)

        loop.ConversationSource.batch = deadly  # type: ignore[method-assign]
    loop.fine_tune(cfg, activate("cpu"))


def fine_tuned(files: Path, output: Path, layout: dict[str, Any], kill_at: int = 0, **more: Any) -> Path:
    """Run to the end, resuming after a kill; return the run's folder."""
    from tepo_megatron.monitor import run_dir

    keys = {"output": str(output), "checkpoint": {"every": 2}} | more
    keys["sft"] = {
        "data": str(files / "train.jsonl"), "eval": str(files / "eval.jsonl"), "max_tokens": 32, "batch_sequences": 8,
        "epochs": 2, "eval_every": 2,
    }  # fmt: skip
    cfg = config(files / "model", layout, **keys)
    for attempt in (kill_at, 0) if kill_at else (0,):
        run_dir.prepare(cfg)
        if attempt:
            with pytest.raises(AssertionError):
                run_world(cfg.parallel.world_size, run_once, cfg, attempt, timeout=120.0)
            cfg = validate({**plain(cfg), "resume": True})
        else:
            run_world(cfg.parallel.world_size, run_once, cfg, 0, timeout=120.0)
    return cfg.run_dir


def results(run: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], Any]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [{k: v for k, v in row.items() if "seconds" not in k and "per_second" not in k} for row in rows]
    return rows, tensors(run / "hf"), json.loads((run / "summary.json").read_text())["held_out_loss"]


KILLS = [({"tp": 2}, 6), ({}, 1), ({"dp": 2}, 4)]


@pytest.mark.parametrize(("layout", "kill_at"), full_but([({"dp": 2}, 4)], [({}, 1)], KILLS), ids=str)
def test_a_killed_run_resumes_bit_for_bit(files: Path, tmp_path: Path, layout: dict[str, Any], kill_at: int) -> None:
    straight, resumed = (fine_tuned(files, tmp_path / str(kill), layout, kill) for kill in (0, kill_at))
    (rows, weights, losses), (of_resumed, its_weights, its_losses) = results(straight), results(resumed)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6] and rows == of_resumed
    assert weights.keys() == its_weights.keys() and all(torch.equal(its_weights[name], t) for name, t in weights.items())
    assert losses["after"] == its_losses["after"] < losses["before"]
    assert [row["sft/eval_loss"] is not None for row in rows] == [False, True, False, True, False, False]


def test_a_request_ends_the_run_with_its_last_update_saved(files: Path, tmp_path: Path) -> None:
    from tepo_megatron.base.errors import RunStopped
    from tepo_megatron.base.save_requests import STOP, STOPPED, TRACE, TRACED, ask

    def asks(rank: int, cfg: Config) -> str:
        from tepo_megatron.dist.platform import activate
        from tepo_megatron.trainer.sft import loop

        taken: Callable[..., Any] = loop.ConversationSource.batch

        def asking(self: Any, step: int) -> Any:
            if step == 2:
                ask(cfg.run_dir, TRACE)
            if step == 3:
                ask(cfg.run_dir, STOP)
            return taken(self, step)

        loop.ConversationSource.batch = asking  # type: ignore[method-assign]
        try:
            loop.fine_tune(cfg, activate("cpu"))
        except RunStopped as e:
            return str(e)
        return ""

    from tepo_megatron.monitor import run_dir

    keys = {"output": str(tmp_path), "checkpoint": {"every": 0}}
    keys["sft"] = {"data": str(files / "train.jsonl"), "max_tokens": 32, "batch_sequences": 4}
    cfg = config(files / "model", {}, **keys)
    run_dir.prepare(cfg)
    (said,) = run_world(1, asks, cfg)
    assert "ended on request after update 3, saved" in said and (cfg.run_dir / STOPPED).exists()
    assert (cfg.run_dir / TRACED).read_text().startswith("refused: tepo sft") and not (cfg.run_dir / TRACE).exists()
    assert (cfg.run_dir / "checkpoints" / "step-00000003").is_dir() and not (cfg.run_dir / "summary.json").exists()


def test_a_checkpoint_of_other_data_is_refused(files: Path, tmp_path: Path) -> None:
    run = fine_tuned(files, tmp_path, {})
    keys = {"output": str(tmp_path), "resume": True, "checkpoint": {"every": 2}}
    keys["sft"] = {"data": f"{files / 'train.jsonl'}[:20]", "max_tokens": 32, "batch_sequences": 8, "epochs": 3}
    with pytest.raises(AssertionError, match="20 conversations, and the checkpoint of update 6 was made with 24"):
        run_world(1, run_once, config(files / "model", {}, **keys), 0)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 6


@pytest.mark.parametrize("change", ["seed", "sft.batch_sequences", "sft.data: its tokens", "model.path: the tokenizer"])
def test_a_checkpoint_of_another_order_is_refused(files: Path, tmp_path: Path, change: str) -> None:
    """Each changes which conversations an update learns, and leaves their number."""
    run = fine_tuned(files, tmp_path, {})
    keys: dict[str, Any] = {"output": str(tmp_path), "resume": True, "checkpoint": {"every": 2}}
    data, model = files / "train.jsonl", files / "model"
    if change == "seed":
        keys["seed"] = 77
    elif change == "sft.data: its tokens":
        data = tmp_path / "train.jsonl"
        data.write_text("".join(reversed((files / "train.jsonl").read_text().splitlines(keepends=True))))
    elif change == "model.path: the tokenizer":
        model = Path(shutil.copytree(files / "model", tmp_path / "model"))
        tree = json.loads((model / "tokenizer.json").read_text())
        tree["added_tokens"][0]["lstrip"] = True
        (model / "tokenizer.json").write_text(json.dumps(tree))
    batch = 12 if change == "sft.batch_sequences" else 8
    keys["sft"] = {"data": str(data), "max_tokens": 32, "batch_sequences": batch, "epochs": 3}
    with pytest.raises(AssertionError, match=f"{change} was .* in the checkpoint and is "):
        run_world(1, run_once, config(model, {}, **keys), 0)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 6
