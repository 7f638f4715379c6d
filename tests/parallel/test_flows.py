"""The hops that docs/tour.md lists are those that a rollout and a weight take in a real run, and they are few."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from pathlib import Path
from types import CodeType

import pytest
import torch

from tepo_megatron import report
from tepo_megatron.config import Config
from tepo_megatron.inference.servers.endpoint import Endpoint
from tepo_megatron.inference.servers.fleet import Fleet
from tepo_megatron.inference.sglang import SglangApi
from tepo_megatron.observability import run_dir
from tepo_megatron.platform import activate
from tepo_megatron.train import train
from tepo_megatron.types import PackedMicrobatch, Rollout, TrainBatch
from tepo_megatron.utils.quiet import quiet_upstream
from tepo_megatron.weight_sync.receiver.sglang_loader import MODEL_VARIABLE
from tests.flows import Flow, recording
from tests.parallel.resume_worlds import run_config, write_inputs
from tests.scripted_sglang import ScriptedModel, SglangThread
from tests.worlds import run_world
from tools.structure import ROLLOUT, WEIGHT, hops

pytestmark = pytest.mark.slow


def _takes_the_step(code: CodeType) -> bool:
    return code.co_name == "step" and "/megatron/core/optimizer/" in code.co_filename


def _pushes(code: CodeType) -> bool:
    return code.co_qualname == "WeightSync.push"


def _stores_or_loads(code: CodeType) -> bool:
    return code.co_name in ("save_file", "load_weights")


def _loads_a_round(code: CodeType) -> bool:
    return code.co_qualname == "load_sources"


def _rank(_: int, cfg: Config, in_service: Path) -> tuple[dict[str, int], ...]:
    quiet_upstream()
    os.environ |= {"TEPO_TEST_ENGINE": "good", MODEL_VARIABLE: str(cfg.model.path)}
    report.write_report = lambda folder: folder / "report.png"

    class RecordedFleet(Fleet):
        """In the rollout service, which is a fork of this process: it records for itself."""

        def __exit__(self, *exc_info: object) -> None:
            super().__exit__(*exc_info)
            in_service.write_bytes(pickle.dumps([rollouts.dump(), weights.dump()]))

    def make_engine(cfg: Config) -> Fleet:
        weights.starts = _loads_a_round
        server = SglangThread(ScriptedModel(cfg))
        return RecordedFleet([Endpoint(server, SglangApi(), cfg.rollout.server, cfg.served_tokens)], cfg.rollout)

    rollouts = Flow((Rollout, TrainBatch, PackedMicrobatch), _takes_the_step)
    weights = Flow((torch.Tensor,), _stores_or_loads, _pushes, once=False, iterators=True)
    with contextlib.redirect_stdout(io.StringIO()), recording(rollouts, weights):
        train(cfg, activate("cpu"), make_engine)
    for flow, recorded in zip((rollouts, weights), pickle.loads(in_service.read_bytes()), strict=True):
        flow.merge(recorded)
    found = []
    for flow, heading in ((rollouts, ROLLOUT), (weights, WEIGHT)):
        found.append((flow.carriers, flow.readers, [flow.event(hop) for hop in hops(heading)]))
    return tuple(found)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """For each path, return the files that carry it, those that read it, and the events of the tour's hops."""
    folder = write_inputs(tmp_path_factory.mktemp("run"))
    one = {"data": {"eval": None}, "training": {"steps": 1}, "evaluation": {"every": 0}, "export_hf": False}
    cfg = run_config(folder, folder / "output", **one, rollout={"max_generation_rounds": 4})
    run_dir.prepare(cfg)
    return run_world(1, _rank, cfg, folder / "in-service")[0]


@pytest.mark.parametrize(("which", "heading", "most"), [(0, ROLLOUT, 18), (1, WEIGHT, 8)], ids=["rollout", "weight"])
def test_the_tour_lists_the_files_that_carry_it(recorded: tuple, which: int, heading: str, most: int) -> None:
    carriers, readers, _ = recorded[which]
    listed = {file for file, _ in hops(heading)}
    assert listed == carriers, f"only read: {sorted(readers)}"
    assert len(listed) <= most


@pytest.mark.parametrize(("which", "heading"), [(0, ROLLOUT), (1, WEIGHT)], ids=["rollout", "weight"])
def test_each_hop_of_the_tour_handled_it_in_that_order(recorded: tuple, which: int, heading: str) -> None:
    events = recorded[which][2]
    assert None not in events, [hop for hop, event in zip(hops(heading), events, strict=True) if event is None]
    assert events == sorted(events), list(zip(hops(heading), events, strict=True))
