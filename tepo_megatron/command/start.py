"""Run one training job from its checks to its end, also one that is resumed under its own config with some keys changed.

The checks are made before any process is started. Heavy imports are inside, where an interrupt is reported in one line.
"""

import contextlib
import difflib
import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from tepo_megatron.base.errors import ConfigError, escaped
from tepo_megatron.base.processes import WANTED, die_with_parent, raise_open_file_limit, reap
from tepo_megatron.command.launcher import ONE_MACHINE, Nodes, refuse_torchrun
from tepo_megatron.command.ranks import newest_step
from tepo_megatron.config import Config, RewardConfig, RolloutConfig
from tepo_megatron.config.io import differences, load_config, parse_overrides, plain
from tepo_megatron.engines.servers.client import CONTROL_CONNECTIONS
from tepo_megatron.monitor import run_dir
from tepo_megatron.monitor.run_dir import CONFIG_FILE

END_SECONDS = 5.0  # limit since SIGTERM to `tepo watch`: it holds nothing; then SIGKILL


def start(cfg: "Config", worker: str | None = None, watched: bool = False, nodes: Nodes = ONE_MACHINE) -> None:
    """Make one run, or this machine's part of it, in processes of its own and wait for it. `preflight` has checked it.

    Args:
        worker: Module that a rank runs. None: the one that trains.
    Raises:
        TepoError: It is also written to the run's log.txt.
    """
    from tepo_megatron.command.launcher import RanksFailed, launch

    refuse_torchrun()
    launched: Callable[..., None] = functools.partial(launch, cfg, nodes=nodes)
    if worker is not None:
        launched = functools.partial(launched, worker=worker, service=())
    if not nodes.is_first:
        launched()
        return
    page = live_page(cfg.run_dir, lambda text: print(text, flush=True)) if watched else contextlib.nullcontext()
    with run_dir.claim(cfg) as lock, page:
        try:
            launched(inherit=[lock.file])
        except RanksFailed as e:
            if lock.holds():  # otherwise the folder belongs to another run, or is gone
                with contextlib.suppress(OSError), (cfg.run_dir / "log.txt").open("a") as log:  # the disk may be at fault
                    log.write(f"error: {escaped(str(e))}\n")
            raise


