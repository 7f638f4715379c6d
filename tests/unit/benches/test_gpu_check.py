"""tools/gpu_check.py without a GPU: its parts on the platform cpu, its rows, its results."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.gpu.check import command, machine, report
from benchmarks.gpu.check.lines import Check
from benchmarks.gpu.check.model import run_tree
from benchmarks.gpu.check.parts import PARTS, line_names
from benchmarks.gpu.check.run_step import attention_words
from tepo_megatron.config.io import load_config
from tepo_megatron.doctor.plan.command import PlanRequest, predictor_of
from tests.tiny import tiny_qwen3

ROOT = Path(__file__).parents[3]


def check(words: list[str], out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command from another working directory, without this project on the path."""
    there = {**os.environ, **environment}
    there.pop("PYTHONPATH", None)
    return subprocess.run(
        [sys.executable, str(ROOT / "tools/gpu_check.py"), *words, "--out", str(out)],
        cwd=out.parent, env=there, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip


def check_of(folder: Path, task: str = "", seconds: float = 600.0) -> Check:
    return Check("cpu", task, folder, folder / f"lines-{task}", time.monotonic() + seconds)


def found(out: Path) -> dict[str, dict[str, Any]]:
    return {result["part"]: result for result in report.load(out / "gpu.json")}


@pytest.mark.full
def test_every_part_that_needs_no_gpu_passes(tmp_path: Path) -> None:
    done = check(["--parts", "cpu", "--minutes", "30"], tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    by_part = found(tmp_path / "out")
    assert list(by_part) == [part.name for part in PARTS]
    lacking = set() if (ROOT / ".cache/demo/seed-0").exists() else {"loop"}  # the model of `make demo`, which it names
    for part in PARTS:
        assert by_part[part.name]["status"] == ("passed" if part.cpu and part.name not in lacking else "skipped"), part.name
        assert {line["name"] for line in by_part[part.name]["lines"]} == set(part.lines)
        assert all(line["status"] != "skipped" or line["why"] for line in by_part[part.name]["lines"])
    ran = {line["name"] for line in by_part["layouts"]["lines"] if line["status"] == "passed"}
    assert ran == set(PARTS[[p.name for p in PARTS].index("layouts")].lines)


@pytest.mark.full
def test_nothing_outlives_the_command(tmp_path: Path) -> None:
    """Killed while ranks train: the part, torchrun and the ranks end, and the results say how far it came."""
    words = [sys.executable, str(ROOT / "tools/gpu_check.py"), "--parts", "cpu,training", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not (_processes_of("tests.processes") and found(tmp_path / "out")) and time.monotonic() < until:
        time.sleep(0.1)
    assert _processes_of("tests.processes") and found(tmp_path / "out")["training"]["status"] == "running"
    process.kill()
    process.wait()
    until = time.monotonic() + 10
    while (left := _processes_of("benchmarks.gpu.check", "tests.processes")) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left


def _processes_of(*words: str) -> list[str]:
    """Command lines of processes that this test's session started and that have not ended."""
    commands = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = path.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode()
            parent = path.joinpath("environ").read_bytes()
        except OSError:
            continue
        if (
            any(word in command for word in words)
            and f"PYTEST_CURRENT_TEST={os.environ['PYTEST_CURRENT_TEST']}".encode() in parent
        ):
            commands.append(command)
    return commands


def test_the_plan_takes_the_attention_that_is_here(tmp_path: Path) -> None:
    """Without Transformer Engine `auto` is PyTorch's attention, which needs more memory."""
    config = tmp_path / "run.yaml"
    tiny_qwen3(tmp_path / "model")
    config.write_text(yaml.safe_dump(run_tree(check_of(tmp_path), tmp_path / "model") | {"platform": "cuda"}))
    planned = {}
    for found in (frozenset[str](), frozenset({"transformer_engine"})):
        cfg = load_config(str(config), attention_words(str(config), found))
        planned["transformer_engine" in found] = predictor_of(cfg, PlanRequest()).model.kernels.attention
    assert planned == {False: "packed", True: "te"}


def test_the_committed_table_has_the_lines_of_the_code() -> None:
    """Every line is there; what no GPU has measured says why. To renew it, run the check on a machine without a GPU."""
    committed = report.load(command.FILE)
    assert [(result["part"], result["title"]) for result in committed] == [(part.name, part.title) for part in PARTS]
    assert sorted(f"{r['part']}/{line['name']}" for r in committed for line in r["lines"]) == sorted(line_names(PARTS))
    assert all(line["why"] for result in committed for line in result["lines"] if line["status"] == "skipped")
    assert command.PAGE.read_text() == report.markdown(committed) + "\n"


def test_the_wheels_are_those_of_the_images() -> None:
    pins, wheels = (
        {line.strip() for line in (ROOT / "requirements" / name).read_text().splitlines() if line.strip() and line[0] != "#"}
        for name in ("gpu-vllm.txt", "gpu-check.txt")
    )
    peers = {line for line in wheels if line.partition("==")[0] in machine.PEER_WHEELS}
    assert wheels - peers and wheels - peers <= pins
