"""Build the demo's base model: a tiny Qwen3 or Qwen3.5 that can work out an arithmetic problem, but mostly guesses.

    python -m examples.arithmetic.base_model --seed 0 --out runs/base-model-seed0
    python -m examples.arithmetic.base_model --model qwen3_5 --out runs/base-model-qwen3_5

Both phases are runs of `tepo sft`. Phase A teaches worked solutions until those of held-out problems have a probability of 50 %
in the geometric mean. Phase B then spoils the model on purpose: 70 % of the targets are unworked guesses. The model keeps a
latent skill that is sampled too rarely to help, and that the reward can bring back. The folder holds the model and tokenizer in
Hugging Face format, `train.jsonl` and `eval.jsonl`. Its subfolder `teacher` holds the model of phase A, the teacher of
`make distill`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# OpenMP reads these when torch loads. Threads that wait must leave the cores to others, but not at once: without
# those few microseconds of spinning two threads are hardly faster than one.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3_5TextConfig,
    Qwen3Config,
)
from transformers.utils.logging import disable_progress_bar

from examples.arithmetic import task
from tepo_megatron.base.errors import DataError, TepoError

MARKER = "build.json"  # written last
WORKED = "worked"  # run of phase A
TEACHER = "teacher"  # folder of its model
THREADS = 2
MAX_TOKENS = 128  # of a prompt with its solution
LAYOUT = ("--parallel.tp", "1", "--parallel.dp", "2")
MAX_RESPONSE_TOKENS = 48
CONFIG = Path(__file__).parents[1] / "demo.yaml"  # `tepo sft` reads the file of the training that comes afterwards


@dataclass(frozen=True)
class Settings:
    """The settings that determine the folder's content, in addition to the source of this package."""

    seed: int = 0
    model: str = "qwen3"  # a key of MODELS
    max_operations: int = task.OPERATIONS[-1]  # problems have 2 steps to this number, all equally likely
    train_problems: int = 4096
    eval_problems: int = 256
    check_problems: int = 128  # held out of training and evaluation: they decide when phase A ends
    batch_size: int = 32
    demonstrations: int = 24_000  # worked solutions of phase A
    skill: float = 0.5  # geometric mean of the probabilities of held-out solutions that ends phase A
    check_every: int = 25
    max_skill_steps: int = 2400  # four operations take about 600, eight about 1500
    skill_lr: float = 2e-3
    warmup_steps: int = 20
    hasty_steps: int = 40
    hasty_lr: float = 5e-4
    hasty_share: float = 0.7

    @property
    def operations(self) -> range:
        """The numbers of steps that problems have."""
        return range(task.OPERATIONS[0], self.max_operations + 1)

    def fingerprint(self) -> str:
        """Return a hash that changes when a setting or the source changes."""
        source = [Path(__file__).read_bytes(), Path(task.__file__).read_bytes()]
        return hashlib.sha256(b"".join([json.dumps(asdict(self)).encode(), *source])).hexdigest()


# What the models have in common, and what their families add. A Qwen3 has 599,104 parameters, and a Qwen3.5 has 652,304.
SHAPE = {
    "vocab_size": task.VOCABULARY_SIZE, "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True, "max_position_embeddings": 512, "dtype": "float32",
}  # fmt: skip
LINEAR_HEADS = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
MODELS: Mapping[str, Callable[..., PreTrainedConfig]] = {
    "qwen3": lambda **special: Qwen3Config(**SHAPE, num_hidden_layers=3, **special),
    # two layers with the gated delta rule and one with attention
    "qwen3_5": lambda **special: Qwen3_5TextConfig(
        **SHAPE, **LINEAR_HEADS, num_hidden_layers=3, full_attention_interval=3, **special
    ),
}


def build_model(tokenizer: PreTrainedTokenizerBase, kind: str = "qwen3") -> PreTrainedModel:
    """Return an untrained model, fp32.

    Args:
        tokenizer: Its tokenizer.
        kind: A key of MODELS.
    """
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = AutoModelForCausalLM.from_config(MODELS[kind](**special))
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, **special)
    return model