@contextlib.contextmanager
def live_page(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Serve the live page of a run inside of the block. If the page cannot be served, it says so, and the block goes on."""
    page = subprocess.Popen(
        [sys.executable, "-m", "tepo_megatron", "watch", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the run, which then ends the page
        preexec_fn=functools.partial(die_with_parent, os.getpid()),
    )
    assert page.stdout is not None
    threading.Thread(target=_tell, args=(page.stdout, say), daemon=True).start()
    try:
        yield
    finally:
        page.terminate()
        try:
            page.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            page.kill()
            reap(page)


def _tell(output: IO[str], say: Callable[[str], None]) -> None:
    """Say the URL, which is the first line, and read on until the page ends."""
    url = output.readline().strip()
    if url:
        say(f"live page until the run ends, for this machine alone: {url}")
    output.read()


# Measured on a CPU (gloo, torch 2.13, vLLM 0.32): with vLLM and 2 ranks (tp 2) rank 0
# has at most 138 open files and rank 1 116; with a scripted engine and 4 ranks (tp 2, dp 2) 145 and 136. That is 10 per rank
# plus 118. vLLM's API server has 40 with few requests, its engine 74, a grader 5. NCCL was not measured.
_BASE = 160
_PER_RANK = 12  # gloo connections, one in each process group
_PER_WORKER = 3  # pipes of a grading worker


def preflight(cfg: Config, lengths: Mapping[str, int] | None = None) -> None:
    """Make every check that is possible before a process is started. Raises a TepoError.

    Args:
        lengths: The most tokens of a sequence by the keys that add up to it; None: those of RL.
    """
    from tepo_megatron.actor.layout import check_layout, check_shared_prompts
    from tepo_megatron.actor.passed_fields import check_passed_fields
    from tepo_megatron.actor.precision import check_shapes
    from tepo_megatron.data.prompts import check_rows
    from tepo_megatron.engines.engines import (
        check_experts,
        check_heads,
        check_linear_attention,
        check_truncation,
        replayed_routing,
    )
    from tepo_megatron.engines.servers.environment import check_cache
    from tepo_megatron.evaluation.benchmarks import check_sources
    from tepo_megatron.models.families import check_tokenizer, find_family, read_config
    from tepo_megatron.models.hf_io import HfReader, check_positions
    from tepo_megatron.rewards.build import check_reward
    from tepo_megatron.rollout.custom import load_function
    from tepo_megatron.service.method import resolve

    check_open_files(needed_open_files(cfg.parallel.world_size, cfg.rollout, cfg.reward))
    resolve(cfg)
    check_sources(cfg.evaluation)
    if cfg.rollout.function is not None:
        load_function(cfg.rollout.function)
    check_reward(cfg.reward)
    hf_config = read_config(cfg.model.path)
    family = find_family(hf_config)
    architecture = family.architecture(hf_config)
    check_positions(family, hf_config, cfg.lengths if lengths is None else lengths)
    if lengths is None:
        check_cache(cfg.rollout, Path(cfg.model.path), cfg.model.dtype, cfg.lengths)
    check_layout(architecture, cfg.parallel)
    check_shared_prompts(architecture, cfg.training)
    check_shapes(architecture, cfg.model, cfg.parallel, cfg.megatron.bf16_layers)
    check_passed_fields(cfg.megatron)
    check_heads(cfg.rollout, architecture.num_heads)
    check_experts(cfg.rollout, cfg.model.path)
    check_linear_attention(cfg.rollout, cfg.model.path, cfg.platform)
    replayed_routing(cfg.rollout, cfg.model.path, cfg.platform)
    check_truncation(cfg.rollout, architecture.vocab_size)
    check_tokenizer(cfg.model.path, architecture.vocab_size)
    HfReader(cfg.model.path)
    if (reference := cfg.objective.reference_path) is not None:
        hf_config = read_config(reference)
        if find_family(hf_config).architecture(hf_config) != architecture:
            raise ConfigError(f"objective.ref_kl.path={reference} has another architecture than model.path={cfg.model.path}")
        HfReader(reference)
    for source in (*cfg.data.sets, *cfg.data.held_out) if lengths is None and cfg.rollout.replay is None else ():
        check_rows(source, cfg.data)


def needed_open_files(ranks: int, rollout: RolloutConfig, reward: RewardConfig) -> int:
    """Return how many files, pipes and connections one process of the run must be able to open, with one request per server.

    With a limit that is too low for `rollout.server.concurrency` requests per server, the run sends fewer (`ServerPool`), and
    where it is too low for all agents of a step, fewer run at once (`CustomRollouts`).
    """
    requests = rollout.servers * (1 + CONTROL_CONNECTIONS)
    return _BASE + requests + _PER_RANK * ranks + _PER_WORKER * reward.workers * len(reward.terms)


def check_open_files(needed: int) -> None:
    """Raise this process's limit of open files as far as is useful; child processes inherit it. Raises ConfigError if the hard
    limit is lower than `needed`.
    """
    if (limit := raise_open_file_limit(max(needed, WANTED))) < needed:
        raise ConfigError(
            f"a process may open {limit} files here, and this run needs {needed}; raise the limit (`ulimit -n {needed}`), or "
            "lower rollout.servers or reward.workers"
        )


_OF_A_START = ("name", "output", "resume", "overwrite")
_PLACE = ("seed", "data.shuffle", "rollout.prompts_per_step", "sft.batch_sequences")  # they decide who is in which batch


def config_of(run_dir: Path) -> Path:
    """Return the path of the config of a run. Raises ConfigError with the runs of nearly this name if there is none."""
    if (saved := run_dir / CONFIG_FILE).is_file():
        return saved
    folders = [Path("runs"), run_dir.parent]
    runs = list(dict.fromkeys(path.parent for folder in folders for path in sorted(folder.glob(f"*/{CONFIG_FILE}"))))
    near = difflib.get_close_matches(run_dir.name, [run.name for run in runs], n=3)
    named = [str(run) for run in runs if run.name in near]
    fix = f"did you mean {' or '.join(named)}?" if named else f"the runs are: {', '.join(map(str, runs[-5:])) or 'none'}"
    raise ConfigError(f"{run_dir}: no run is there, because it has no {CONFIG_FILE}; {fix}")


def words_of(run_dir: Path, words: Sequence[str]) -> list[str]:
    """Return the overrides with which a run goes on in its folder, wherever that is now. Raises ConfigError for words that
    would have it go on elsewhere.
    """
    if own := [key for key, _ in parse_overrides(list(words)) if key in _OF_A_START]:
        raise ConfigError(f"--{own[0]}: tepo resume goes on in the folder of the run; remove it, or use tepo train")
    output = run_dir.parent if run_dir.name else run_dir.absolute().parent
    quoted = [json.dumps(text) for text in (run_dir.absolute().name, str(output))]
    return ["--name", quoted[0], "--output", quoted[1], "--resume", "true", "--overwrite", "false", *words]


def announcement(run_dir: Path, words: Sequence[str]) -> list[str]:
    """Return lines that say where a run goes on, and what `words` change. Raises ConfigError for what cannot be changed."""
    before, after = (plain(load_config(run_dir / CONFIG_FILE, list(changed))) for changed in ((), words))
    step = newest_step(run_dir / "checkpoints")
    place = f"goes on after step {step}" if step else "starts over, because no checkpoint is complete"
    lines = [f"{run_dir}: {place}"]
    shorter = after["training"]["steps"] < before["training"]["steps"]
    meanings = {"training.steps": ": the run becomes shorter" if shorter else "", "sft.data": ": the same rows are expected"}
    for change in differences(before, after):
        key = change.partition(" was ")[0]
        if step and key in _PLACE:
            raise ConfigError(f"{change}: its place in the data would be another one; leave it out, or start a new run")
        if key.startswith("parallel."):
            meanings[key] = ": another layout; numbers go on up to rounding"
        elif key.startswith("data.train"):
            meanings[key] = meanings["sft.data"]
        lines += [change + meanings.get(key, "")] if key not in _OF_A_START else []
    return lines
