"""The command `tepo plan CONFIG`, what `--from RUN` reads of a recorded run, and the sizes of published models."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tepo_megatron.base.errors import CheckpointError, ConfigError, DataError
from tepo_megatron.base.hardware import GPUS, Gpu
from tepo_megatron.config import Config
from tepo_megatron.config.io import load_config
from tepo_megatron.config.reward import JudgeTermConfig
from tepo_megatron.doctor.plan.activations import ON_CPU, Attention, PlannedKernels
from tepo_megatron.doctor.plan.inputs import ELEMENT, GIB, PlannedModel, Workload
from tepo_megatron.doctor.plan.memory import host_bytes
from tepo_megatron.doctor.plan.roofline import REFILLS, Predictor, StepPrediction
from tepo_megatron.doctor.plan.search import LayoutCandidate, SearchResult, judge, search
from tepo_megatron.models.families import Family, find_family, read_config
from tepo_megatron.models.ops import Architecture
from tepo_megatron.monitor import run_dir
from tepo_megatron.monitor.sinks import read_metrics

_SHOWN = 8


def memory_lines(layout: LayoutCandidate, gpu: Gpu) -> Iterator[str]:
    """Yield the memory table, with one column per state."""
    states = layout.states
    yield "memory of a GPU, GiB".ljust(28) + "".join(state.name.rjust(10) for state in states)
    for name in dict.fromkeys(name for state in states for name in state.parts):
        cells = (f"{state.parts[name] / GIB:10.2f}" if name in state.parts else " " * 10 for state in states)
        yield f"  {name}".ljust(28) + "".join(cells)
    yield f"  total, of {gpu.memory / GIB:.1f}".ljust(28) + "".join(f"{state.total / GIB:10.2f}" for state in states)


def time_lines(predictor: Predictor, step: StepPrediction) -> Iterator[str]:
    """Yield the seconds of each phase, the throughput, and the assumptions behind them."""
    yield "a step, s"
    for name, seconds in step.phases.items():
        if seconds:
            yield f"  {name}".ljust(38) + f"{seconds:10.2f}"
    how = "one after the other" if step.hidden == 0 else f"{step.hidden:.0%} of training hidden"
    yield f"  all, {how}".ljust(38) + f"{step.seconds:10.2f}"
    gpus, steps = predictor.placement.gpus, predictor.cfg.training.steps
    yield f"  {step.tokens} tokens: {step.tokens_per_second:.0f} tokens/s, {step.tokens_per_second / gpus:.0f} per GPU"
    hours = steps * step.seconds / 3600
    yield f"  {steps} steps: {hours:.1f} h, {hours * gpus:.0f} GPU-hours of {gpus} GPUs"
    a = predictor.assumed
    rates = f"{a.matmul[2]:g} of the BF16 peak in products, {a.attention:g} in attention, {a.elementwise:g} of memory bandwidth"
    yield f"  assumed: {rates}, {a.links:g} of links; {predictor.beyond:.2f} of the phases beyond them"
    if predictor.factors:
        factors = ", ".join(f"{name} {factor:.3g}" for name, factor in predictor.factors.items())
        yield f"  from the recorded run, times: {factors}"


def search_lines(result: SearchResult, gpus: int) -> Iterator[str]:
    """Yield the best layouts, and why the others are refused."""
    yield f"{result.seen} layouts of {gpus} GPUs, {len(result.best)} fit"
    if result.best:
        yield "  " + "layout".ljust(52) + "tokens/s".rjust(10) + "step, s".rjust(10) + "GiB".rjust(8)
    for layout in result.best[:_SHOWN]:
        assert layout.step is not None
        cells = f"{layout.step.tokens_per_second:10.0f}{layout.step.seconds:10.1f}{layout.fullest.total / GIB:8.1f}"
        yield "  " + layout.name.ljust(52) + cells
    for why, names in result.refused.items():
        yield f"  {len(names):4} refused: {why}"


def as_json(predictor: Predictor, layout: LayoutCandidate, result: SearchResult, gpus: int) -> dict[str, Any]:
    """Return everything as JSON values, in bytes and seconds."""

    def one(layout: LayoutCandidate) -> dict[str, Any]:
        out: dict[str, Any] = {"layout": layout.name, "fits": not layout.why, "why": layout.why}
        out["memory_bytes"] = {state.name: {k: round(v) for k, v in state.parts.items()} for state in layout.states}
        if layout.step is not None:
            out["phases_seconds"] = dict(layout.step.phases)
            out["step_seconds"] = layout.step.seconds
            out["tokens_per_second"] = layout.step.tokens_per_second
        return out

    work = predictor.workload
    return {
        "gpu": predictor.gpu.name,
        "gpus": gpus,
        "factors": dict(predictor.factors),
        "beyond": predictor.beyond,
        "assumed": {
            "prompt_tokens": work.prompt,
            "response_tokens": work.response,
            "longest_response": work.longest,
            "dropped_groups": work.dropped,
        },
        "given": one(layout),
        "best": [one(best) for best in result.best],
        "refused": {why: list(names) for why, names in result.refused.items()},
    }


# phase of the record -> phases of the plan that it contains
MEASURED = {
    "rollout": ("sample", REFILLS),
    "old_stats": ("old log-probs", "log-probs of the weights that sampled", "reference log-probs"),
    "update": ("forward and backward", "gradients and weights over dp", "optimizer"),
    "sync": ("send weights", "change places"),
}


@dataclass(frozen=True)
class RecordedRun:
    """Means and medians of a run's later half; the first steps compile and warm up."""

    seconds: Mapping[str, float]  # median seconds by phase of the record, and `total`
    prompt: int
    response: int
    dropped: float  # share of the groups that were dropped as entirely right or entirely wrong