@torch.no_grad()
def sampled_accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problems: Sequence[task.ArithmeticProblem]
) -> float:
    """Return the share of problems that are solved by one sample at temperature 1.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        problems: The problems.
    """
    prompts = tokenizer([p.prompt for p in problems], padding=True, padding_side="left", return_tensors="pt")
    tokens = model.generate(**prompts, max_new_tokens=MAX_RESPONSE_TOKENS)
    texts = tokenizer.batch_decode(tokens[:, prompts.input_ids.shape[1] :], skip_special_tokens=True)
    solved = [task.boxed_answer(t) == str(p.answer) for t, p in zip(texts, problems, strict=True)]
    return sum(solved) / len(solved)


def demonstrations(
    rng: random.Random, settings: Settings, count: int, hasty_share: float, held_out: frozenset[str]
) -> list[dict[str, str]]:
    """Return rows for `tepo sft`, none of them with a held-out prompt.

    Args:
        rng: Source of random numbers.
        settings: Its numbers of operations.
        count: Number of rows.
        hasty_share: Share of responses that are unworked guesses.
        held_out: Prompts that are never trained on.
    """
    rows: list[dict[str, str]] = []
    while len(rows) < count:
        problem = task.make_problem(rng, settings.operations)
        if problem.prompt not in held_out:
            rows.append({"prompt": problem.prompt, "response": task.hasty_demonstration(rng, problem, hasty_share)})
    return rows


