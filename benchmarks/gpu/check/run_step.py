"""Part `step`: a training step of a random Qwen3, with all defaults of platform cuda, next to the prediction of `tepo plan`.

The model FLOPs utilization (MFU) is operations / seconds / rate. The operations of a step are those of old log-probs (one
forward pass) and of updates (a forward and a backward pass, which counts as two); recomputation does not count.
`models/ops.py` counts those of a forward pass.
"""

import re
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import yaml
from torch.profiler import ProfilerActivity, profile

from benchmarks._ranks import one_rank
from benchmarks.gpu.check.lines import Check, Skip
from benchmarks.gpu.check.machine import card_of, unknown_card
from benchmarks.gpu.check.model import Case, case_of, random_model, run_tree
from benchmarks.gpu.check.parts import STEP_LINES
from benchmarks.gpu.check.steps import OLD, UPDATES, MeasuredSteps
from benchmarks.gpu.rows import matmul_rate
from tepo_megatron.actor.kernels import choose, installed
from tepo_megatron.base.hardware import GPUS
from tepo_megatron.base.types import TrainBatch
from tepo_megatron.config.io import load_config
from tepo_megatron.doctor.plan.command import PlanRequest, predictor_of
from tepo_megatron.doctor.plan.inputs import GIB, Workload
from tepo_megatron.doctor.plan.memory import TrainerMemory
from tepo_megatron.doctor.plan.roofline import Predictor
from tepo_megatron.models.ops import forward_operations

TIMED_STEPS = 2
FORWARD, FORWARD_AND_BACKWARD = 1, 3  # passes, by their operations
SQUARE = {"cpu": 128, "cuda": 8192}  # of the product that gives the rate
TRACED_PROMPTS = 2
NOT_ALLOCATED = ("fragmentation", "context, NCCL")  # parts of the plan that PyTorch's allocator does not count as tensors
PLANNED = {OLD: ("old log-probs",), UPDATES: ("forward and backward", "gradients and weights over dp", "optimizer")}
# the first pattern that a kernel's name contains decides
KINDS = {
    "attention": r"flash|fmha|attention|cudnn.*sdpa",
    "matrix products": r"gemm|nvjet|cutlass|cublas|xmma|splitK",
    "token statistics": r"^_statistics|^_gradient|^_truncated",
    "compiled SwiGLU": r"^triton_",
    "norms": r"rms_?norm|layer_?norm|GammaBeta",
    "optimizer": r"multi_tensor|adam|foreach",
    "copies": r"memcpy|memset|copy|Cat|cat_|fill",
    "gather and scatter": r"index|gather|scatter|embedding",
    "sums": r"reduce",
    "other elementwise": r"",
}
BINS = 400  # of the timeline


def run(check: Check) -> None:
    """Measure the steps of a model."""
    with check.line(*(f"{check.task}: {what}" for what in STEP_LINES)):
        case = case_of(check)
        if check.on_gpu and torch.cuda.get_device_properties(0).total_memory < case.needed:
            raise Skip(f"{case.needed / GIB:.0f} GiB of GPU memory are needed")
        predictor, gpu = _predictor(check, case)
        begun = time.monotonic()
        with one_rank():
            steps = MeasuredSteps(predictor.cfg, Workload.of(predictor.cfg, case.prompt, case.response))
            check.report(f"{check.task}: ready", "measured", time.monotonic() - begun, "s", "reading and building the model")
            _measure(check, steps, predictor, gpu)
            from tepo_megatron.dist import parallel

            parallel.shutdown()


def _predictor(check: Check, case: Case) -> tuple[Predictor, str | None]:
    """Return what predicts the case's config, and the GPU that is here; None for one that is not in the plan's table."""
    config = check.folder / f"{case.folder}.yaml"
    config.write_text(yaml.safe_dump(run_tree(check, random_model(check, case), case)))
    gpu = card_of(torch.cuda.get_device_name(0)) if check.on_gpu else next(iter(GPUS))  # on a CPU, for tests, any will do
    cfg = load_config(str(config), attention_words(str(config), installed()))
    request = PlanRequest(gpu=gpu or next(iter(GPUS)), prompt=case.prompt, response=case.response)
    return predictor_of(cfg, request), gpu


