"""tools/gpu_check.py without a GPU: its parts on the platform cpu, its results, its limits, what it says of what cannot run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import results
from benchmarks._token_stats_peers import FORMS, plain_formula
from benchmarks.gpu.check import command, lines, report, run_kernels, worlds
from benchmarks.gpu.check.lines import Check, Skip
from benchmarks.gpu.check.parts import FP8, LAYOUTS, PARTS, CheckPart, limit, line_names, selected
from benchmarks.gpu.check.pytests import outcomes, run_files
from tepo_megatron.actor import precision
from tests.parallel import cases

ROOT = Path(__file__).parents[3]
COMMITTED = ROOT / "benchmarks/results/gpu.json"


def check(words: list[str], out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command from another working directory, without this project on the path."""
    there = {**os.environ, **environment}
    there.pop("PYTHONPATH", None)
    return subprocess.run(
        [sys.executable, str(ROOT / "tools/gpu_check.py"), *words, "--out", str(out)],
        cwd=out.parent, env=there, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip


def found(out: Path) -> dict[str, dict[str, Any]]:
    return {result["part"]: result for result in report.load(out / "gpu.json")}


@pytest.mark.full
def test_parts_run_on_a_cpu_without_git(tmp_path: Path) -> None:
    done = check(["--parts", "cpu,environment,kernels,engines"], tmp_path / "out", PATH="/nonexistent")
    assert done.returncode == 0, done.stdout + done.stderr
    by_part = found(tmp_path / "out")
    assert [by_part[name]["status"] for name in ("environment", "kernels", "engines")] == ["passed", "passed", "skipped"]
    assert [line.split(":")[0] for line in done.stdout.splitlines()[:3]] == ["environment", "kernels", "engines"]
    assert by_part["kernels"]["commit"] == "unknown: git is not installed"
    kernels = {line["name"]: line for line in by_part["kernels"]["lines"]}
    assert {name for name, line in kernels.items() if line["status"] == "passed"} >= {n for n in kernels if "error" in n}
    assert kernels["statistics: time"]["value"] > 0 and "plain" in kernels["statistics: time"]["why"]
    for peer in ("trl", "verl"):
        line = kernels[f"statistics: {peer}"]
        assert line["status"] == "measured" and line["value"] > 0 and f"{peer} form: " in line["why"]
    assert {line["why"] for line in by_part["engines"]["lines"]} == {"needs a GPU"}
    table = (tmp_path / "out/gpu.md").read_text()
    assert all(f"| {line['name']} | " in table for result in by_part.values() for line in result["lines"])


@pytest.mark.parametrize("form", FORMS)
def test_the_forms_of_peers_compute_log_probs_and_entropies(form: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(520, 40, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 40, (520,), generator=generator)
    for ours, plain in zip(FORMS[form](logits, labels), plain_formula(logits, labels), strict=True):
        torch.testing.assert_close(ours, plain.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_every_part_that_needs_no_gpu_passes(tmp_path: Path) -> None:
    done = check(["--parts", "cpu", "--minutes", "14"], tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    by_part = found(tmp_path / "out")
    assert list(by_part) == [part.name for part in PARTS]
    for part in PARTS:
        assert by_part[part.name]["status"] == ("passed" if part.cpu else "skipped"), part.name
        assert {line["name"] for line in by_part[part.name]["lines"]} == set(part.lines)
        assert all(line["status"] != "skipped" or line["why"] for line in by_part[part.name]["lines"])
    ran = {line["name"] for line in by_part["layouts"]["lines"] if line["status"] == "passed"}
    assert ran == set(PARTS[[p.name for p in PARTS].index("layouts")].lines)


@pytest.mark.full
def test_a_part_that_takes_too_long_is_cut_off_and_keeps_its_lines(tmp_path: Path) -> None:
    """The ranks of the part end with it, and no time is left for the parts behind it."""
    start = time.monotonic()
    done = check(["--parts", "cpu,layouts,offload", "--minutes", "0.2"], tmp_path / "out")
    assert done.returncode == 1 and time.monotonic() - start < 60
    by_part = found(tmp_path / "out")
    layouts, offload = by_part["layouts"], by_part["offload"]
    assert layouts["status"] == "cut off" and layouts["why"].startswith("cut off after 1")
    missing = [line for line in layouts["lines"] if line["status"] == "skipped"]
    assert missing and all(line["why"] == layouts["why"] for line in missing)
    assert offload["status"] == "no time left"
    until = time.monotonic() + 10
    while (left := _processes_of("benchmarks.gpu.check", "tests.processes")) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left


@pytest.mark.full
def test_a_layout_that_fails_leaves_the_others(tmp_path: Path) -> None:
    """Two key-value heads are not split over 3 ranks: that job fails with the rank's reason, and the next one trains."""
    here, case = Check("cpu", tmp_path, tmp_path / "lines", time.monotonic() + 300), cases.make_case(tmp_path, tied=True)
    worlds.train(
        here, [worlds.TrainingJob(name, case, {"tp": tp}, "fp32", {}) for name, tp in (("a", 3), ("b", 1))], staged=True
    )
    a, b = lines.read(here.file)
    assert (a["name"], a["status"]) == ("a", "failed") and "a rank failed" in a["why"] and "3" in a["why"]
    assert (b["name"], b["status"]) == ("b", "passed") and b["value"] < 1e-5


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


def test_what_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A line above its limit, and a part whose process dies."""
    here = Check("cpu", tmp_path, tmp_path / "lines", time.monotonic() + 300)
    monkeypatch.setitem(run_kernels.LIMITS, "output layer", 1e-9)
    run_kernels.run(here)
    statuses = {line["name"]: line["status"] for line in lines.read(here.file)}
    assert statuses["error: output layer, logits kept"] == "failed" and statuses["statistics: time"] == "measured"
    assert report.status_of(lines.read(here.file)) == "failed"
    dead = CheckPart("kernel", "No module has this name", 30.0, ("a line",))
    monkeypatch.setattr(command, "selected", lambda words: ("cpu", (dead,)))
    monkeypatch.setattr(report, "PARTS", (dead,))
    assert command.main(["--out", str(tmp_path / "out")]) == 1
    (result,) = report.load(tmp_path / "out/gpu.json")
    assert result["status"] == "failed" and "run_kernel" in result["why"] and result["exit_status"] == 1
    assert result["lines"] == [{"name": "a line", "status": "skipped", "value": None, "unit": "", "why": result["why"]}]
    assert "1 not measured" in capsys.readouterr().out


def test_a_line_that_raises_does_not_end_its_part(tmp_path: Path) -> None:
    here = Check("cpu", tmp_path, tmp_path / "lines", time.monotonic() + 300)
    with here.line("a", "b"):
        here.report("a", "measured", 1.0, "s")
        raise ValueError("broken")
    with here.line("c"):
        raise Skip("no such device")
    here.verdict("d", float("nan"), 1.0)
    here.file.write_text(here.file.read_text() + '{"name": "cut o')
    reported = [(line["name"], line["status"], line["why"]) for line in lines.read(here.file)]
    assert reported[:3] == [("a", "measured", ""), ("b", "failed", "ValueError: broken"), ("c", "skipped", "no such device")]
    assert reported[3][:2] == ("d", "failed") and len(reported) == 4


def test_results_of_other_runs_stay() -> None:
    """A part that was skipped does not replace one that ran; one that ran replaces both."""

    def result(name: str, status: str, commit: str) -> report.Result:
        return report.result_of(next(p for p in PARTS if p.name == name), status, [], commit=commit)

    old = [result("kernels", "passed", "old"), result("step", "skipped", "old"), result("transfer", "failed", "old")]
    new = [result("transfer", "passed", "new"), result("kernels", "skipped", "new"), result("step", "skipped", "new")]
    merged = [(r["part"], r["status"], r["commit"]) for r in report.merged(old, new)]
    assert merged == [("kernels", "passed", "old"), ("transfer", "passed", "new"), ("step", "skipped", "new")]


def test_parts_and_limits() -> None:
    assert selected(None) == ("cuda", PARTS) and selected("cpu") == ("cpu", PARTS)
    assert selected("kernels, cpu")[0] == "cpu" and [p.name for p in selected("step,kernels")[1]] == ["kernels", "step"]
    with pytest.raises(ValueError, match="no part is called kernel"):
        selected("kernel")
    part = PARTS[0]
    assert limit(part, 10, 1000) == part.seconds == limit(part, 1, 1000)
    assert limit(part, 30, 1000) == 3 * part.seconds and limit(part, 10, 5) == 5


def test_names_are_those_of_the_code() -> None:
    """The table of parts imports nothing, so it has copies."""
    assert tuple(cases.LAYOUTS) == LAYOUTS
    assert tuple(name for name in precision.PRESETS if name.startswith("fp8")) == FP8
    tests = {line for part in PARTS if not part.cpu for line in part.lines}
    assert tests == {path.name for path in (ROOT / "tests/gpu").glob("test_*.py")}


def test_the_command_needs_the_standard_library_alone() -> None:
    """The command must be able to say on any machine why the rest cannot run."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import benchmarks.gpu.check.command, benchmarks.gpu.check.part"
    subprocess.run([sys.executable, "-I", "-S", "-c", code, str(ROOT)], check=True, timeout=60)


@pytest.mark.slow
def test_reasons_of_tests(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(
        "import pytest\ndef test_a(): pass\n@pytest.mark.skipif(True, reason='no engine')\ndef test_b(): pass\n"
        "def test_c(): assert False, 'wrong'\n@pytest.fixture\ndef x(): raise ValueError('no fixture')\ndef test_d(x): pass\n"
    )
    words = [sys.executable, "-m", "pytest", str(file), f"--junitxml={tmp_path}/out.xml", "-p", "no:cacheprovider"]
    subprocess.run(words, cwd=tmp_path, capture_output=True, timeout=120, check=False)
    counts, reasons = outcomes(tmp_path / "out.xml")
    assert counts == {"passed": 1, "skipped": 1, "failed": 2} and reasons["no engine"] == 1
    assert {reason.split(":")[0] for reason in reasons} == {"no engine", "test_c", "test_d"}


@pytest.mark.full
def test_files_of_gpu_tests_are_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU the first file fails and names the test; the second file does not exist."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    here = Check("cuda", tmp_path, tmp_path / "lines", time.monotonic() + 300)
    run_files(here, ["test_ipc.py", "test_there_is_none.py"])
    ipc, none = lines.read(here.file)
    assert ipc["status"] == "failed" and ipc["value"] == "1 failed" and "test_buckets_are_read" in ipc["why"]
    assert none["status"] == "failed" and "exit status 4 and ran no test" in none["why"]


def test_the_committed_results() -> None:
    """Every line is there; what no GPU has measured says why."""
    committed = report.load(COMMITTED)
    there = {f"{result['part']}/{line['name']}": line for result in committed for line in result["lines"]}
    parts = [part for part in PARTS if part.name != "tests"]  # whose lines are the files that are there
    assert set(line_names(parts)) <= there.keys() and [result["part"] for result in committed] == [p.name for p in PARTS]
    assert all(line["why"] for line in there.values() if line["status"] == "skipped")
    assert COMMITTED.with_suffix(".md").read_text() == report.markdown(committed) + "\n"


def test_the_commit_is_unknown_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(results.commit().split()[0]) == 40 or results.commit().startswith("unknown")
    monkeypatch.setenv("PATH", "/nonexistent")
    assert results.commit() == "unknown: git is not installed"


def test_the_gpu_tests_take_the_active_python() -> None:
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # not a part of `make test`
    command = ["make", "-n", "test-gpu"]
    done = subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["python", "-m", "pytest", "tests/gpu", "--confcutdir=tests/gpu"]


def test_the_wheels_are_those_of_the_images() -> None:
    pins, wheels = (
        {line.strip() for line in (ROOT / "requirements" / name).read_text().splitlines() if line.strip() and line[0] != "#"}
        for name in ("gpu-vllm.txt", "gpu-check.txt")
    )
    assert len(wheels) == 5 and wheels <= pins


def test_the_page_names_every_part() -> None:
    section = (ROOT / "docs/index.md").read_text().split("### Check a GPU machine")[1].split("\n## ")[0]
    assert [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")] == [part.name for part in PARTS]


def test_the_report_is_valid_json_at_any_time(tmp_path: Path) -> None:
    file = tmp_path / "out/gpu.json"
    report.save(file, [])
    report.save(file, [report.result_of(PARTS[0], "skipped", [], "a | reason")])
    assert json.loads(file.read_text())[0]["lines"][0]["why"] == "a | reason"
    assert "a \\| reason" in file.with_suffix(".md").read_text() and not list(file.parent.glob("*.partial"))