def fine_tune(model: Path, output: Path, name: str, data: Path, words: Sequence[str], goal: str = "") -> Path:
    """Run `tepo sft`, and return the folder of the fine-tuned model.

    Args:
        model: Folder of the model to start from.
        output: Folder of all runs.
        name: Name of the run.
        data: The demonstrations.
        words: More keys of the command line.
        goal: What follows each held-out loss that is printed.

    Raises:
        TepoError: The command failed.
    """
    command = [
        sys.executable, "-m", "tepo_megatron", "sft", str(CONFIG), "--name", name, "--output", str(output),
        "--model.path", str(model), "--sft.data", str(data), "--sft.max_tokens", str(MAX_TOKENS), *LAYOUT, *words,
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sft:
        assert sft.stdout is not None
        for line in sft.stdout:
            if row := re.match(r" *(\d*[05]0)/\d+ +\S+ +([\d.]+)", line):
                print(f"    update {row[1]}: held-out loss {row[2]} nats per token{goal}", flush=True)
    if sft.returncode:
        raise TepoError(f"tepo sft ended with status {sft.returncode}; its errors are above")
    return output / name / "hf"


def train(settings: Settings, work: Path, held_out: frozenset[str], check: Sequence[task.ArithmeticProblem]) -> Path:
    """Run phases A and B, and return the folder of the model.

    Args:
        settings: The settings.
        work: Folder for data and runs.
        held_out: Prompts that are never trained on.
        check: Held-out problems whose solutions decide when phase A ends.

    Raises:
        TepoError: Phase A does not reach `settings.skill`.
    """
    torch.manual_seed(settings.seed)
    tokenizer = task.build_tokenizer()
    build_model(tokenizer, settings.model).save_pretrained(work / "untrained")
    tokenizer.save_pretrained(work / "untrained")
    rng, batch = random.Random(f"{settings.seed}/demonstrations"), settings.batch_size
    solutions = [{"prompt": problem.prompt, "response": problem.solution} for problem in check]
    tokens = sum(len(tokenizer(row["response"]).input_ids) + 1 for row in solutions) / len(solutions)
    least = -math.log(settings.skill) / tokens
    write_rows(work / "check.jsonl", solutions)
    write_rows(work / "worked.jsonl", demonstrations(rng, settings, settings.demonstrations, 0.0, held_out))
    print("  learning to work problems out, in a process of its own", flush=True)
    words = [
        "--optimizer.lr", str(settings.skill_lr), "--optimizer.warmup_steps", str(settings.warmup_steps),
        "--sft.batch_sequences", str(batch), "--sft.steps", str(settings.max_skill_steps),
        "--sft.epochs", str(-(-settings.max_skill_steps * batch // settings.demonstrations)),
        "--sft.eval", str(work / "check.jsonl"), "--sft.eval_every", str(settings.check_every),
        "--sft.stop_at_loss", str(least), "--seed", str(settings.seed),
    ]  # fmt: skip
    goal = f" (goal: {least:.3f})"
    model = fine_tune(work / "untrained", work, WORKED, work / "worked.jsonl", words, goal)
    loss = json.loads((work / WORKED / "summary.json").read_text())["held_out_loss"]["after"]
    if loss > least:
        raise TepoError(
            f"seed {settings.seed}: unseen solutions have a probability of {math.exp(-loss * tokens):.0%} after "
            f"{settings.max_skill_steps} updates, {settings.skill:.0%} is wanted; choose another --seed"
        )
    if not settings.hasty_steps:
        return model
    print(f"  forgetting to: {settings.hasty_steps} steps on mostly unworked guesses", flush=True)
    rows = demonstrations(rng, settings, settings.hasty_steps * batch, settings.hasty_share, held_out)
    write_rows(work / "hasty.jsonl", rows)
    words = ["--optimizer.lr", str(settings.hasty_lr), "--sft.batch_sequences", str(batch), "--seed", str(settings.seed)]
    return fine_tune(model, work, "hasty", work / "hasty.jsonl", words)


def write_rows(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """Write JSON lines.

    Args:
        path: The file.
        rows: The rows.
    """
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_folder(folder: Path, settings: Settings) -> float:
    """Train and write everything but the marker; return the sampled accuracy on the evaluation problems.

    Args:
        folder: Folder to write.
        settings: The settings.
    """
    # the same evaluation problems for every seed, so that runs can be compared
    evaluation = task.distinct_problems(random.Random("evaluation"), settings.eval_problems, operations=settings.operations)
    taken = {p.prompt for p in evaluation}
    check = task.distinct_problems(random.Random("check"), settings.check_problems, taken, settings.operations)
    held_out = frozenset(taken.union(p.prompt for p in check))
    problems = task.distinct_problems(
        random.Random(f"{settings.seed}/problems"), settings.train_problems, held_out, settings.operations
    )

    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-sft-", dir=folder.parent) as work:
        shutil.copytree(train(settings, Path(work), held_out, check), folder)
        if settings.hasty_steps:
            shutil.copytree(Path(work) / WORKED / "hf", folder / TEACHER)
    for name, found in (("train", problems), ("eval", evaluation)):
        write_rows(folder / f"{name}.jsonl", [{"prompt": p.prompt, "answer": str(p.answer)} for p in found])
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(settings.seed)
    return sampled_accuracy(model, tokenizer, evaluation)


def build(out: Path, settings: Settings) -> None:
    """Write the folder `out`, or keep it if these settings and this source already made it.

    The folder appears complete or not at all.

    Args:
        out: The folder.
        settings: The settings.

    Raises:
        DataError: `out` holds something else than such a folder.
    """
    marker = out / MARKER
    if not marker.exists() and out.exists() and any(out.iterdir()):
        raise DataError(f"{out}: holds files that are not a base model of this script; give another --out")
    fingerprint = settings.fingerprint()
    if marker.exists() and json.loads(marker.read_text())["fingerprint"] == fingerprint:
        print(f"base model of seed {settings.seed}: already built, re-used from {out}")
        return
    print(f"base model of seed {settings.seed}: building it in {out}", flush=True)
    start = time.monotonic()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        new = Path(scratch) / "new"
        accuracy = write_folder(new, settings)
        record = {"fingerprint": fingerprint, "settings": asdict(settings), "sampled_accuracy": accuracy}
        (new / MARKER).write_text(json.dumps(record, indent=2) + "\n")
        if out.exists():
            out.rename(Path(scratch) / "old")
        new.rename(out)
    print(
        f"base model of seed {settings.seed}: ready after {time.monotonic() - start:.0f} s, sampling solves "
        f"{accuracy:.0%} of {settings.eval_problems} problems"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.arithmetic.base_model", description=__doc__)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument(
        "--max-operations", type=int, default=Settings.max_operations, metavar="N", help="problems have 2 to N steps"
    )
    parser.add_argument("--model", choices=MODELS, default=Settings.model, help="family of the model")
    parser.add_argument("--out", type=Path, required=True, help="folder to write, or to re-use")
    options = parser.parse_args(arguments)
    torch.set_num_threads(THREADS)
    disable_progress_bar()
    try:
        build(options.out, Settings(seed=options.seed, model=options.model, max_operations=options.max_operations))
    except TepoError as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
