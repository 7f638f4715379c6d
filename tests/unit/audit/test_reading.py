"""Records that are missing, damaged, contradictory or hostile are refused with the file and the fix, never with a traceback."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.base.errors import DataError
from tepo_megatron.base.tensor_files import read_tensors, write_tensors
from tepo_megatron.command import parsers
from tepo_megatron.losses import OBJECTIVES
from tepo_megatron.report.audit.comparison import audit_step
from tests.audit_runs import FOLDER, write_audit
from tests.objective_cases import LENGTHS, draw

EMPTY = LENGTHS.index(0)  # a sequence without response tokens
SHARD, BATCH = "update-000-shard-00001.safetensors", "batch.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("audit") / "run"
    write_audit(run, OBJECTIVES["tepo"], draw(3))
    return run


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def changed(path: Path, change: Callable[[dict[str, Any], dict[str, str]], object]) -> None:
    """Rewrite a record with a right checksum and other content."""
    tensors, text = read_tensors(path)
    text.pop("format", None)
    change(tensors, text)
    write_tensors(path, tensors, text)


def test_the_whole_record_agrees(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    audited = audit_step(run, 1)
    assert audited.agrees and audited.logged_loss is None
    assert parsers.main(["audit", str(run), "--step", "1"]) == 0
    assert "metrics.jsonl has no loss of this step" in capsys.readouterr().out


def test_a_loss_that_was_logged_otherwise_is_found(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loss = audit_step(run, 1).loss
    for factor, status in ((1.0, 0), (1.001, 1)):
        (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss/total": factor * loss}) + "\n")
        assert parsers.main(["audit", str(run), "--step", "1"]) == status
    assert "training and audit DIFFER" in capsys.readouterr().out


def test_files_that_are_missing(run: Path) -> None:
    (run / FOLDER / SHARD).rename(run / "elsewhere")
    with pytest.raises(DataError, match="update 0 has records of 1 of 2 ranks; copy all of them here"):
        audit_step(run, 1)
    (run / FOLDER / "update-000-shard-00000.safetensors").unlink()
    with pytest.raises(DataError, match=r"no record of update 0 of 1; the run was interrupted in it"):
        audit_step(run, 1)
    (run / FOLDER / BATCH).unlink()
    with pytest.raises(DataError, match=r"batch\.safetensors: not the sequences of an audited step"):
        audit_step(run, 1)


CHANGES: list[tuple[str, str, Callable[[dict[str, Any], dict[str, str]], object]]] = [
    (SHARD, "KeyError", lambda x, t: x.pop("used_loss")),
    (SHARD, "another length", lambda x, t: x.update(logprob=x["logprob"][1:].clone())),
    (SHARD, "sequences that the step does not have", lambda x, t: x["sequences"].add_(1000)),
    (SHARD, "tokens of other sequences", lambda x, t: x["sequence"].fill_(99)),
    (SHARD, "or one is there twice", lambda x, t: x["position"].fill_(0)),
    (SHARD, "other ranks recorded another update", lambda x, t: t.update(minibatch_loss="7")),
    (SHARD, "other ranks recorded another update", lambda x, t: t.update(objective="{}")),
    (SHARD, "different minibatches", lambda x, t: x.update(sequences=x["sequences"][x["sequences"] != EMPTY])),
    (BATCH, "claims 0 updates", lambda x, t: t.update(updates="0")),
    (BATCH, "differ in length", lambda x, t: x.update(rewards=x["rewards"][1:].clone())),
    (BATCH, "differ in length", lambda x, t: x["lengths"].neg_()),
    (BATCH, "its mask is no mask", lambda x, t: x.update(response_mask=x["response_mask"].int())),
    (BATCH, "token records and its sequences have", lambda x, t: x["response_mask"].logical_not_()),
    (BATCH, "different terms", lambda x, t: t.update(terms=json.dumps([[[1, 2]], *[[]] * (len(x["rewards"]) - 1)]))),
    (BATCH, "not the sequences", lambda x, t: t.update(terms="[[[")),
]


@pytest.mark.parametrize(("name", "message", "change"), CHANGES)
def test_records_that_contradict_each_other(run: Path, name: str, message: str, change: Callable[..., object]) -> None:
    changed(run / FOLDER / name, change)
    with pytest.raises(DataError, match=message):
        audit_step(run, 1)


@pytest.mark.parametrize(
    "objective", ["{}", "[]", "null", '{"ratio": "x"}', '{"ratio": 3}', '{"ratio": "token", "weighting": {}}']
)
def test_objectives_that_are_none(run: Path, objective: str) -> None:
    for path in (run / FOLDER).glob("update-*"):
        changed(path, lambda x, t: t.update(objective=objective))
    with pytest.raises(DataError, match=r"no objective or number of this version of tepo|only objectives whose parts tepo has"):
        audit_step(run, 1)


@settings(max_examples=60, deadline=None)
@given(place=st.integers(0, 2**20), flip=st.integers(1, 255), cut=st.booleans(), name=st.sampled_from([SHARD, BATCH]))
def test_damage_at_random(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, place: int, flip: int, cut: bool, name: str
) -> None:
    """One byte is changed, or the file ends there: the checksum or the format refuses it."""
    run = tmp_path_factory.mktemp("hurt") / "run"
    shutil.copytree(whole, run)
    data = bytearray((run / FOLDER / name).read_bytes())
    place %= len(data)
    data = data[:place] if cut else data[:place] + bytes([data[place] ^ flip]) + data[place + 1 :]
    (run / FOLDER / name).write_bytes(bytes(data))
    with pytest.raises(DataError, match=name):
        audit_step(run, 1)
    shutil.rmtree(run.parent)


def test_infinite_numbers_differ(run: Path) -> None:
    changed(run / FOLDER / SHARD, lambda x, t: x["used_ratio"].__setitem__(3, torch.inf))
    assert audit_step(run, 1).updates[0].differing == ["ratio"]
    changed(run / FOLDER / SHARD, lambda x, t: x["logprob"].__setitem__(3, torch.nan))
    assert not audit_step(run, 1).agrees