def attention_words(config: str, packages: frozenset[str]) -> list[str]:
    """Return overrides that name PyTorch's attention where the layers are PyTorch's: `tepo plan` takes `auto` for the images'
    Transformer Engine, whose attention needs less memory.
    """
    cfg = load_config(config, [])
    layers = choose(cfg.model, cfg.megatron, cfg.platform, packages, cp=cfg.parallel.cp).layers
    return ["--model.attention", "sdpa"] if layers == "torch" else []


def _measure(check: Check, steps: MeasuredSteps, predictor: Predictor, gpu: str | None) -> None:
    """Report the first step, then the times, the memory and the kernels of the following ones."""
    begun = time.monotonic()
    steps.finish(1, steps.begin(1))
    first = {phase: taken.pop() for phase, taken in steps.seconds.items()}
    parts = ", ".join(f"{phase} {seconds:.3g} s" for phase, seconds in first.items())
    check.report(f"{check.task}: first step", "measured", time.monotonic() - begun, "s", f"with compilation; {parts}")
    if check.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for number in range(2, TIMED_STEPS + 2):
        steps.finish(number, steps.begin(number))
    _report_seconds(check, steps, predictor, gpu)
    _report_memory(check, predictor)
    with check.line(f"{check.task}: kernels"):
        _report_kernels(check, steps)


def _report_seconds(check: Check, steps: MeasuredSteps, predictor: Predictor, gpu: str | None) -> None:
    """Report the seconds by phase, and the MFU over both."""
    seconds = {phase: statistics.median(taken) for phase, taken in steps.seconds.items()}
    phases = predictor.step().phases
    for phase in PLANNED:
        planned = sum(phases[name] for name in PLANNED[phase]) if gpu else None
        why = unknown_card(torch.cuda.get_device_name(0)) if planned is None else f"planned {planned:.3g} s on an {gpu}"
        check.report(f"{check.task}: {phase}", "measured", seconds[phase], "s", why, planned=planned)
    lengths = [(r.token_ids_L.numel(), int(r.response_mask_L.sum())) for r in steps.rollouts]
    forward = forward_operations(predictor.model.arch, lengths) or 0.0
    operations = {OLD: FORWARD * forward, UPDATES: FORWARD_AND_BACKWARD * forward}
    tokens, both = sum(length for length, _ in lengths), sum(seconds.values())
    size = SQUARE[check.platform]
    per_second, rate = sum(operations.values()) / both, matmul_rate(size, torch.device(check.platform), 10)
    peak = GPUS[gpu].peak[2] if gpu else None
    shares = {phase: operations[phase] / seconds[phase] / (peak or rate) for phase in operations}
    by_phase = ", ".join(f"{phase} {share:.1%}" for phase, share in shares.items())
    of_what = f"of the {'datasheet' if peak else 'measured'} rate in bf16; {by_phase}"
    why = f"{of_what}; {per_second / rate:.1%} of the {rate / 1e12:.0f} TFLOP/s of a product of {size} rows"
    more: dict[str, Any] = {"operations": operations, "rate": rate, "peak": peak, "shares": shares}
    check.report(f"{check.task}: MFU", "measured", 100 * per_second / (peak or rate), "%", why, **more)
    packed = f"{len(lengths)} sequences, {tokens} tokens, the longest {max(lengths)[0]}"
    check.report(f"{check.task}: tokens", "measured", tokens / both, "tokens/s", f"in both phases; {packed}")


