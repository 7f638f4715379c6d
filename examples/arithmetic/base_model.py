"""Build the demo's base model: a tiny Qwen3 or Qwen3.5 that can work out an arithmetic problem, but mostly guesses.

    python -m examples.arithmetic.base_model --seed 0 --out runs/base-model-seed0
    python -m examples.arithmetic.base_model --model qwen3_5 --out runs/base-model-qwen3_5

Phase A teaches worked solutions until sampling solves 65 % of held-out problems. Phase B then spoils the model on purpose:
65 % of the targets are unworked guesses. The model keeps a latent skill that is sampled too rarely to help, and that the reward
can bring back. The folder holds the model and tokenizer in Hugging Face format, `train.jsonl` and `eval.jsonl`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
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
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3_5TextConfig,
    Qwen3Config,
)
from transformers.utils.logging import disable_progress_bar

from examples.arithmetic import task
from tepo_megatron.errors import DataError, TepoError

MARKER = "build.json"  # written last
THREADS = 2
MAX_RESPONSE_TOKENS = 48
IGNORED_LABEL = -100  # what PyTorch's cross entropy ignores


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
    skill: float = 0.65  # sampled accuracy that ends phase A
    check_every: int = 25
    check_below_nats: float = 2.5  # of a whole solution: while it costs more, sampling is a waste of time
    max_skill_steps: int = 2400  # four operations take about 600, eight about 1500
    skill_lr: float = 2e-3
    warmup_steps: int = 20
    hasty_steps: int = 40
    hasty_lr: float = 5e-4
    hasty_share: float = 0.65

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


class SupervisedTraining:
    """AdamW on (prompt, target) pairs that are drawn for every step, never from `held_out`."""

    def __init__(self, settings: Settings, held_out: frozenset[str]) -> None:
        self.settings = settings
        self.held_out = held_out
        self.rng = random.Random(f"{settings.seed}/demonstrations")
        torch.manual_seed(settings.seed)
        self.tokenizer = task.build_tokenizer()
        self.model = build_model(self.tokenizer, settings.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=True)

    def step(self, lr: float, hasty_share: float) -> float:
        """Take one optimizer step; return the mean negative log-likelihood of a whole target, in nats.

        Args:
            lr: Learning rate.
            hasty_share: Share of targets that are unworked guesses.
        """
        settings, rng = self.settings, self.rng
        operations = rng.choice(settings.operations)  # one length per batch: little padding
        pairs: list[tuple[str, str]] = []
        while len(pairs) < settings.batch_size:
            problem = task.make_problem(rng, operations)
            if problem.prompt not in self.held_out:
                pairs.append((problem.prompt, task.hasty_demonstration(rng, problem, hasty_share)))
        tokens, labels = self.encode(pairs)
        # padding lies to the right of every target, so causal attention needs no mask
        logits = self.model(input_ids=tokens, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return loss.item() * int((labels != IGNORED_LABEL).sum()) / len(pairs)

    def encode(self, pairs: Sequence[tuple[str, str]]) -> tuple[Tensor, Tensor]:
        """Return (prompt, target) pairs as token ids and labels, int64 [pairs, longest]; prompts and padding have no label."""
        texts = [prompt + target + task.END for prompt, target in pairs]
        batch = self.tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, IGNORED_LABEL)
        for row, (prompt, _) in enumerate(pairs):
            labels[row, : len(prompt)] = IGNORED_LABEL  # a prompt has as many tokens as characters
        return batch.input_ids, labels


def train(settings: Settings, held_out: frozenset[str], check: Sequence[task.ArithmeticProblem]) -> SupervisedTraining:
    """Run phases A and B, and print the progress.

    Args:
        settings: The settings.
        held_out: Prompts that are never trained on.
        check: Held-out problems that decide when phase A ends.

    Raises:
        TepoError: Phase A does not reach `settings.skill`.
    """
    training = SupervisedTraining(settings, held_out)
    nats, accuracy = 0.0, 0.0
    for step in range(1, settings.max_skill_steps + 1):
        nats += training.step(settings.skill_lr * min(1.0, step / settings.warmup_steps), hasty_share=0.0)
        if step % settings.check_every:
            continue
        if nats / settings.check_every < settings.check_below_nats:
            accuracy = sampled_accuracy(training.model, training.tokenizer, check)
        nats = 0.0
        done = accuracy >= settings.skill
        if done or step % (4 * settings.check_every) == 0:
            solved = f"{accuracy:.0%} of unseen problems solved" if accuracy else "too early to test"
            print(f"  learning to work problems out: step {step}, {solved}", flush=True)
        if done:
            break
    else:
        raise TepoError(
            f"seed {settings.seed}: {accuracy:.0%} of unseen problems solved after {settings.max_skill_steps} steps, "
            f"{settings.skill:.0%} wanted; choose another --seed"
        )
    print(f"  forgetting to: {settings.hasty_steps} steps on mostly unworked guesses", flush=True)
    for _ in range(settings.hasty_steps):
        training.step(settings.hasty_lr, settings.hasty_share)
    return training


def write_problems(path: Path, problems: Sequence[task.ArithmeticProblem]) -> None:
    """Write JSON lines of `prompt` and `answer`, both strings.

    Args:
        path: The file.
        problems: The problems.
    """
    rows = [json.dumps({"prompt": p.prompt, "answer": str(p.answer)}) + "\n" for p in problems]
    path.write_text("".join(rows))


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

    training = train(settings, held_out, check)
    folder.mkdir()
    training.model.save_pretrained(folder)
    training.tokenizer.save_pretrained(folder)
    write_problems(folder / "train.jsonl", problems)
    write_problems(folder / "eval.jsonl", evaluation)
    return sampled_accuracy(training.model, training.tokenizer, evaluation)


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
    parser.add_argument(
        "--hasty-steps",
        type=int,
        default=Settings.hasty_steps,
        metavar="N",
        help="steps of phase B; 0: the model keeps its skill, as a teacher (default: %(default)s)",
    )
    parser.add_argument("--model", choices=MODELS, default=Settings.model, help="family of the model")
    parser.add_argument("--out", type=Path, required=True, help="folder to write, or to re-use")
    options = parser.parse_args(arguments)
    torch.set_num_threads(THREADS)
    disable_progress_bar()
    try:
        steps = {"max_operations": options.max_operations, "hasty_steps": options.hasty_steps}
        build(options.out, Settings(seed=options.seed, model=options.model, **steps))
    except TepoError as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
