"""The parts of the check in order of value, the tasks that run in processes of their own, and their time limits."""

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
FP8 = ("fp8-current", "fp8-blockwise")  # from actor/precision.py; a test compares the two
ATTENTION_FORMS, OTHER_LENGTHS = ("packed", "in buckets"), "other lengths"
STEP_LINES = (  # of each task of the part `step`
    "ready", "first step", "old log-probs", "updates", "MFU", "tokens", "memory allocated", "memory reserved", "kernels",
)  # fmt: skip
LOOP_LINES = ("accuracy after", "rewards", "seconds of a step", "log-probs apart")
# of the minutes that are given; the rest is for tasks that do not end at once when they are cut off, and for starting this
USED = 0.8
LEAST_SECONDS = 10.0  # a task does not run with less: what is left of its imports may take most of it
TRANSFORMERS = ("transformers.models.qwen3.modeling_qwen3",)
ACTOR = (*TRANSFORMERS, "tepo_megatron.actor.actor", "tepo_megatron.losses", "tepo_megatron.sync.push")


def gpu_tests() -> tuple[str, ...]:
    """Return the files of tests/gpu that the part `tests` runs, in order of value."""
    there = {path.name for path in (ROOT / "tests/gpu").glob("test_*.py")} - {"test_fp8.py"}
    return (*(name for name in FIRST_TESTS if name in there), *sorted(there.difference(FIRST_TESTS)))


@dataclass(frozen=True)
class CheckTask:
    """One process group with a time limit of its own, so that a task that hangs takes only its own time."""

    name: str
    seconds: float  # time that it has in a check of 10 minutes, however long the tasks before it took; other checks scale it
    lines: tuple[str, ...]  # names of the lines that it reports; a line that is missing at the end is reported as not measured


@dataclass(frozen=True)
class CheckPart:
    """One part of the check: a table."""

    name: str
    title: str
    tasks: tuple[CheckTask, ...]
    cpu: bool = True  # whether it also runs on the platform `cpu`
    # Module with the part's `run(check)`; "": benchmarks.gpu.check.run_<name>. If it has `prepare(check)`, that runs before the
    # task's turn and must not touch the GPU; its result is the second argument of `run`.
    code: str = ""
    imports: tuple[str, ...] = ()  # modules that its processes import before their turn, which must not touch the GPU either

    @property
    def lines(self) -> tuple[str, ...]:
        """Names of the lines of all tasks."""
        return tuple(line for task in self.tasks for line in task.lines)

    @property
    def module(self) -> str:
        """Name of the module with the part's `run`."""
        return self.code or f"benchmarks.gpu.check.run_{self.name}"


def _files(names: Sequence[str]) -> tuple[CheckTask, ...]:
    """Return the tasks of test files: the first ones have time of their own, the others what is saved before them."""
    return tuple(CheckTask(name, 12 if name in FIRST_TESTS else 0, (name,)) for name in names)


PARTS: tuple[CheckPart, ...] = (
    CheckPart("environment", "The machine and what is installed", (
        CheckTask("environment", 10, ("device", "driver", "torch", "packages")),
    )),
    CheckPart("kernels", "Token statistics, the fused output layer, the compiled activation", (
        CheckTask("statistics", 25, (
            "error: statistics of fp32 logits", "error: statistics of bf16 logits", "statistics: extra memory",
            "statistics: time", "statistics: trl", "statistics: verl",
        )),
        CheckTask("output layer", 25, (
            "error: output layer, logits kept", f"error: output layer, {WITHOUT_LOGITS}", "output layer: extra memory",
            "output layer: time",
        )),
        CheckTask("activation", 15, ("error: SwiGLU", "SwiGLU: first call", "SwiGLU: first call with another length")),
        CheckTask("attention", 15, tuple(
            f"attention {form}{lengths}" for form in ATTENTION_FORMS for lengths in ("", f", {OTHER_LENGTHS}")
        )),
    ), imports=("megatron.core.fusions.fused_bias_swiglu",)),
    CheckPart("training", "Two optimizer steps of one rank against the fp64 reference", (
        CheckTask("training", 30, ("fp32", f"fp32, {WITHOUT_LOGITS}", "bf16", f"bf16, {WITHOUT_LOGITS}", *FP8)),
    ), imports=TRANSFORMERS),
    CheckPart("step", "A training step of a random Qwen3 next to the prediction of `tepo plan`", tuple(
        CheckTask(name, seconds, tuple(f"{name}: {what}" for what in STEP_LINES))
        for name, seconds in (("1.7B, 2k tokens", 50), ("0.6B, 4k tokens", 30), ("4B, 2k tokens", 50))
    ), imports=ACTOR),
    CheckPart("loop", "The whole loop on one card: the demo's model with the torch engine", (
        CheckTask("loop", 80, LOOP_LINES),
    )),
    CheckPart("transfer", "Weights to another process", (
        CheckTask("ipc", 15, ("ipc", "copy of as many bytes on the device")),
        CheckTask("shm", 15, ("shm", "copy of as many bytes to /dev/shm")),
    ), imports=ACTOR),
    CheckPart("offload", "The actor leaves the device and comes back", (
        CheckTask("offload", 20, (
            "offload", "reload", "bytes that left the device", "host memory in use afterwards", "page-locked by PyTorch",
            "state after the round trip",
        )),
    ), imports=ACTOR),
    CheckPart("layouts", "Two optimizer steps of several ranks on one device, collectives staged through host memory", (
        CheckTask("layouts", 40, (
            *(f"fp32, {name}" for name in LAYOUTS), f"fp32, DP2, {WITHOUT_LOGITS}", "fp32, DP2, overlapped",
            *(f"bf16, {name}" for name in LAYOUTS),
        )),
    ), code="benchmarks.gpu.check.run_training", imports=TRANSFORMERS),
    CheckPart("tests", "Tests that need a GPU (tests/gpu)", _files(gpu_tests()), cpu=False, imports=("pytest", *ACTOR)),
    CheckPart("engines", "Servers that sleep, wake and take FP8 weights", _files(ENGINE_TESTS), cpu=False),
)  # fmt: skip


def selected(words: str | None) -> tuple[str, tuple[CheckPart, ...]]:
    """Return the platform and the parts that `--parts` names; all on the GPU without it. Raise ValueError for a wrong name."""
    asked = [word.strip() for word in words.split(",") if word.strip()] if words else []
    platform = "cpu" if CPU in asked else "cuda"
    names = [word for word in asked if word != CPU]
    if unknown := [name for name in names if name not in {part.name for part in PARTS}]:
        raise ValueError(f"--parts: no part is called {', '.join(unknown)}; use {CPU}, {', '.join(p.name for p in PARTS)}")
    return platform, tuple(part for part in PARTS if not names or part.name in names)


def seconds_of(minutes: float) -> float:
    """Return the seconds that all tasks of a check have together."""
    return 60 * USED * minutes


def limit(task: CheckTask, later: Sequence[CheckTask], minutes: float, left: float) -> float:
    """Return the seconds that a task may take, of those that are left of `seconds_of(minutes)`: its own, and half of what
    nobody has a claim to; for the last one, all of it.
    """
    own, claimed = (minutes / 10 * sum(x.seconds for x in tasks) for tasks in ([task], later))
    spare = max(0.0, left - own - claimed)
    return min(left, own + (spare / 2 if later else spare))


def line_names(parts: Sequence[CheckPart]) -> list[str]:
    """Return "part/line" of each line that the parts report."""
    return [f"{part.name}/{line}" for part in parts for line in part.lines]