def _report_memory(check: Check, predictor: Predictor) -> None:
    """Report the peaks since the first step next to what the plan says."""
    parts = TrainerMemory.of(predictor.cfg, predictor.model).state().parts
    planned = {
        "memory allocated": sum(size for part, size in parts.items() if part not in NOT_ALLOCATED) / GIB,
        "memory reserved": sum(size for part, size in parts.items() if part != NOT_ALLOCATED[1]) / GIB,
    }
    by_part = ", ".join(f"{part} {size / GIB:.3g}" for part, size in parts.items())
    for what, expected in planned.items():
        line, why = f"{check.task}: {what}", f"planned {expected:.4g} GiB"
        if not check.on_gpu:
            check.report(line, "skipped", unit="GiB", why=f"only on a GPU; {why}", planned=expected)
            continue
        peak = {"memory allocated": torch.cuda.max_memory_allocated, "memory reserved": torch.cuda.max_memory_reserved}[what]()
        why += f", {peak / GIB / expected - 1:+.1%}; {by_part}"
        check.report(line, "measured", peak / GIB, "GiB", why, planned=expected, parts=parts)


def _report_kernels(check: Check, steps: MeasuredSteps) -> None:
    """Trace a step with few of the sequences, and report where its time goes."""
    if not check.on_gpu:
        raise Skip("only on a GPU")
    number, few = TIMED_STEPS + 2, TRACED_PROMPTS * steps.cfg.rollout.samples_per_prompt
    steps.rollouts = steps.rollouts[:few]

    def traced() -> None:
        batch: TrainBatch = steps.begin(number)
        steps.finish(number, batch)

    found = kernel_times(traced)
    kinds = ", ".join(f"{kind} {seconds / found.seconds:.1%}" for kind, seconds in found.kinds.items())
    why = f"of {found.seconds:.3g} s of a step with {few} sequences; {kinds}"
    share = 100 * found.busy / found.seconds
    check.report(f"{check.task}: kernels", "measured", share, "% busy", why, trace=asdict(found))


@dataclass
class KernelTimes:
    """The kernels of one call."""

    seconds: float = 0.0  # from the first kernel's start to the last one's end
    busy: float = 0.0  # seconds in which at least one kernel ran
    kinds: dict[str, float] = field(default_factory=dict)
    kernels: dict[str, float] = field(default_factory=dict)
    # For each kind the share of each of BINS equal parts of `seconds` in which it ran
    timeline: dict[str, list[float]] = field(default_factory=dict)


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel by its name."""
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE))


def kernel_times(call: Callable[[], Any]) -> KernelTimes:
    """Trace a call on a GPU, and return the times of its kernels; empty if it ran none."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    assert trace.profiler is not None and trace.profiler.kineto_results is not None
    events = [e for e in trace.profiler.kineto_results.events() if e.device_type() == torch.autograd.DeviceType.CUDA]
    return summary([(e.name(), e.start_ns() / 1e9, e.duration_ns() / 1e9) for e in events])


def summary(events: list[tuple[str, float, float]]) -> KernelTimes:
    """Return the times of kernels: name, start and duration of each, in seconds."""
    if not events:
        return KernelTimes()
    events = sorted(events, key=lambda event: event[1])
    start, end = events[0][1], max(at + seconds for _, at, seconds in events)
    found, until = KernelTimes(seconds=end - start), start
    kinds, kernels, width = Counter[str](), Counter[str](), (end - start) / BINS or 1.0
    timeline = {kind: [0.0] * BINS for kind in KINDS}
    for name, at, seconds in events:
        kind = kind_of(name)
        kinds[kind] += seconds  # type: ignore[assignment]
        kernels[name[:120]] += seconds  # type: ignore[assignment]
        found.busy += max(0.0, at + seconds - max(until, at))
        until = max(until, at + seconds)
        first, last = (min(BINS - 1, int((t - start) / width)) for t in (at, at + seconds))
        for i in range(first, last + 1):
            here = min(at + seconds, start + (i + 1) * width) - max(at, start + i * width)
            timeline[kind][i] += max(0.0, here) / width
    found.kinds, found.kernels = dict(kinds.most_common()), dict(kernels.most_common(25))
    found.timeline = {kind: [round(x, 3) for x in shares] for kind, shares in timeline.items() if any(shares)}
    return found
