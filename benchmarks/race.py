"""Race `make smollm` against TRL's GRPOTrainer: the same model, task, prompts, samples, lengths, optimizer steps and cores.

    python -m benchmarks.race --peers .cache/peers [--steps 2] [--repeats 3] [--out benchmarks/results/race.json]

A batch is 8 prompts x 8 samples of at most 10 tokens at temperature 1, learned from in 2 optimizer steps, with a sequence ratio
and the mean over tokens. Groups without an advantage are kept, which TRL cannot drop. Both sides use fp32 and all cores: TRL in
one process with its own generation (its vLLM mode supports vLLM up to 0.31), ours as `examples/reasoning_gym.yaml` says, but on
one rank. The contestants take turns, and the first batch of each, which warms up, is not counted. Memory is the largest sum of
proportional set sizes over the processes of a contestant.
"""

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.results import ROOT, surroundings
from tepo_megatron.config import Config
from tepo_megatron.config.io import load_config

CONFIG = ROOT / "examples" / "reasoning_gym.yaml"
POLL_SECONDS = 1.0  # not a limit: between two looks at the memory
SAME = (
    "--rollout.prompts_per_step",
    "8",
    "--rollout.filter_uniform_groups",
    "false",
    "--evaluation.every",
    "0",
    "--data.eval",
    "null",
)


@dataclass(frozen=True)
class Lap:
    """One contestant's run: seconds of each batch but the first, and the memory by program, in GiB, when it was largest."""

    batches: list[float]
    programs: dict[str, float]

    @property
    def memory(self) -> float:
        return sum(self.programs.values())


def ours(steps: int, folder: Path, peers: Path) -> Lap:
    """Take the batches with `tepo train`."""
    words = ["-m", "tepo_megatron", "train", str(CONFIG), "--name", "race", "--output", str(folder), *SAME]
    words += ["--training.steps", str(steps), "--rollout.record", "false", "--export_hf", "false", "--parallel.dp", "1"]
    programs = _peak([sys.executable, *words], dict(os.environ), folder / "ours.txt")
    records = [json.loads(line) for line in (folder / "race" / "metrics.jsonl").read_text().splitlines()]
    return Lap([record["seconds/total"] for record in records[1:]], programs)


def trl(steps: int, folder: Path, peers: Path) -> Lap:
    """Take the batches with GRPOTrainer."""
    out = folder / "trl.json"
    words = [sys.executable, "-m", "benchmarks.race", "--steps", str(steps), "--peers", str(peers), "--trl", str(out)]
    programs = _peak(words, os.environ | {"HF_HUB_OFFLINE": "1"}, folder / "trl.txt")
    return Lap(json.loads(out.read_text())[1:], programs)


CONTESTANTS: dict[str, Callable[[int, Path, Path], Lap]] = {"ours": ours, "trl": trl}


def _peak(command: Sequence[str], env: dict[str, str], log: Path) -> dict[str, float]:
    """Run a command, and return the memory of its programs when it was largest. Raise RuntimeError with its last words."""
    peak: Counter[str] = Counter()
    ended = threading.Event()

    def watch(process: psutil.Process) -> None:
        nonlocal peak
        while not ended.wait(POLL_SECONDS):
            now: Counter[str] = Counter()
            for each in [process, *process.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):  # it has ended
                    words = each.cmdline()
                    program = words[words.index("-m") + 1] if "-m" in words else Path(" ".join(words[:2])).name
                    now[program] += each.memory_full_info().pss
            peak = max(peak, now, key=Counter.total)

    with log.open("w") as out, subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out) as started:
        thread = threading.Thread(target=watch, args=(psutil.Process(started.pid),))
        thread.start()
        status = started.wait()
        ended.set()
        thread.join()
    if status:
        raise RuntimeError(f"{' '.join(command)} failed:\n" + "\n".join(log.read_text().splitlines()[-20:]))
    return {program: size / 2**30 for program, size in peak.most_common()}


