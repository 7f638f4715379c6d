"""The Dockerfile as far as it can be checked without building it."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.launch.cases import ROOT

TEXT = (ROOT / "Dockerfile").read_text()


def test_hadolint_finds_nothing() -> None:
    lint = [ROOT / ".venv-launch" / "bin" / "hadolint", "Dockerfile"]
    done = subprocess.run(lint, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_target_for_each_engine(engine: str) -> None:
    stage = TEXT.partition(f" AS train-{engine}\n")[2].partition("\nFROM ")[0]
    assert re.search(r"^USER [1-9]\d*$", stage, re.MULTILINE)
    pins = (ROOT / "requirements" / f"gpu-{engine}.txt").read_text()
    names = dict(line.split("==") for line in pins.splitlines())
    assert {engine, "torch", "megatron-core", "transformer-engine-torch", "transformer-engine-cu13"} <= names.keys()
    assert names["cuda-python"] == names["cuda-bindings"], "requirements/gpu-constraints.txt"
    # Apex is built with the base's compiler, and refuses another CUDA than torch's
    base = re.search(r"ARG BASE_IMAGE=\S+:(\d+\.\d+)\.", TEXT)
    assert base is not None and names["cuda-toolkit"].startswith(f"{base[1]}.")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_only_cudnn_is_that_of_the_pins(engine: str) -> None:
    """Transformer Engine prefers one of the system, and PyTorch loads the wheel's: two in one process do not go together."""
    (base,) = re.findall(r"^ARG BASE_IMAGE=(\S+)$", TEXT, re.MULTILINE)
    assert "cudnn" not in base and "-devel-" in base
    installed = re.search(r"apt-get install .*?&&", TEXT, re.DOTALL)
    assert installed is not None and "cudnn" not in installed[0]
    pins = (ROOT / "requirements" / f"gpu-{engine}.txt").read_text()
    assert len(re.findall(r"^nvidia-cudnn-cu\d+==", pins, re.MULTILINE)) == 1
    # what is compiled finds the headers of that one
    assert "CPATH=$nvidia/cudnn/include:" in (ROOT / "requirements" / "gpu-compile.sh").read_text()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_checks_and_watches_a_run_on_gpus_is_in_the_image(engine: str) -> None:
    pins = (ROOT / "requirements" / f"gpu-{engine}.txt").read_text()
    assert {"pytest", "wandb", "tensorboard"} <= {line.partition("==")[0] for line in pins.splitlines()}
    assert {"!tests", "!benchmarks"} <= set((ROOT / ".dockerignore").read_text().splitlines())
    assert re.search(r"apt-get install .*\bgit\b", TEXT)  # benchmarks say which commit was measured
    assert all(f"--extra {extra}" in (ROOT / "Makefile").read_text() for extra in ("wandb", "tensorboard", "test"))


def test_the_targets_differ_in_their_pins_only() -> None:
    shared, *targets = re.split(r"^FROM system AS train-", TEXT, flags=re.MULTILINE)
    vllm, sglang = (target.strip() for target in targets)
    assert vllm.replace("vllm", "sglang") == sglang
    assert "HEALTHCHECK" in shared and "CMD" in shared
    order = [vllm.index(word) for word in ("gpu-vllm.txt", "^transformer-engine-torch", "ARG APEX", "COPY . ")]
    assert order == sorted(order)


def test_what_it_copies_is_there_and_nothing_private_is() -> None:
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line.startswith("!"):
            assert list(ROOT.glob(line[1:])), line
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"
    assert not re.search(r"(TOKEN|SECRET|PASSWORD|API_KEY)", TEXT)
    assert re.search(r'^ARG APEX="apex @ git\+https://\S+@[0-9a-f]{40}"$', TEXT, re.MULTILINE)
