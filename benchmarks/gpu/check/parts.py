"""The parts of the check, in order of value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.results import ROOT

CPU = "cpu"  # in --parts: run on the CPU all parts that need no GPU
ENGINE_TESTS = ("test_colocation.py", "test_fp8.py")  # in tests/gpu: they start servers; the first also has other tests
FIRST_TESTS = ("test_triton_kernels.py", "test_flash_attention.py", "test_ipc.py", "test_precision.py", "test_layouts.py")
LAYOUTS = (  # from tests/parallel/cases.py; a test compares the two
    "1 rank", "TP2", "TP2+SP", "PP2", "PP2 VPP2", "CP2", "CP4", "DP2", "TP2 PP2", "CP2 TP2", "CP2 TP2+SP", "CP2 PP2", "DP2 TP2",
)  # fmt: skip
WITHOUT_LOGITS = "logits computed again"  # training.logits_budget_mib 0: the fused output layer
FP8 = ("fp8-delayed", "fp8-current", "fp8-blockwise")  # from actor/precision.py; a test compares the two


def gpu_tests() -> tuple[str, ...]:
    """Return the files of tests/gpu that the part `tests` runs, in order of value."""
    there = {path.name for path in (ROOT / "tests/gpu").glob("test_*.py")} - {"test_fp8.py"}
    return (*(name for name in FIRST_TESTS if name in there), *sorted(there.difference(FIRST_TESTS)))


@dataclass(frozen=True)
class CheckPart:
    """One part of the check.

    Attributes:
        name: Name for `--parts`; the part's code is the module `run_<name>`.
        title: Title of its table.
        seconds: Time limit in a check of 10 minutes. A longer check raises it in proportion.
        lines: Names of the lines that it reports; a line that is missing at the end is reported as not measured.
        cpu: Whether it also runs on the platform `cpu`.
    """

    name: str
    title: str
    seconds: float
    lines: tuple[str, ...]
    cpu: bool = True


PARTS: tuple[CheckPart, ...] = (
    CheckPart("environment", "The machine and what is installed", 60, ("device", "driver", "torch", "packages")),
    CheckPart("tests", "Tests that need a GPU (tests/gpu)", 150, gpu_tests(), cpu=False),
    CheckPart("kernels", "Token statistics and the fused output layer", 90, (
        "error: statistics of fp32 logits", "error: statistics of bf16 logits", "error: output layer, logits kept",
        f"error: output layer, {WITHOUT_LOGITS}", "statistics: time", "statistics: extra memory", "output layer: time",
        "output layer: extra memory", "statistics: trl", "statistics: verl",
    )),
    CheckPart("training", "Two optimizer steps of one rank against the fp64 reference", 90, (
        "fp32", f"fp32, {WITHOUT_LOGITS}", "bf16", f"bf16, {WITHOUT_LOGITS}", *FP8,
    )),
    CheckPart("layouts", "Two optimizer steps of several ranks on one device, collectives staged through host memory", 150, (
        *(f"fp32, {name}" for name in LAYOUTS), f"fp32, DP2, {WITHOUT_LOGITS}", "fp32, DP2, overlapped",
        *(f"bf16, {name}" for name in LAYOUTS),
    )),
    CheckPart("offload", "The actor leaves the device and comes back", 60, (
        "offload", "reload", "bytes that left the device", "host memory in use afterwards", "page-locked by PyTorch",
        "state after the round trip",
    )),
    CheckPart("transfer", "Weights to another process", 60, (
        "ipc", "shm", "copy of as many bytes on the device", "copy of as many bytes to /dev/shm",
    )),
    CheckPart("step", "A training step of a random Qwen3 next to the prediction of `tepo plan`", 200, (
        "old log-probs, logits kept", "updates, logits kept", "memory, logits kept",
        "old log-probs, logits_budget_mib 512", "updates, logits_budget_mib 512", "memory, logits_budget_mib 512",
    )),
    CheckPart("engines", "Servers that sleep, wake and take FP8 weights", 300, ENGINE_TESTS, cpu=False),
)  # fmt: skip


def selected(words: str | None) -> tuple[str, tuple[CheckPart, ...]]:
    """Return the platform and the parts that `--parts` asks for; None asks for all of them on the GPU.

    Raises ValueError for a name that no part has, or for a part that cannot run on a CPU.
    """
    asked = [word.strip() for word in words.split(",") if word.strip()] if words else []
    platform = "cpu" if CPU in asked else "cuda"
    names = [word for word in asked if word != CPU]
    if unknown := [name for name in names if name not in {part.name for part in PARTS}]:
        raise ValueError(f"--parts: no part is called {', '.join(unknown)}; use {CPU}, {', '.join(p.name for p in PARTS)}")
    return platform, tuple(part for part in PARTS if not names or part.name in names)


def limit(part: CheckPart, minutes: float, left: float) -> float:
    """Return the seconds that a part may take.

    Args:
        part: The part.
        minutes: Time limit of the whole check.
        left: Seconds left of it.
    """
    return min(left, part.seconds * max(1.0, minutes / 10))


def line_names(parts: Sequence[CheckPart]) -> list[str]:
    """Return "part/line" of each line that the parts report."""
    return [f"{part.name}/{line}" for part in parts for line in part.lines]