def run_trl(steps: int) -> list[float]:
    """Return the seconds of each batch of GRPOTrainer, with the settings of the config in TRL's words."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from tepo_megatron.data import load_data
    from tepo_megatron.rewards.grading.reasoning_gym import grader

    cfg = load_config(CONFIG, list(SAME))
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokenizer = AutoTokenizer.from_pretrained(cfg.model.path)
    ((prompts, _),) = load_data(cfg.data, cfg.reward, tokenizer).train
    rows = [{"prompt": tokenizer.decode(p.token_ids), "source": p.meta["source"], "place": p.meta["place"]} for p in prompts]
    assert tokenizer(rows[0]["prompt"])["input_ids"] == list(prompts[0].token_ids), "TRL would learn from other prompts"
    grade = grader("number", "all")

    def reward(prompts: list[str], completions: list[str], source: list[str], place: list[int], **_: Any) -> list[float]:
        return [grade(s, str(p), text)[1] for s, p, text in zip(source, place, completions, strict=True)]

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            cfg.model.path,
            reward,
            args=GRPOConfig(**_settings(cfg, steps), output_dir=folder),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        minibatches, ends = _minibatches(cfg), [time.monotonic()]

        class Timer(TrainerCallback):
            def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
                ends[0] = time.monotonic()

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step % minibatches == 0:
                    ends.append(time.monotonic())

        trainer.add_callback(Timer())
        trainer.train()
    return [after - before for before, after in itertools.pairwise(ends)]


def _minibatches(cfg: Config) -> int:
    return cfg.rollout.prompts_per_step // cfg.training.minibatch_prompts


def _settings(cfg: Config, steps: int) -> dict[str, Any]:
    samples = cfg.rollout.samples_per_prompt
    return {
        "per_device_train_batch_size": cfg.training.minibatch_prompts * samples,
        "steps_per_generation": _minibatches(cfg),
        "num_generations": samples,
        "max_completion_length": cfg.rollout.max_response_tokens,
        "max_steps": steps * _minibatches(cfg),
        "temperature": cfg.rollout.temperature,
        "learning_rate": cfg.optimizer.lr,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.99,
        "max_grad_norm": 1.0,
        "importance_sampling_level": "sequence",
        "loss_type": "dapo",  # the mean over tokens
        "epsilon": 0.2,
        "beta": 0.0,  # TEPO's penalty is towards the old policy, and costs no pass of its own
        "seed": cfg.seed,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "model_init_kwargs": {"dtype": "float32"},
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }


def main() -> None:
    """Run the race, print the table, and write the laps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=ROOT / ".cache" / "peers", help="folder of requirements/bench.txt")
    parser.add_argument("--steps", type=int, default=2, help="batches of a run; the first is not counted")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "race.json")
    parser.add_argument("--trl", type=Path, help=argparse.SUPPRESS)  # internal: be TRL in this process
    args = parser.parse_args()
    if args.trl:
        sys.path.append(str(args.peers))  # behind the packages of this environment
        args.trl.write_text(json.dumps(run_trl(args.steps)))
        return
    cfg = load_config(CONFIG, list(SAME))
    samples = cfg.rollout.prompts_per_step * cfg.rollout.samples_per_prompt
    laps: dict[str, list[Lap]] = {name: [] for name in CONTESTANTS}
    for repeat in range(args.repeats):
        for name, run in CONTESTANTS.items():
            with tempfile.TemporaryDirectory() as folder:
                laps[name].append(run(args.steps, Path(folder), args.peers.resolve()))
            lap = laps[name][-1]
            print(f"{repeat + 1}/{args.repeats} {name}: {_of(lap, samples)}", flush=True)
    ratios = [_rate(a, samples) / _rate(b, samples) for a, b in zip(laps["ours"], laps["trl"], strict=True)]
    print(f"samples per second, ours over TRL's, by repeat: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")
    result = {name: [vars(lap) for lap in each] for name, each in laps.items()}
    args.out.write_text(json.dumps({"samples": samples, "laps": result, "ratios": ratios} | surroundings(), indent=1) + "\n")


def _rate(lap: Lap, samples: int) -> float:
    return samples / statistics.median(lap.batches)


def _of(lap: Lap, samples: int) -> str:
    seconds = ", ".join(f"{s:.1f}" for s in lap.batches)
    return f"{seconds} s per batch, {_rate(lap, samples):.2f} samples/s, {lap.memory:.1f} GiB"


if __name__ == "__main__":
    main()
