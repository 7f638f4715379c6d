"""The command: run the parts in order of value, each in a subprocess with a time limit; write results after every part."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.check import lines
from benchmarks.gpu.check.parts import CPU, PARTS, CheckPart, limit, selected
from benchmarks.gpu.check.report import Result, load, merged, outcome_line, result_of, save, status_of
from benchmarks.results import ROOT, surroundings

GRACE = 10.0  # seconds between SIGTERM and SIGKILL, in which launchers end their ranks
PROGRESS = 2.0  # seconds between two reads of a part's lines
SHORTEST = 10.0  # seconds; a part is not started with less time left
DESCRIPTION = """Check a machine with one GPU, offline, without installing the project: kernels, training steps, several ranks
on the one GPU, offloading, transfers of weights, a step of a real size, engines. What cannot run here is skipped, with the
reason. Results: gpu.json and gpu.md. Exit status: 0 if all parts that can run here passed, else 1."""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="gpu_check.py", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(part.name for part in PARTS)
    parser.add_argument(
        "--parts", help=f"comma-separated: {names}; `{CPU}`: on the CPU, at tiny sizes (default: all, on the GPU)"
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="time limit of the whole check (default: %(default)g)")
    parser.add_argument(
        "--out", type=Path, help="folder of the results (default: benchmarks/results; on the CPU: build/gpu_check)"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check; return the exit status."""
    args = arguments(argv)
    end = time.monotonic() + 60 * args.minutes
    try:
        platform, parts = selected(args.parts)
    except ValueError as e:
        print(e, file=sys.stderr)
        return 2
    out = args.out or ROOT / ("build/gpu_check" if platform == "cpu" else "benchmarks/results")
    file = out / "gpu.json"
    results: list[Result] = []
    device, refusal = _device(platform)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        for part in parts:
            at = {"device": device, **surroundings()}

            def keep(result: Result, at: dict[str, Any] = at) -> None:
                """Write what is known, also of a running part, because this process may be ended without warning.

                Args:
                    result: The part's result so far.
                    at: The machine; bound when the function is defined.
                """
                save(file, merged(load(file), [*results, result | at]))

            result = _run(part, platform, refusal, Path(folder), limit(part, args.minutes, end - time.monotonic()), keep)
            keep(result)
            results.append(result | at)
            print(outcome_line(results[-1]), flush=True)
    print(f"written: {file} and {file.with_suffix('.md').name}")
    return int(any(result["status"] not in ("passed", "skipped") for result in results))


def _device(platform: str) -> tuple[str, str]:
    """Return the name of the device, and why parts for a GPU cannot run here; "" if they can."""
    if platform == "cpu":
        return "CPU", ""
    code = "import torch; print(torch.__version__); print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    words = [sys.executable, "-c", code]  # in a process of its own, because a CUDA context takes memory
    done = subprocess.run(words, env=environment(platform), capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        return "", f"torch cannot be used: {_last_line(done.stderr)}"
    version, name = done.stdout.splitlines()[-2:]
    return name, "" if name else f"needs a GPU, and torch {version} finds none"


def _run(part: CheckPart, platform: str, refusal: str, folder: Path, seconds: float, keep: Callable[[Result], None]) -> Result:
    """Run a part, or report why it does not run. `keep` gets its lines every few seconds while it runs."""
    if platform == "cpu" and not part.cpu:
        return result_of(part, "skipped", [], "needs a GPU")
    if refusal:
        return result_of(part, "skipped", [], refusal)
    if seconds < SHORTEST:
        return result_of(part, "no time left", [], "no time was left; raise --minutes")
    file, log = folder / f"{part.name}.jsonl", folder / f"{part.name}.log"
    start = time.monotonic()
    status = _subprocess(
        part, platform, folder, file, log, seconds, lambda: keep(result_of(part, "running", lines.read(file), "not done yet"))
    )
    found = lines.read(file)
    more: dict[str, Any] = {"seconds": round(time.monotonic() - start, 1), "exit_status": status}
    if status == 0 and status_of(found) != "failed":
        return result_of(part, status_of(found), found, **more)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
    print(tail, file=sys.stderr, flush=True)
    if status == 0:
        return result_of(part, "failed", found, log=tail[-4000:], **more)
    why = f"cut off after {seconds:.0f} s" if status is None else f"ended with exit status {status}: {_last_line(tail)}"
    return result_of(part, "cut off" if status is None else "failed", found, why, log=tail[-4000:], **more)


def _subprocess(
    part: CheckPart, platform: str, folder: Path, file: Path, log: Path, seconds: float, progress: Callable[[], None]
) -> int | None:
    """Run the code of a part; return its exit status, None if it ran out of time and was ended with all its children."""
    words = [sys.executable, "-m", "benchmarks.gpu.check.part", part.name, platform, str(folder), str(file), f"{seconds:.0f}"]
    with log.open("w") as output:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment(platform),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        deadline = time.monotonic() + seconds
        try:
            while (left := deadline - time.monotonic()) > 0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(min(left, PROGRESS))
                progress()
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
    """End the process group of a part."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)  # raises if no process of the group is left
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def environment(platform: str) -> dict[str, str]:
    """Return the environment of a part: the project from its folder, no network, few threads because of the many ranks."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if platform == "cpu" else {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **offline, **threads, **hidden}


def _last_line(text: str) -> str:
    found = [line.strip() for line in text.splitlines() if line.strip()]
    return found[-1][:300] if found else "no output"