def read_run(path: Path, samples_per_prompt: int) -> RecordedRun:
    """Read the records of a run. Raises DataError if no step of its later half trained on anything."""
    records = read_metrics(path)
    later = [record for record in records[len(records) // 2 :] if record.get("rollout/kept_groups")]
    if not later:
        raise DataError(f"{path}: none of its later steps learned from a group; give the folder of a run that trains")

    def mean(key: str) -> float:
        return statistics.fmean(float(record.get(key) or 0.0) for record in later)

    tokens = statistics.fmean(float(r["tokens_per_second"] or 0.0) * float(r["seconds/total"] or 0.0) for r in later)
    response, sampled = mean("rollout/response_tokens_mean"), mean("rollout/sampled_groups")
    prompt = tokens / (mean("rollout/kept_groups") * samples_per_prompt) - response
    dropped = 1 - (mean("rollout/kept_groups") + mean("rollout/stale_groups")) / sampled if sampled else 0.0
    taken = {name: [_seconds(record, name) for record in later] for name in (*MEASURED, "total")}
    seconds = {name: statistics.median(values) for name, values in taken.items()}
    return RecordedRun(seconds, max(1, round(prompt)), max(1, round(response)), min(0.99, max(0.0, dropped)))


def _seconds(record: Mapping[str, float | int | None], name: str) -> float:
    names = ("old_stats", "reference") if name == "old_stats" else (name,)
    return sum(float(record.get(f"seconds/{each}") or 0.0) for each in names)


def calibrated(predictor: Predictor, run: RecordedRun) -> Predictor:
    """Return the predictor with the phases of the run: what it predicts for the run's own config are the run's seconds."""
    phases = replace(predictor, factors={}, beyond=0.0).step().phases
    factors: dict[str, float] = {}
    for name, parts in MEASURED.items():
        predicted = sum(phases[part] for part in parts)
        if predicted > 0 and (run.seconds[name] > 0 or name != "rollout"):
            factors |= dict.fromkeys(parts, run.seconds[name] / predicted)
    scaled = replace(predictor, factors=factors, beyond=0.0)
    extra = run.seconds["total"] - scaled.step().seconds
    share = replace(scaled, beyond=1.0).step().phases["beyond the phases"]
    return replace(scaled, beyond=extra / share)


# names of the sizes in a config.json
_FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip


def _dense(architecture: str, *sizes: int, **more: Any) -> dict[str, Any]:
    fields = dict(zip(_FIELDS, sizes, strict=True))
    return {"architectures": [architecture], **fields, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, **more}


def _hybrid(*sizes: int, value_heads: int) -> dict[str, Any]:
    """Return the config of a Qwen3.5, whose files hold a vision tower next to the text model."""
    text = _dense("Qwen3_5ForCausalLM", *sizes, head_dim=256, linear_num_value_heads=value_heads)
    return {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}


_QWEN2, _QWEN3, _LLAMA = "Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM"
# directory name of the Hugging Face repository -> its config.json, without keys that do not affect sizes
KNOWN: Mapping[str, Mapping[str, Any]] = {
    "Qwen2.5-7B": _dense(_QWEN2, 3584, 18944, 28, 28, 4, 152064, 131072),
    "DeepSeek-R1-Distill-Qwen-7B": _dense(_QWEN2, 3584, 18944, 28, 28, 4, 152064, 131072),
    "Qwen3-14B": _dense(_QWEN3, 5120, 17408, 40, 40, 8, 151936, 40960, head_dim=128),
    "Qwen3-32B": _dense(_QWEN3, 5120, 25600, 64, 64, 8, 151936, 40960, head_dim=128),
    "DeepSeek-R1-Distill-Llama-8B": _dense(_LLAMA, 4096, 14336, 32, 32, 8, 128256, 131072),
    "Llama-3.1-8B": _dense(_LLAMA, 4096, 14336, 32, 32, 8, 128256, 131072),
    "Llama-3.1-70B": _dense(_LLAMA, 8192, 28672, 80, 64, 8, 128256, 131072),
    "Mistral-7B-Instruct-v0.2": _dense("MistralForCausalLM", 4096, 14336, 32, 32, 8, 32000, 32768, sliding_window=None),
    "Qwen3-30B-A3B": _dense(
        "Qwen3MoeForCausalLM", 2048, 6144, 48, 32, 4, 151936, 40960,
        head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[],
    ),
    # the defaults of transformers 5.19 (its docstring: "Qwen3.5-9B style"), and the model card of Qwen/Qwen3.5-27B with the
    # config.json that repositories quote; every fourth layer has attention
    "Qwen3.5-9B": _hybrid(4096, 12288, 32, 16, 4, 248320, 262144, value_heads=32),
    "Qwen3.5-27B": _hybrid(5120, 17408, 64, 24, 4, 248320, 262144, value_heads=48),
}  # fmt: skip


def _without_rotary_frequencies(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    return {k: v for k, v in hf.items() if k not in ("rope_scaling", "rope_parameters")} | {"rope_theta": 1e4}


def read_model(path: str | Path) -> tuple[Family, Architecture]:
    """Return family and sizes of `model.path`, from its config.json if present, else from `KNOWN` by the directory's name.

    Rotary frequencies do not affect sizes and are left out. Raises ConfigError if the model is neither here nor known. Errors
    of the family's reader pass through.
    """
    try:
        hf: Mapping[str, Any] = read_config(path)
    except CheckpointError:
        name = Path(path).name
        if (Path(path) / "config.json").exists():
            raise
        if name not in KNOWN:
            raise ConfigError(
                f"model.path={path}: config.json is not there, and {name} is none of the models whose sizes are known: "
                f"{', '.join(KNOWN)}; copy that file to {path}/"
            ) from None
        hf = KNOWN[name]
    family = find_family(hf)
    field = family.text_config
    hf = _without_rotary_frequencies(hf) if field is None else {**hf, field: _without_rotary_frequencies(hf[field])}
    return family, family.architecture(hf)


# largest component of a state that does not fit -> fix
_FIXES = {
    "weights": "raise parallel.tp or parallel.pp",
    "gradients": "raise parallel.tp or parallel.pp",
    "optimizer": "raise parallel.dp, over which it is split, or parallel.tp, or set exp_avg_dtype and exp_avg_sq_dtype or "
    "optimizer_offload_fraction in megatron.optimizer",
    "activations": "lower training.max_tokens_per_microbatch, set training.recompute or training.offload_activations, or raise "
    "parallel.cp or parallel.tp with sequence_parallel",
    "logits and entropy": "set training.logits_budget_mib, or raise parallel.tp",
    "KV cache": "lower --gpu-memory-utilization in rollout.server.extra_args, or set rollout.colocate=true",
    "engine's weights": "raise rollout.server.tp",
}


@dataclass(frozen=True)
class PlanRequest:
    """The options of `tepo plan`."""

    gpus: int | None = None  # available GPUs. None: as many as the config needs.
    gpu: str = "H100"  # name in `GPUS`
    prompt: int | None = None  # mean tokens of a prompt. None: assumed (`inputs.py`).
    response: int | None = None  # mean tokens of a response. None: assumed.
    json_file: Path | None = None
    dropped: float | None = None  # share of the groups that are entirely right or entirely wrong. None: assumed.
    run: Path | None = None  # folder of a run whose recorded steps replace assumptions. None: there is none.


def predictor_of(cfg: Config, request: PlanRequest) -> Predictor:
    """Return the predictor of a config. Raises ConfigError if the GPU is not in the table. Errors of `read_model` and of
    `read_run` pass through.
    """
    if request.gpu not in GPUS:
        raise ConfigError(f"--gpu {request.gpu}: not in the table; use one of {', '.join(GPUS)}")
    if (path := request.run) is not None:  # calibrated with a run, which may have another config
        its_cfg = load_config(str(path / run_dir.CONFIG_FILE), [])
        run = read_run(path, its_cfg.rollout.samples_per_prompt)
        recorded = replace(request, run=None, prompt=run.prompt, response=run.response, dropped=run.dropped)
        corrected = calibrated(predictor_of(its_cfg, recorded), run)
        lengths = {name: getattr(request, name) for name in ("prompt", "response", "dropped")}
        asked = replace(recorded, **{name: value for name, value in lengths.items() if value is not None})
        return replace(predictor_of(cfg, asked), factors=corrected.factors, beyond=corrected.beyond)
    family, arch = read_model(cfg.model.path)
    packed: Attention = "sdpa" if cfg.model.precision == "fp32" else "packed"
    kernels = ON_CPU if cfg.platform == "cpu" else PlannedKernels(packed if cfg.model.attention == "sdpa" else "te")
    if cfg.training.shares_prompts(cfg.platform):
        kernels = replace(kernels, attention="packed")
    model = PlannedModel(family, arch, ELEMENT[cfg.model.dtype], recompute=cfg.training.recompute, kernels=kernels)
    return Predictor(cfg, model, GPUS[request.gpu], Workload.of(cfg, request.prompt, request.response, request.dropped))


def plan(predictor: Predictor, request: PlanRequest, tell: Callable[[str], None]) -> int:
    """Report what a config needs and how fast it would be.

    Returns:
        The exit status: 1 if the config does not fit, else 0.

    Raises:
        ConfigError: The config cannot be planned.
    """
    cfg, gpu, work = predictor.cfg, predictor.gpu, predictor.workload
    gpus = request.gpus or predictor.placement.gpus
    candidate = judge(predictor)
    fits = not candidate.why and predictor.placement.gpus <= gpus
    if candidate.why:
        verdict = refusal(candidate, candidate.why)
    elif not fits:
        needed = f"{predictor.placement.gpus} GPUs are needed, {gpus} are available"
        verdict = f"does not fit: {needed}; lower parallel.dp or rollout.servers, or take a layout from the list"
    else:
        verdict = f"fits: {candidate.fullest.total / GIB:.1f} of {gpu.memory / GIB:.1f} GiB of the fullest GPU"
    tell(f"{cfg.model.path}, {cfg.model.precision}, on {gpus} {gpu.name}; trainer and engine {predictor.placement.kind}")
    tell(f"given: {candidate.name}")
    assumed = "given" if request.prompt and request.response else "recorded" if request.run else "assumed"
    tell(f"{assumed}: prompts of {work.prompt} tokens, responses of {work.response} on average, {work.longest} at most")
    if work.dropped:
        asked, kept = work.rounds(cfg.rollout, cfg.objective)
        how = "given" if request.dropped is not None else "recorded" if request.run else "assumed"
        tell(
            f"{how}: {work.dropped:.0%} of the groups are dropped; {sum(asked)} are sampled in {len(asked)} rounds, {kept} kept"
        )
    for number, term in enumerate(cfg.reward.terms):
        if isinstance(term, JudgeTermConfig):
            tell(f"not counted: the GPUs and the seconds of the judge reward.terms[{number}] ({term.model})")
    if cfg.rollout.function is not None:
        tell(f"not counted: what rollout.function={cfg.rollout.function} takes besides sampling")
    if candidate.states:
        tell("\n" + "\n".join(memory_lines(candidate, gpu)))
        for name, size in host_bytes(cfg, predictor.model, work.response).items():
            tell(f"  of a machine's memory: {size / GIB:.1f} GiB, {name}")
    if candidate.step is not None:
        tell("\n" + "\n".join(time_lines(predictor, candidate.step)))
    result = search(predictor, gpus)
    tell("\n" + "\n".join(search_lines(result, gpus)))
    if request.json_file is not None:
        request.json_file.write_text(json.dumps(as_json(predictor, candidate, result, gpus), indent=1))
    tell("\n" + verdict)
    return int(not fits)


def refusal(candidate: LayoutCandidate, why: str) -> str:
    """Return why a layout does not fit, with the largest part of its memory and the fix."""
    if not candidate.states:
        return f"does not fit: {why}"
    state = candidate.fullest
    largest = state.largest
    fix = _FIXES.get(largest, "use more GPUs")
    return f"does not fit: {why}; the greatest part is {largest}, {state.parts[largest] / GIB:.1f} GiB: {fix}"
