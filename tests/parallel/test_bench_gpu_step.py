"""The benchmark of a config's training step, made for GPUs, on the CPU: two ranks, two precisions, a pipeline."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.tiny import tiny_qwen3

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_the_benchmark_measures_each_precision(tmp_path: Path) -> None:
    tiny_qwen3(tmp_path / "model")
    tree = {
        "name": "a", "platform": "cpu", "model": {"path": str(tmp_path / "model")},
        "data": {"train": "unused", "max_prompt_tokens": 16}, "parallel": {"pp": 2},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_response_tokens": 24},
        "training": {"minibatch_prompts": 2, "max_tokens_per_microbatch": 64},
    }  # fmt: skip
    config, out = tmp_path / "run.yaml", tmp_path / "out.json"
    config.write_text(yaml.safe_dump(tree))
    words = ["--precisions", "fp32", "bf16", "--steps", "2", "--prompt", "8", "--out", str(out), "--optimizer.lr", "1e-4"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.step", str(config), *words],
        cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    results = json.loads(out.read_text())["results"]
    fp32, bf16 = results["fp32"], results["bf16"]
    assert fp32["logprob_mean"] == 0 < bf16["logprob_mean"] < 0.1
    assert bf16["noise"] > fp32["noise"] >= 0
    for x in results.values():
        assert min(*x["seconds"].values(), *x["planned"].values(), x["tokens_per_second"]) > 0 and x["peak_gib"] is None
    assert [line.split(" | ")[0] for line in done.stdout.splitlines()[-2:]] == ["| fp32", "| bf16"]
