"""`tepo audit` computes the loss of every token again, on every layout and for every objective, and finds what was changed."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.base.errors import DataError
from tepo_megatron.base.tensor_files import read_tensors, write_tensors
from tepo_megatron.command import parsers
from tepo_megatron.report.audit.comparison import AuditedStep, audit_step
from tepo_megatron.report.audit.reading import steps
from tepo_megatron.report.audit.tables import relative, token_lines
from tests.gate.data import Material, make_material
from tests.gate.world import Job, Outcome, run_jobs
from tests.marks import full_but
from tests.parallel.objective_rows import VARIANTS
from tests.worlds import run_world

pytestmark = pytest.mark.slow

# a layout, and tokens of a microbatch
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "1 rank": ({}, 40),
    "TP2": ({"tp": 2}, 40),
    "CP2": ({"cp": 2}, 40),
    "PP2 DP2": ({"pp": 2, "dp": 2}, 24),
}
ROW = "tepo, tis, reference"
UPDATES = 2


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("audit"), "qwen3", tied=True, layers=2, steps=1)


def trained(material: Material, layout: str, rows: list[str], folder: Path) -> tuple[dict[str, Path], list[list[Outcome]]]:
    """Train rows on a layout with records for audits; return the folder of each run, and the outcomes by rank."""
    parallel, max_tokens = LAYOUTS[layout]
    configs = {row: VARIANTS[row].config(material, parallel, max_tokens) for row in rows}
    runs = {row: folder / f"run-{i}" for i, row in enumerate(rows)}
    for run in runs.values():
        run.mkdir()
    jobs = [Job(cfg, material.steps, run=runs[row]) for row, cfg in configs.items()]
    return runs, run_world(jobs[0].cfg.parallel.world_size, run_jobs, jobs)


def wrong(row: str, audited: AuditedStep) -> list[str]:
    said = [f"{row}, update {u.record.number}: {u.differing}" for u in audited.updates if u.differing]
    return said + ([f"{row}: the sums {audited.loss} and {audited.logged_loss}"] if not said and not audited.agrees else [])


@pytest.fixture(scope="module")
def of_rows(material: Material, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return trained(material, "1 rank", list(VARIANTS), tmp_path_factory.mktemp("rows"))[0]


def test_every_row_is_computed_again(of_rows: dict[str, Path]) -> None:
    audits = {row: audit_step(run, 1) for row, run in of_rows.items()}
    assert [said for row, audited in audits.items() for said in wrong(row, audited)] == []
    for row, audited in audits.items():
        assert len(audited.updates) == UPDATES and audited.logged_loss is not None
        objective, last = VARIANTS[row].method, audited.updates[-1]
        assert sum(u.decided_differently for u in audited.updates) == 0, "no number lies near to a threshold in these batches"
        assert ("weight" in last.terms) == (objective.weighting != "none")
        assert ("ref_kl" in last.terms) == (objective.ref_beta > 0 and objective.ref_kl_in == "loss")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_tokens_add_up_to_the_logged_loss(material: Material, tmp_path: Path, layout: str) -> None:
    runs, ranks = trained(material, layout, ["tepo", ROW], tmp_path)
    for row, run in runs.items():
        audited = audit_step(run, 1)
        assert wrong(row, audited) == []
        assert audited.logged_loss is not None and relative(audited.loss, audited.logged_loss) <= 1e-6
        assert [u.record.loss for u in audited.updates] == ranks[0][list(runs).index(row)].losses
        assert all(abs(u.loss - u.record.loss) <= 1e-6 * u.magnitude for u in audited.updates), "a small loss is a difference"
        assert sum(u.near_N.size for u in audited.updates) == sum(r.response_length for r in material.steps[0])
        shards = len(list((run / "audit" / "step-000001").glob("update-000-*")))
        assert shards == {"1 rank": 1, "TP2": 1, "CP2": 2, "PP2 DP2": 2}[layout], "every token is written by one rank"


@pytest.mark.parametrize("layout", full_but([], ["CP2"], list(LAYOUTS)[1:]))
def test_every_row_on_several_ranks(material: Material, tmp_path: Path, layout: str) -> None:
    rows = (
        list(VARIANTS) if layout != "CP2" else [row for row in VARIANTS if row in ("gspo, mis", "prefix_is, clip_cov", "gdpo")]
    )
    runs, _ = trained(material, layout, rows, tmp_path)
    assert [said for row, run in runs.items() for said in wrong(row, audit_step(run, 1))] == []


def test_training_is_the_same_with_and_without_records(material: Material, tmp_path: Path) -> None:
    cfg = VARIANTS[ROW].config(material, {"cp": 2}, 40)
    (with_records, without), _ = run_world(2, run_jobs, [Job(cfg, material.steps, run=tmp_path), Job(cfg, material.steps)])
    assert with_records.losses == without.losses and with_records.norms == without.norms


@pytest.mark.parametrize(
    ("column", "named"),
    [
        ("used_loss", "loss"), ("used_ratio", "ratio"), ("used_kl_mask", "kl_mask"), ("logprob", "ratio"),
        ("old_entropy", "entropy_change"), ("group_advantage", "group_advantage"), ("rollout_logprob", "correction"),
        ("ref_logprob", "ref_kl"),
    ],
)  # fmt: skip
def test_one_changed_number_is_found(of_rows: dict[str, Path], tmp_path: Path, column: str, named: str) -> None:
    """Change one number of one token of the second update, as a wrong loss or a wrong input would."""
    run = tmp_path / "run"
    shutil.copytree(of_rows[ROW], run)
    path = next((run / "audit" / "step-000001").glob("update-001-*"))
    tensors, text = read_tensors(path)
    at = 17
    tensors[column][at] = (
        ~tensors[column][at] if tensors[column].dtype.is_floating_point is False else tensors[column][at] + 0.2
    )
    write_tensors(path, tensors, {name: said for name, said in text.items() if name != "format"})
    audited = audit_step(run, 1)
    assert named in audited.updates[1].differing and not audited.agrees
    assert not audited.updates[0].differing


def test_a_term_that_only_one_side_has_is_found(of_rows: dict[str, Path], tmp_path: Path) -> None:
    """The token losses still agree, but training recorded a weight, and the objective has no weighting."""
    run = tmp_path / "run"
    shutil.copytree(of_rows[ROW], run)
    path = next((run / "audit" / "step-000001").glob("update-001-*"))
    tensors, text = read_tensors(path)
    tensors["used_weight"] = torch.ones_like(tensors["used_loss"])
    write_tensors(path, tensors, {name: said for name, said in text.items() if name != "format"})
    audited = audit_step(run, 1)
    assert audited.updates[1].differing == ["weight"] and not audited.agrees


def test_what_a_run_does_not_have_is_refused(of_rows: dict[str, Path], tmp_path: Path) -> None:
    run = of_rows[ROW]
    assert steps(run) == [1]
    with pytest.raises(DataError, match=r"step 2 was not recorded for audits; recorded are: 1"):
        audit_step(run, 2)
    with pytest.raises(DataError, match=r"kept no numbers of single tokens; train with --logging.audit_every 1"):
        audit_step(tmp_path, 1)
    with pytest.raises(DataError, match="there is no such folder"):
        audit_step(tmp_path / "none", 1)
    audited = audit_step(run, 1)
    for place, message in (((99, 0), "the sequences 0 to 11"), ((1, 2), "the tokens 0 to 1, and not 2")):
        with pytest.raises(DataError, match=message):
            list(token_lines(audited, *place))
    for token in ("3", "a:b", "1:-1"):
        assert parsers.main(["audit", str(run), "--step", "1", "--token", token]) == 1
