"""`benchmarks.mechanisms`: closed forms equal samples, seeds are independent, and the results follow from their figures."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks._chain_task import MAX_SYMBOLS, PROMPTS, ChainTask, all_prompts, closed_form, logprobs, sample, start_policies
from benchmarks._predictions import PREDICTIONS, Prediction, judge
from benchmarks.mechanisms import ARMS, OUT, QUICK, REGIMES, SEEDS, main, markdown, train

COMMITTED = json.loads(OUT.read_text())
SHORT = {"steps": 150}  # of the start policies


def test_closed_forms_equal_samples() -> None:
    """Accuracy within 4 standard errors, and length within 2 %, of 200 responses to each prompt."""
    task = ChainTask.of([0])
    table = logprobs(start_policies([0], task, **SHORT), all_prompts(1))
    # easier than the start policies, so that long chains succeed too
    likely = torch.where(torch.arange(table.shape[-1]) == task.right_SKP[..., None], table + 5, table).log_softmax(-1)
    prompts = torch.arange(PROMPTS).repeat_interleave(200)[None]
    (found,) = sample(likely, task, prompts, [torch.Generator().manual_seed(0)])
    expected = {name: float(x) for name, x in closed_form(likely, task).items()}
    mean, error = float(found.reward_B.mean()), float(found.reward_B.std() / len(found.reward_B) ** 0.5)
    assert 0.05 < mean < 0.99 and abs(mean - expected["accuracy"]) < 4 * error
    right = found.reward_B.view(PROMPTS, -1).bool()
    lengths = found.mask_BT.sum(1).view(PROMPTS, -1)
    by_prompt = [
        float(n[ok].float().mean()) / (int(k) + 1) for n, ok, k in zip(lengths, right, task.symbols_SK[0], strict=True)
    ]
    assert sum(by_prompt) / PROMPTS == pytest.approx(expected["length"], rel=0.02)
    assert int(found.progress_BT[found.mask_BT].max()) == MAX_SYMBOLS


def test_a_seed_trains_as_if_it_were_alone() -> None:
    task = ChainTask.of([3, 4])
    start = start_policies([3, 4], task, **SHORT)
    together, alone = train(ARMS["gmpo"], QUICK["stress"], [3, 4], start), train(ARMS["gmpo"], QUICK["stress"], [4], start[1:])
    for name, values in together["measures"].items():
        assert values[1] == pytest.approx(alone["measures"][name][0], rel=1e-3, abs=1e-5), name
    assert together["measures"]["start accuracy"][0] != together["measures"]["start accuracy"][1]


def test_the_old_statistics_of_a_first_update_are_its_own() -> None:
    """With one update per rollout batch the policy is the one that sampled: nothing is clipped and the KL is exactly 0."""
    regime = QUICK["moderate"]
    once = type(regime)(steps=1, epochs=1, lr=regime.lr, prompts=4, minibatch=4)
    measures = train(ARMS["tepo beta 1"], once, [0, 1], start_policies([0, 1], ChainTask.of([0, 1]), **SHORT))["measures"]
    assert measures["KL to the old policy"] == measures["clipped"] == measures["masked"] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("larger", "smaller", "verdict"),
    [((3.0, 5.0), (1.0, 2.9), "holds"), ((1.0, 2.0), (3.0, 4.1), "fails"), ((1.0, 5.0), (1.0, 2.0), "undecided")],
)
def test_a_prediction_is_judged_by_its_interval(larger: tuple[float, ...], smaller: tuple[float, ...], verdict: str) -> None:
    runs = {"moderate": {"a": {"measures": {"x": larger}}, "b": {"measures": {"x": smaller}}}}
    found = judge(Prediction("a is larger", "moderate", ("a", "x"), ("b", "x")), runs)
    low, high = found["interval"]
    assert found["verdict"] == verdict and low < found["effect"] < high
    with pytest.raises(ValueError, match="at least two seeds"):
        judge(Prediction("", "moderate", ("a", "x"), ("a", "x")), {"moderate": {"a": {"measures": {"x": [1.0]}}}})


@pytest.mark.full
def test_the_command_trains_judges_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It trains every arm for some steps, judges every prediction, and writes JSON and tables."""
    out = tmp_path / "found.json"
    main(["--quick", "--seeds", "0,1", "--workers", "1", "--json", str(out)])
    found = json.loads(out.read_text())
    assert [x["claim"] for x in found["predictions"]] == [p.claim for p in PREDICTIONS]
    assert all(list(arms) == list(ARMS) for arms in found["runs"].values())
    assert out.with_suffix(".md").read_text() == markdown(found) == capsys.readouterr().out[:-1]
    with pytest.raises(SystemExit):
        main(["--quick"])


def test_the_committed_results_are_those_of_the_predictions() -> None:
    assert COMMITTED["seeds"] == list(SEEDS)
    assert COMMITTED["settings"] == {name: vars(regime) for name, regime in REGIMES.items()}
    assert not COMMITTED["commit"].endswith("with changes")
    judged = [judge(prediction, COMMITTED["runs"]) for prediction in PREDICTIONS]
    assert json.loads(json.dumps(judged)) == COMMITTED["predictions"]
    assert OUT.with_suffix(".md").read_text() == markdown(COMMITTED)
