"""`tepo doctor`: find out whether a run can work before it costs anything."""

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from tepo_megatron.base.scratch import PrivateFolder
from tepo_megatron.config import Config, RolloutConfig
from tepo_megatron.config.io import plain, validate
from tepo_megatron.data import load_tokenizer
from tepo_megatron.doctor import machine, model, trial
from tepo_megatron.doctor.findings import Finding, found_by
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

    failed, ranks = False, cfg.parallel.world_size
    kernels = partial(machine.kernels, cfg.model, cfg.megatron, cfg.platform, cfg.parallel.cp)
    for name, look in (
        ("packages", machine.packages),
        ("kernels", partial(kernels, cfg.training.offload_activations)),
        ("linear kernels", partial(machine.linear_kernels, cfg.model, cfg.platform)),
        ("megatron", partial(machine.passed_fields, cfg.megatron)),
        ("cuDNN", partial(machine.cudnn, cfg.platform, os.environ)),
        ("config", config),
        ("processors", partial(machine.processors, cfg.platform, ranks, cfg.rollout)),
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
    enough = machine.enough_devices(cfg.platform, ranks, cfg.rollout)
    if why := _why_no_step(cfg.rollout, enough, failed, quick):
        yield Finding("a step", "skip", why)
        return
    Path(cfg.output).mkdir(parents=True, exist_ok=True)
    with PrivateFolder.create("doctor", Path(cfg.output)) as folder:
        small = trial.trial_of(cfg, folder.path)
        yield from found_by("all-reduce", partial(trial.ranks, small, launch))
        yield from found_by("a step", partial(trial.step, small, start))


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
