"""Audited tokens and the paper's figures on a run's page."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.losses import OBJECTIVES
from tepo_megatron.report.audit.comparison import audit_step
from tepo_megatron.report.tokens import TOKENS
from tepo_megatron.report.write import write_report
from tests.audit_runs import write_audit
from tests.objective_cases import draw
from tests.report_runs import measured, write_run
from tests.unit.report.test_report_page import HOSTILE, SPECIAL, Page, tokenizer_of_characters

LENGTHS = (5, 17, 0, 3, TOKENS + 30, 2)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose tokens are hostile, with records of a step."""
    folder = tmp_path_factory.mktemp("tokens")
    ids = tokenizer_of_characters(folder / "model")
    (folder / "run").mkdir()
    write_run(folder / "run", measured(4), model={"path": str(folder / "model")})
    write_audit(folder / "run", OBJECTIVES["tepo"], draw(3, LENGTHS), ids)
    return folder / "run"


def tokens_of(text: str) -> list[dict[str, Any]]:
    """Return the numbers behind the tokens of each sample of a page."""
    found = [json.loads(script) for script in Page(text).scripts[:-1]]
    return [it for it in found if "tokens" in it]


def test_every_number_is_on_the_page_and_no_token_becomes_markup(run: Path) -> None:
    text = write_report(run).read_text()
    page = Page(text)
    cells = [a for tag, a in page.tags if tag == "span" and str(a.get("class")).startswith("token")]
    samples = tokens_of(text)
    assert len(samples) == 4 and len(cells) == sum(len(it["tokens"]) for it in samples)
    assert max(len(it["tokens"]) for it in samples) == TOKENS and "30 further tokens" in page.said
    assert {"img", "svg onload"}.isdisjoint({tag for tag, _ in page.tags}) and SPECIAL in page.said and HOSTILE in page.said
    assert "everything agrees with training" in page.said and "step 1: 1 updates, 6 sequences" in page.said
    audited = audit_step(run, 1).updates[0]
    for it in samples:
        for token in it["tokens"]:
            sequence, position = map(int, re.findall(r"--token (\d+):(\d+),", token["place"])[0])
            index = audited.record.find(sequence, position)
            ((number, rows),) = token["updates"]
            named = {it["names"][name]: (used, again) for name, used, again in rows}
            assert index is not None and number == 0 and len(rows) == 15
            assert named["part of the loss"] == (f"{audited.used['loss'][index]:.9g}", f"{audited.terms['loss'][index]:.9g}")
            assert named["under the KL mask"][0] == ("yes" if audited.used["kl_mask"][index] else "no")
    losses = audited.terms["loss"]
    assert any("up4" in str(a["class"]) for a in cells) == bool((losses < 0).any())
    assert any("down" in str(a["class"]) for a in cells) == bool((losses > 0).any())
