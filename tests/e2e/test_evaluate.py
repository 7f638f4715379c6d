"""`tepo evaluate` and `tepo compare` as a user runs them, with a real vLLM: one of their own, and one that runs already."""

import json
import os
import signal
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tepo_megatron.evaluation.benchmarks import BENCHMARKS
from tepo_megatron.evaluation.folder import read_record
from tepo_megatron.evaluation.samples import read_samples
from tests.e2e.conftest import settings

pytestmark = [pytest.mark.server, pytest.mark.e2e, pytest.mark.full]
CONFIG = ["--config", "examples/demo.yaml"]
WORDS = {
    "evaluation.benchmark_folder": "tests/problems", "evaluation.benchmark_prompt": '"<problem>\\n"',
    "evaluation.benchmark_tokens": "48",
}  # fmt: skip


def test_seven_benchmarks_run_on_an_own_and_on_a_running_engine(tepo, base: Path, tmp_path: Path) -> None:
    words = [*CONFIG, *(w for key, value in WORDS.items() for w in (f"--{key}", value))]
    own = tepo("evaluate", base, *words, "--out", tmp_path / "own", "--published", "Qwen3-14B")
    assert own.wait(300) == 0, own.output
    own.assert_nothing_left()
    record = read_record(tmp_path / "own")["benchmarks"]
    assert list(record) == list(BENCHMARKS) and "Table 1: Qwen3-14B, TEPO" in own.output
    for name, entry in BENCHMARKS.items():
        samples = read_samples(tmp_path / "own" / f"{name}.jsonl")
        assert len(samples) == record[name]["result"]["problems"] * entry.samples
        assert all((s.score == 1) == (s.answer == s.gold) and 0 < s.tokens <= 48 for s in samples)
    sampled = read_samples(tmp_path / "own" / "amc.jsonl")
    assert len({(s.problem, s.text) for s in sampled}) > len({s.problem for s in sampled})
    assert 0 < sum(s.score for s in sampled) < len(sampled)
    greedy = {name: read_samples(tmp_path / "own" / f"{name}.jsonl") for name in ("math500", "olympiad_bench", "minerva")}
    assert {s.text for samples in greedy.values() for s in samples} == set(greedy_texts(base, greedy))

    rendezvous = tmp_path / "rendezvous"
    served = settings(base, rollout__server__rendezvous=rendezvous, sync__transport="group")
    serve = tepo("serve", "examples/demo.yaml", *served)
    serve.until(lambda: bool(serve.ready_urls()), timeout=240)
    (url,), key = serve.ready_urls(), (rendezvous / "key").read_text().strip()
    there = ["--rollout.server.urls", f"[{url!r}]", "--out", tmp_path / "there"]
    running = tepo("evaluate", base, *words, *there, "--against", tmp_path / "own", env={"TEPO_SERVER_KEY": key})
    assert running.wait(240) == 0, running.output
    assert key not in running.output and "of Qwen" not in running.output
    for name in BENCHMARKS:
        assert (tmp_path / "there" / f"{name}.jsonl").read_bytes() == (tmp_path / "own" / f"{name}.jsonl").read_bytes()
    compare = tepo("compare", tmp_path / "there", tmp_path / "own")
    assert compare.wait(240) == 0, compare.output
    for output in (running.output, compare.output):
        assert output.count("+0.00") >= len(BENCHMARKS)

    joined = ["--rollout.server.rendezvous", rendezvous, "--evaluation.benchmarks", "[amc]", "--out", tmp_path / "joined"]
    found = tepo("evaluate", base, *words, *joined)
    assert found.wait(240) == 0, found.output
    assert (tmp_path / "joined" / "amc.jsonl").read_bytes() == (tmp_path / "own" / "amc.jsonl").read_bytes()
    serve.until(lambda: len(serve.ready_urls()) == 2, timeout=240)  # what it used is started again, for the next one

    os.kill(serve.process.pid, signal.SIGTERM)
    assert serve.wait(120) == 0, serve.output
    serve.assert_nothing_left()


def greedy_texts(model: Path, problems: dict) -> list[str]:
    tokenizer, policy = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    texts = []
    for name, samples in problems.items():
        rows = [json.loads(line) for line in Path(f"tests/problems/{name}.jsonl").read_text().splitlines()]
        for sample in samples:
            prompt = rows[sample.problem][BENCHMARKS[name].problem] + "\n"
            ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
            made = policy.generate(ids, max_new_tokens=48, do_sample=False)[0, ids.shape[1] :]
            texts.append(tokenizer.decode(made, skip_special_tokens=True))
    return texts
