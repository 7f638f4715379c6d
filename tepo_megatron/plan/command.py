"""The command `tepo plan CONFIG`."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tepo_megatron.config import Config
from tepo_megatron.config.io import load_config
from tepo_megatron.config.judge import JudgeTermConfig
from tepo_megatron.errors import ConfigError
from tepo_megatron.observability import run_dir
from tepo_megatron.plan.activations import ON_CPU, Attention, PlannedKernels
from tepo_megatron.plan.gpus import GIB, GPUS
from tepo_megatron.plan.memory import host_bytes
from tepo_megatron.plan.memory_parts import ELEMENT, PlannedModel
from tepo_megatron.plan.models import read_model
from tepo_megatron.plan.recorded import calibrated, read_run
from tepo_megatron.plan.roofline import Predictor
from tepo_megatron.plan.search import LayoutCandidate, judge, search
from tepo_megatron.plan.tables import as_json, memory_lines, search_lines, time_lines
from tepo_megatron.plan.workload import Workload

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
    prompt: int | None = None  # mean tokens of a prompt. None: assumed (`workload.py`).
    response: int | None = None  # mean tokens of a response. None: assumed.
    json_file: Path | None = None
    dropped: float | None = None  # share of the groups that are entirely right or entirely wrong. None: assumed.
    run: Path | None = None  # folder of a run whose recorded steps replace assumptions. None: there is none.


def predictor_of(cfg: Config, request: PlanRequest) -> Predictor:
    """Return the predictor of a config.

    Raises:
        ConfigError: The GPU is not in the table. Errors of `read_model` and of `read_run` pass through.
    """
    if request.gpu not in GPUS:
        raise ConfigError(f"--gpu {request.gpu}: not in the table; use one of {', '.join(GPUS)}")
    if (path := request.run) is not None:  # calibrated with a run, which may have another config
        its_cfg = load_config(str(path / run_dir.CONFIG_FILE), [])
        run = read_run(path, its_cfg.rollout.samples_per_prompt)
        recorded = replace(request, run=None, prompt=run.prompt, response=run.response, dropped=run.dropped)
        corrected = calibrated(predictor_of(its_cfg, recorded), run)
        given = {name: getattr(request, name) for name in ("prompt", "response", "dropped")}
        asked = replace(recorded, **{name: value for name, value in given.items() if value is not None})
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
    given = judge(predictor)
    why = given.why
    if not why and predictor.placement.gpus > gpus:
        why = f"{predictor.placement.gpus} GPUs are needed, {gpus} are available"
    tell(f"{cfg.model.path}, {cfg.model.precision}, on {gpus} {gpu.name}; trainer and engine {predictor.placement.kind}")
    tell(f"given: {given.name}")
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
    if given.states:
        tell("\n" + "\n".join(memory_lines(given, gpu)))
        for name, size in host_bytes(cfg, predictor.model, work.response).items():
            tell(f"  of a machine's memory: {size / GIB:.1f} GiB, {name}")
    if given.step is not None:
        tell("\n" + "\n".join(time_lines(predictor, given.step)))
    result = search(predictor, gpus)
    tell("\n" + "\n".join(search_lines(result, gpus)))
    if request.json_file is not None:
        request.json_file.write_text(json.dumps(as_json(predictor, given, result, gpus), indent=1))
    if why:
        tell("\n" + refusal(given, why))
    return int(bool(why))


def refusal(given: LayoutCandidate, why: str) -> str:
    """Return why a layout does not fit, with the largest part of its memory and the fix."""
    if not given.states:
        return f"does not fit: {why}"
    state = given.fullest
    largest = state.largest
    fix = _FIXES.get(largest, "use more GPUs")
    return f"does not fit: {why}; the greatest part is {largest}, {state.parts[largest] / GIB:.1f} GiB: {fix}"
