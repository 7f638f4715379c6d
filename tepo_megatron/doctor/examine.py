"""`tepo doctor`: find out whether a run can work before it costs anything.

At the end one small step of the run itself is made and discarded: with real ranks, real servers and real grading.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tepo_megatron.base.scratch import PrivateFolder
from tepo_megatron.config import Config, RolloutConfig
from tepo_megatron.config.io import plain, validate
from tepo_megatron.data import load_tokenizer
from tepo_megatron.doctor import machine, model
from tepo_megatron.doctor.findings import Finding, found_by
from tepo_megatron.monitor import run_dir
from tepo_megatron.monitor.sinks import read_metrics
from tepo_megatron.trainer.sft.conversations import load_all
from tepo_megatron.trainer.sft.settings import supervised


def examine(
    cfg: Config, check: Callable[..., None], start: Callable[[Config], None], launch: Callable[..., None], quick: bool
) -> Iterator[Finding]:
    """Yield findings about a run as they are made, cheap checks first."""

    def config() -> Iterator[Finding]:
        check(cfg)
        yield Finding(
            "config", "pass", f"{cfg.model.path} on {cfg.parallel.world_size} {cfg.platform} ranks, {cfg.rollout.engine}"
        )

    def conversations() -> Iterator[Finding]:
        """Read the data of `tepo sft`, if the config has a section for it."""
        if cfg.sft.data is None:
            return
        supervised_cfg = validate(supervised(plain(cfg)))
        check(supervised_cfg, {"sft.max_tokens": cfg.sft.max_tokens})
        tokenizer = load_tokenizer(cfg.model.path)
        for loaded in load_all(cfg.sft, cfg.data, cfg.model.path, tokenizer, cfg.rollout.stop_token_ids):
            yield Finding("conversations", "pass", loaded.line)

    failed, world_size = False, cfg.parallel.world_size
    kernels = partial(machine.kernels, cfg.model, cfg.megatron, cfg.platform, cfg.parallel.cp)
    for name, look in (
        ("packages", machine.packages),
        ("kernels", partial(kernels, cfg.training.offload_activations)),
        ("linear kernels", partial(machine.linear_kernels, cfg.model, cfg.platform)),
        ("megatron", partial(machine.passed_fields, cfg.megatron)),
        ("cuDNN", partial(machine.cudnn, cfg.platform, os.environ)),
        ("config", config),
        ("processors", partial(machine.processors, cfg.platform, world_size, cfg.rollout)),
        ("memory", partial(machine.memory, cfg.model, cfg.sync, replays=cfg.rollout.replay is not None)),
        ("disk", partial(machine.disk, Path(cfg.output), cfg.model, cfg.checkpoint, exports=cfg.export_hf)),
        ("conversion", partial(model.conversion, cfg.model.path, cfg.parallel.tp)),
        ("tokenizer", partial(model.tokenizer, cfg.model.path, cfg.data, cfg.rollout.stop_token_ids)),
        ("data", partial(model.data, cfg.model.path, cfg.data, cfg.reward, cfg.rollout.prompts_per_step)),
        ("conversations", conversations),
    ):
        for finding in found_by(name, look):
            failed |= finding.verdict == "fail"
            yield finding
    enough = machine.enough_devices(cfg.platform, world_size, cfg.rollout)
    if why := _why_no_step(cfg.rollout, enough, failed, quick):
        yield Finding("a step", "skip", why)
        return
    Path(cfg.output).mkdir(parents=True, exist_ok=True)
    with PrivateFolder.create("doctor", Path(cfg.output)) as folder:
        small = trial_of(cfg, folder.path)
        yield from found_by("all-reduce", partial(ranks, small, launch))
        yield from found_by("a step", partial(step, small, start))


def _why_no_step(rollout: RolloutConfig, enough_devices: bool, failed: bool, quick: bool) -> str:
    if quick:
        return "left out (--quick)"
    if failed:
        return "not tried: fix the above first"
    if rollout.replay is not None or rollout.only:
        return "not tried: rollout.replay and rollout.only do not run a whole step"
    if not enough_devices:
        return "not tried: it needs more GPUs than this machine has"
    return ""


def print_findings(findings: Iterable[Finding]) -> int:
    """Print findings as they are made, and their count. Return the exit status: 1 if a check failed, else 0."""
    count = {"pass": 0, "warn": 0, "fail": 0, "skip": 0}
    for finding in findings:
        count[finding.verdict] += 1
        print(finding, flush=True)
    print(", ".join(f"{number} {verdict}" for verdict, number in count.items() if number))
    return 1 if count["fail"] else 0


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
    state = f"mean score {accuracy:.1%}, {cut:.1%} cut off, {record['rollout/response_tokens_mean']:.0f} tokens in the mean"
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
