"""Canaries on the trainer's side: what they consist of, and that every layout scores them as transformers does in fp64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tepo_megatron.controller.canaries import CANARY_TOKENS, LONG_CANARY_TOKENS, canary_batch, make_canaries
from tepo_megatron.types import Canaries
from tests.harness import canaries as harness
from tests.marks import full_but
from tests.parallel import cases
from tests.parallel import resume_worlds as w
from tests.tiny import tiny_qwen3
from tests.worlds import run_world


def test_canaries_reach_every_part_of_the_vocabulary() -> None:
    made = make_canaries(8, 4000, 1000, seed=3)
    assert [len(ids) for ids in made.sequences] == [CANARY_TOKENS] * 7 + [LONG_CANARY_TOKENS]
    assert made == make_canaries(8, 4000, 1000, seed=3) != make_canaries(8, 4000, 1000, seed=4)
    targets = torch.tensor([token for ids in made.sequences for token in ids[1:]])
    shares = torch.bincount(targets // 125, minlength=8) / targets.numel()
    assert shares.min() > 0.11, "each of 8 shards of the vocabulary has its eighth"
    assert targets.max() <= 998, "SGLang reports the last id as 0"
    assert all(1 <= first < len(ids) for ids, first in zip(made.sequences, made.cached_from, strict=True))


def test_canaries_fit_into_short_sequences() -> None:
    assert [len(ids) for ids in make_canaries(3, 9, 64, 0).sequences] == [9, 9, 9]
    assert make_canaries(1, 2, 5, 0).cached_from == (1,)
    batch = canary_batch(make_canaries(2, 9, 64, 0))
    assert batch.num_tokens == 16 and batch.response_lengths == [8, 8]


def scored(rank: int, cfg: Any, canaries: Canaries) -> list[float]:
    from tepo_megatron.actor.actor import Actor
    from tepo_megatron.controller.canaries import CanarySync
    from tepo_megatron.distributed import parallel
    from tepo_megatron.platform import activate

    groups = parallel.initialize(cfg.parallel, activate("cpu"), 0)
    actor = Actor.open(cfg, groups)
    return CanarySync(None, actor, None, canaries, groups).scores()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "layout", full_but([{}, {"pp": 2}], [{"tp": 2}], [{}, {"pp": 2}, {"tp": 2}, {"cp": 2}, {"dp": 2}]), ids=str
)
def test_every_layout_scores_canaries_as_transformers_does(tmp_path: Path, layout: dict[str, int]) -> None:
    tiny_qwen3(tmp_path / "model", layers=2, vocab_size=cases.VOCAB)
    cfg = cases.run_config(tmp_path / "model", layout)
    assert cfg.rollout.temperature != 1, "canaries are scored at temperature 1 all the same"
    truncated = replace(cfg, rollout=replace(cfg.rollout, top_p=0.9))
    canaries = make_canaries(5, 37, cases.VOCAB, 0)
    exact = AutoModelForCausalLM.from_pretrained(tmp_path / "model").double().eval()
    expected: list[float] = []
    with torch.no_grad():
        for ids in canaries.sequences:
            logits = exact(torch.tensor([ids])).logits[0, :-1]
            expected += logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    for run in (cfg, truncated) if not layout else (cfg,):
        for found in run_world(run.parallel.world_size, scored, run, canaries):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", full_but(["fp32"], ["bf16"], list(harness.KINDS)))
def test_planted_faults_above_the_limit_are_found_and_right_answers_are_not(kind: str, tmp_path: Path) -> None:
    model = w.write_inputs(tmp_path / "model")
    rows = harness.trial(kind, 1e-3, 4, model, tmp_path)
    above = [row for row in rows if row.fault != "none" and row.moved > row.limit]
    assert {row.fault for row in above} >= set(harness.WHOLE)
    assert [row for row in above if not row.found] == []
    assert all(row.named for row in above if row.fault in harness.WHOLE)
    assert not any(row.found for row in rows if row.fault == "none")
