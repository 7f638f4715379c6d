"""`training.stream`: runs that train on the first minibatches of a step while the others are still being sampled."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tepo_megatron.base.types import Rollout
from tepo_megatron.config import Config
from tepo_megatron.rollout import decisions, record
from tests.parallel import cases
from tests.parallel import resume_worlds as w
from tests.parallel.resume_worlds import Kill, Request
from tests.scripted_groups import ScriptedGroups

UPDATE = "tepo_megatron.actor.actor:Actor.update"
ALL_GROUPS = {"filter_uniform_groups": False, "max_generation_rounds": 1}
PROMPT: dict[str, Any] = {"rollout": ALL_GROUPS, "training": {"stream": "prompt"}}
ARRIVAL: dict[str, Any] = {"rollout": {"record": True}, "training": {"stream": "arrival"}}
pytestmark = pytest.mark.slow


def made(model: Path, folder: Path, *kills: Kill, **sections: Any) -> Config:
    cfg = w.run_config(model, folder, **sections)
    w.lineage(cfg, folder / "journal", *kills)
    return cfg


@pytest.fixture(scope="module")
def by_arrival(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    return made(model, tmp_path_factory.mktemp("arrival"), **ARRIVAL)


def test_a_run_that_streams_by_prompt_is_that_of_whole_batches(model: Path, tmp_path: Path) -> None:
    """Up to rounding: log-probs of the old policy come from other microbatches."""
    w.FollowingEngine.exact = False  # the answers must not follow it
    try:
        batch = made(model, tmp_path / "batch", **{**PROMPT, "training": {"epochs": 2}})
        streamed = made(model, tmp_path / "streamed", **{**PROMPT, "training": {"epochs": 2, "stream": "prompt"}})
    finally:
        w.FollowingEngine.exact = True
    start = load_file(model / "model.safetensors")
    end, end_streamed = w.weights(batch.run_dir), w.weights(streamed.run_dir)
    for name, weight in end.items():
        moved = cases.distance(start[name], weight)
        assert cases.distance(end_streamed[name], weight) <= 1e-3 * moved + 1e-7, name
    for of_batch, of_stream in zip(w.records(batch.run_dir), w.records(streamed.run_dir), strict=True):
        for key, value in of_batch.items():
            if not key.startswith(("packing/", "tepo/mask_below", "gate/", "tepo/entropy_noise", "rollout/logprob")):
                assert value == of_stream[key] or of_stream[key] == pytest.approx(value, rel=1e-3, abs=1e-5), (
                    of_batch["step"],
                    key,
                )
    assert of_stream["gate/compared_share"] == 1


def test_minibatches_by_arrival_take_the_groups_that_come_first(by_arrival: Config) -> None:
    """The scripted engine returns the last prompt of a request first."""
    history = decisions.read_history(by_arrival.run_dir).steps
    for step in range(1, w.STEPS + 1):
        kept = [group[0] for group in history[step]["arrived"] if group[1] == "kept"]
        minibatches = history[step]["minibatches"]
        assert [prompt for prompts in minibatches for prompt in prompts] == kept
        assert all(len(prompts) == 2 for prompts in minibatches[:-1])
        recorded = record.read(by_arrival.run_dir / record.FOLDER, step)[0]
        assert list(dict.fromkeys(r.prompt_id for r in recorded)) == kept


def test_a_run_that_is_killed_between_minibatches_ends_like_an_undisturbed_one(
    model: Path, by_arrival: Config, tmp_path: Path
) -> None:
    """A request to end that comes after the first update of a step is answered when the step is complete."""
    kills = Kill(UPDATE, step=2, call=2), Request(UPDATE, step=3, call=1)
    cfg = made(model, tmp_path, *kills, checkpoint={"every": 1, "asynchronous": False}, **ARRIVAL)
    assert "ended on request after step 3" in (cfg.run_dir / "log.txt").read_text()
    expected = w.outcome(by_arrival, Path(by_arrival.output) / "journal")
    w.assert_same(w.outcome(cfg, tmp_path / "journal"), expected)


class AsksForWeights(ScriptedGroups):
    """Groups of a server that restarts once the first minibatch of a step may be trained, and waits for its weights."""

    def __init__(self, engine: "RestartingEngine") -> None:
        super().__init__(engine.generate)
        self._engine, self._returned = engine, 0

    def next(self) -> list[Rollout] | None:
        self._returned += 1
        if self._returned == 3:
            time.sleep(1.5)  # for the first update of the step
            self._engine.lose_weights()
        return super().next()


class RestartingEngine(w.FollowingEngine):
    """An engine that asks for its weights again in the middle of each step, and expects those that it had."""

    def open(self) -> ScriptedGroups:
        return AsksForWeights(self)

    def lose_weights(self) -> None:
        before, version = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}, self.version
        for tensor in self._model.parameters():
            tensor.detach().fill_(torch.nan)
        self.version = -1
        self.needs_weights = True
        deadline = time.monotonic() + 60
        while self.needs_weights:
            assert time.monotonic() < deadline, "no weights came"
            time.sleep(0.01)
        assert self.version == version
        for name, tensor in self._model.state_dict().items():
            assert torch.equal(tensor, before[name]), f"version {version} is another one now: {name}"

    def finish_update(self) -> None:
        super().finish_update()
        self.needs_weights = False


@pytest.mark.full
def test_a_server_that_restarts_during_a_step_gets_the_weights_that_sample_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actor has taken updates by then; in the next step it has the same weights as if nothing had been asked for."""
    sections: dict[str, Any] = {"rollout": ALL_GROUPS, "training": {"stream": "arrival"}}
    straight = made(model, tmp_path / "straight", **sections)
    monkeypatch.setattr(w, "FollowingEngine", RestartingEngine)
    disturbed = made(model, tmp_path / "disturbed", **sections)
    expected, found = w.weights(straight.run_dir), w.weights(disturbed.run_dir)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("how", ["finish", "continue"])
def test_streaming_and_sampling_ahead_go_together(model: Path, tmp_path: Path, how: str) -> None:
    ahead = {"max_staleness": 1, "on_weight_update": how}
    cfg = made(model, tmp_path, **{**ARRIVAL, "rollout": ARRIVAL["rollout"] | ahead})
    rows = w.records(cfg.run_dir)
    assert [row["step"] for row in rows] == list(range(1, w.STEPS + 1))
    assert all(row["gate/logprob_diff_worst"] < 1e-5 for row in rows if row["rollout/kept_groups"])
    assert 0 < max(row["rollout/staleness"] for row in rows) <= 1
    log = (cfg.run_dir / "log.txt").read_text()
    assert [f"accuracy at step {step}:" in log for step in (0, 2, 4)] == [True] * 3
