"""The GPU check keeps what it knows whatever happens to it or to one of its tasks, and says at once where it cannot run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.check import machine, report
from benchmarks.gpu.check.parts import PARTS, limit, seconds_of
from tepo_megatron.base.processes import read_stat
from tests.unit.benches.gpu_tasks import SCENES
from tests.waiting import lives, until

ROOT = Path(__file__).parents[3]
SECONDS = 60.0  # in which a process of this test has made progress
STUBS = ("torch", "numpy", "safetensors", "transformers", "yaml", "triton")


def command(scene: str, out: Path, *words: str, platform: str = "cpu", **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.unit.benches.gpu_tasks", platform, scene, "--out", str(out), *words],
        cwd=ROOT, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def lines(out: Path) -> dict[str, dict[str, Any]]:
    return {line["name"]: line for result in report.load(out / "gpu.json") for line in result["lines"]}


def known(out: Path) -> list[str]:
    return [name for name, line in lines(out).items() if line["status"] != "skipped"]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [0, 1, 2, 3])
def test_a_killed_check_leaves_a_table_with_every_row_that_was_known(tmp_path: Path, rows: int) -> None:
    """The third row is that of a task that goes on; no task outlives the command."""
    process = command("rows", tmp_path)
    until(lambda: (tmp_path / "gpu.md").exists() and len(known(tmp_path)) >= rows)
    process.kill()
    process.communicate()
    found = lines(tmp_path)
    assert list(found) == [line for task in SCENES["rows"] for line in task.lines]
    assert known(tmp_path) == list("abc")[: len(known(tmp_path))] and len(known(tmp_path)) >= rows
    assert {found[name]["why"] for name in found.keys() - set(known(tmp_path))} <= {"not run yet", "not done yet"}
    page = (tmp_path / "gpu.md").read_text()
    rows_there = re.findall(r"^\| (\w) \| .+? \| .* \|$", page, re.MULTILINE)
    missing = [name for names in re.findall(r"^Not measured \(.*\): (.+)\.$", page, re.MULTILINE) for name in names.split("; ")]
    assert rows_there == known(tmp_path)[: len(rows_there)], "the page is written after the JSON file"
    assert sorted(rows_there + missing) == sorted(found)
    pids = [int(pid) for name in ("a", "c") if found[name]["value"] for pid in found[name]["value"].split()[:1]]
    until(lambda: all(read_stat(pid) is None for pid in pids))


@pytest.mark.slow
def test_a_task_that_hangs_or_dies_takes_only_itself(tmp_path: Path) -> None:
    """It keeps the rows that it reported; its children end with it, though it ignores SIGTERM."""
    process = command("faults", tmp_path, "--minutes", "1")
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1, output
    (result,) = report.load(tmp_path / "gpu.json")
    tasks, found = {task["task"]: task for task in result["tasks"]}, lines(tmp_path)
    assert {name: task["status"] for name, task in tasks.items()} == {
        "hangs": "cut off", "aborts": "failed", "raises": "failed", "ends before its turn": "failed",
        "measures": "passed",
    }  # fmt: skip
    assert tasks["hangs"]["limit"] <= 8.0 and re.match(
        r"cut off after 8 s, the task in tests/unit/benches/gpu_tasks.py:\d+", tasks["hangs"]["why"]
    )
    assert "SIGABRT" in tasks["aborts"]["why"] and "ValueError: broken" in tasks["raises"]["why"]
    assert tasks["ends before its turn"]["why"].startswith("ended with exit status 7")
    assert tasks["ends before its turn"]["preloading"] is None and tasks["measures"]["preloading"] > 0
    assert known(tmp_path) == ["p", "r", "t", "a", "b"] and result["status"] == "failed"
    assert found["q"]["why"] == tasks["hangs"]["why"] and found["s"]["why"] == tasks["aborts"]["why"]
    pids = [int(pid) for pid in found["p"]["value"].split()]
    assert len(pids) == 2
    until(lambda: not any(map(lives, pids)))


@pytest.mark.parametrize("minutes", [1.0, 5.0, 9.0, 10.0, 30.0])
def test_limits_follow_the_minutes(minutes: float) -> None:
    """Every task gets its own share though all before it hang; together they take 480 s of 10 minutes."""
    tasks, left = [task for part in PARTS for task in part.tasks], seconds_of(minutes)
    granted = []
    for number, task in enumerate(tasks):
        granted.append(limit(task, tasks[number + 1 :], minutes, left))
        left -= granted[-1]
        assert granted[-1] >= task.seconds * minutes / 10 * (1 - 1e-9)
    assert sum(granted) <= 48 * minutes * (1 + 1e-9)
    assert granted[0] <= 1.1 * tasks[0].seconds * minutes / 10, "the first one does not get what others need"


def stubs(folder: Path, torch: str, *more: str) -> str:
    """Return PYTHONPATH with packages that contain nothing, and a torch with this code."""
    for name in (*STUBS, *more):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(torch if name == "torch" else "")
    return os.pathsep.join([str(folder), str(ROOT)])


def bare(out: Path, path: str) -> subprocess.CompletedProcess[str]:
    """Run the command without the packages of this environment."""
    words = [sys.executable, "-S", str(ROOT / "tools/gpu_check.py"), "--out", str(out)]
    return subprocess.run(
        words, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def test_missing_wheels_are_said_before_torch_is_imported(tmp_path: Path) -> None:
    done = bare(tmp_path / "out", stubs(tmp_path / "site", "raise SystemExit('imported')"))
    assert done.returncode == 1 and "imported" not in done.stderr
    needed = [name for name in machine.wheels() if name not in machine.PEER_WHEELS]
    assert done.stderr.startswith(f"{', '.join(needed)} not installed: see requirements/gpu-check.txt\n")
    assert {line["why"] for line in lines(tmp_path / "out").values()} == {done.stderr.splitlines()[0]}
    assert lines(tmp_path / "out").keys() == {line for part in PARTS for line in part.lines}


@pytest.mark.slow
def test_no_gpu_is_no_success(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "tools/gpu_check.py"), "--parts", "environment", "--out", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.startswith("the CUDA driver finds no GPU: ") and "needs a GPU, and torch" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("name", "status"), [("NVIDIA H100 80GB HBM3", 0), ("NVIDIA A100-SXM4-80GB", 1)])
def test_a_gpu_without_a_prediction_is_named(tmp_path: Path, name: str, status: int) -> None:
    """The command asks a torch that finds this GPU; what does not need the plan's table runs all the same."""
    cuda = (
        f"class cuda:\n    is_available = staticmethod(lambda: True)\n    get_device_name = staticmethod(lambda i: {name!r})\n"
    )
    for wheel in ("torch", "triton"):
        (tmp_path / "site" / wheel).mkdir(parents=True)
        (tmp_path / "site" / wheel / "__init__.py").write_text(f"__version__ = '0'\n{cuda}" if wheel == "torch" else "")
    process = command("good", tmp_path / "out", platform="cuda", PYTHONPATH=str(tmp_path / "site"))
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == status and known(tmp_path / "out") == ["a", "b"], output
    assert (f"{name} is not in the table of `tepo plan`" in output) == bool(status)
    assert json.loads((tmp_path / "out/gpu.json").read_text())[0]["device"] == name


@pytest.mark.parametrize(
    ("device", "card"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H200", "H200"), ("NVIDIA B200", "B200"), ("NVIDIA GH200 480GB", None),
        ("NVIDIA H100 PCIe", None), ("NVIDIA H100 NVL", None), ("NVIDIA GB200", None), ("NVIDIA A100-SXM4-80GB", None),
    ],
)  # fmt: skip
def test_a_gpu_has_the_limits_of_its_own_card(device: str, card: str | None) -> None:
    assert machine.card_of(device) == card
    assert (device in machine.unknown_card(device)) == (card is None)
