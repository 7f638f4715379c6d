"""Run one small step of the run itself and discard it: with real ranks, real servers and real grading."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tepo_megatron.config import Config
from tepo_megatron.doctor.findings import Finding
from tepo_megatron.monitor import run_dir
from tepo_megatron.monitor.sinks import read_metrics

MOST_PROMPTS = 8
NEAR = 0.3  # share of sync.max_logprob_diff
EXACT = 1e-5  # nats, in fp32


def trial_of(cfg: Config, folder: Path) -> Config:
    """Return a config for one step of few prompts, with checksums and the noise floor; everything else is as in the run."""
    prompts = min(MOST_PROMPTS, cfg.rollout.prompts_per_step)
    updates = cfg.rollout.prompts_per_step // cfg.training.minibatch_prompts
    return replace(
        cfg,
        name="trial",
        output=str(folder),
        overwrite=True,
        resume=False,
        export_hf=False,
        data=replace(cfg.data, eval=None),
        evaluation=replace(cfg.evaluation, every=0),
        rollout=replace(
            cfg.rollout, prompts_per_step=prompts, filter_uniform_groups=False, max_generation_rounds=1, record=False
        ),
        training=replace(cfg.training, steps=1, minibatch_prompts=max(1, prompts // updates)),
        sync=replace(cfg.sync, verify_every=1),
        checkpoint=replace(cfg.checkpoint, every=0),
        logging=replace(cfg.logging, noise_floor_every=1, tensorboard=False, wandb_project=None),
    )


def ranks(cfg: Config, launch: Callable[..., None]) -> Iterator[Finding]:
    """Yield the speed of the ranks' all-reduces, which also shows that the ranks can connect."""
    if cfg.parallel.world_size == 1:
        return
    from tepo_megatron.doctor.ranks import RESULT

    with _output_in(cfg.run_dir.with_suffix(".txt")), run_dir.claim(cfg):
        launch(cfg, worker="tepo_megatron.doctor.ranks", service=())
    bandwidths = json.loads((cfg.run_dir / RESULT).read_text())
    speeds = ", ".join(f"{axis} {speed / 1e9:.2g} GB/s" for axis, speed in bandwidths.items())
    yield Finding("all-reduce", "pass", f"{cfg.parallel.world_size} ranks; {speeds}")


def step(cfg: Config, start: Callable[[Config], None]) -> Iterator[Finding]:
    """Yield findings of one step: engine, weights, samples and the noise of dH."""
    with _output_in(cfg.run_dir.with_suffix(".txt")):
        start(cfg)
    record = read_metrics(cfg.run_dir)[0]
    yield Finding("engine", "pass", f"{cfg.rollout.engine} started, sampled, and took the weights with their checksums")
    exact = cfg.model.precision == "fp32" and cfg.rollout.server.precision in (None, "fp32")
    sampled = f"temperature {cfg.rollout.temperature:g}, top_k {cfg.rollout.top_k}, top_p {cfg.rollout.top_p:g}"
    yield _log_probs(record, sampled, cfg.sync.max_logprob_diff, exact=exact)
    yield _samples(record, cfg.rollout.max_response_tokens)
    yield _noise(record)
    phases = ", ".join(f"{name.removeprefix('seconds/')} {record[name]:.1f}" for name in sorted(record) if "seconds/" in name)
    yield Finding("seconds", "pass", f"of a step with {cfg.rollout.prompts_per_step} prompts: {phases}")


def _log_probs(record: Mapping[str, Any], sampled: str, limit: float, *, exact: bool) -> Finding:
    mean, worst = record["rollout/logprob_diff_mean"], record["rollout/logprob_diff_max"]
    state = f"|rollout - actor| at {sampled}: mean {mean:.1e}, largest {worst:.1e} nats; "
    state += f"the run stops above {limit:g}"
    if mean > (EXACT if exact else NEAR * limit):
        return Finding("log-probs", "warn", state, "objective.correction corrects for it; in fp32 it should be rounding alone")
    return Finding("log-probs", "pass", state)


def _samples(record: Mapping[str, Any], max_response_tokens: int) -> Finding:
    accuracy, cut = record["accuracy/mean"], record["rollout/truncated"]
    state = f"{accuracy:.1%} right, {cut:.1%} cut off, {record['rollout/response_tokens_mean']:.0f} tokens in the mean"
    if cut > 0.5:
        return Finding("samples", "warn", state, f"raise rollout.max_response_tokens={max_response_tokens}")
    if accuracy in (0.0, 1.0):
        return Finding("samples", "warn", state, "groups with equal scores have no advantage: check prompts and answers")
    return Finding("samples", "pass", state)


def _noise(record: Mapping[str, Any]) -> Finding:
    floor, below = record.get("tepo/entropy_noise_floor"), record.get("tepo/mask_below_noise")
    if floor is None or below is None:
        return Finding("noise of dH", "skip", "there is no separate pass for the old statistics, so it cannot be measured")
    state = f"{floor:.1e} nats; {below:.1%} of the tokens with a KL penalty have a smaller dH"
    return Finding("noise of dH", "warn" if below > 0.1 else "pass", state)


@contextlib.contextmanager
def _output_in(path: Path) -> Iterator[None]:
    """Redirect the output of this process and its children to a file, because a step prints much that is no finding."""
    sys.stdout.flush()
    before = os.dup(1)
    try:
        with path.open("ab") as file:
            os.dup2(file.fileno(), 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(before, 1)
        os.close(before)
