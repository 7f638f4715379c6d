"""Write what the example of the reward `code` starts from (docs/code_rewards.md): a model, demonstrations, and problems.

    python -m examples.code.programs --out .cache/demo/code

The problems are the demo's chains. The answer is a program that prints the result:

    prompt      9+5-7?
    response    ```
                print(9+5-7)
                ```
    answer      {"inputs": [""], "outputs": ["7"]}

The model is the demo's base model, with names for some spare tokens. `demonstrations.jsonl` is for `tepo sft`. Most of its
programs are wrong, so that the model can write right ones, and seldom does.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from examples.arithmetic import task
from examples.arithmetic.base_model import MARKER, TEACHER, write_rows
from tepo_megatron.base.errors import DataError

TOKENS = ("```", "print(", ")")  # in the place of the first spare entries of the demo's tokenizer
FENCE = TOKENS[0]
DEMONSTRATIONS, TRAIN, EVAL = 8192, 2048, 128
WRONG = 0.7  # share of the demonstrations


def program(expression: str) -> str:
    """Return a response whose program prints the value of an expression."""
    return f"{FENCE}\nprint({expression})\n{FENCE}"


def wrong_expression(rng: random.Random, expression: str) -> str:
    """Return the expression with one sign or one digit changed.

    Args:
        rng: Source of random numbers.
        expression: Digits and signs in turns.
    """
    place = rng.randrange(1, len(expression))
    others = [sign for sign in "+-" if expression[place] != sign] if expression[place] in "+-" else list("0123456789")
    changed = rng.choice([one for one in others if one != expression[place]])
    return expression[:place] + changed + expression[place + 1 :]


def demonstrations(rng: random.Random, held_out: frozenset[str]) -> Iterator[dict[str, str]]:
    """Yield conversations for `tepo sft`.

    Args:
        rng: Source of random numbers.
        held_out: Prompts that are left out.
    """
    for _ in range(DEMONSTRATIONS):
        problem = task.make_problem(rng)
        expression = problem.prompt.rstrip("?\n")
        if problem.prompt not in held_out:
            written = wrong_expression(rng, expression) if rng.random() < WRONG else expression
            yield {"prompt": problem.prompt, "response": program(written)}


def name_tokens(model: Path) -> None:
    """Give the first spare entries of a model's tokenizer the names TOKENS. Raises DataError if it has none."""
    path = model / "tokenizer.json"
    text = path.read_text()
    for index, token in enumerate(TOKENS):
        entry = json.dumps(f"<spare_{len(task.SYMBOLS) + 3 + index}>")
        if entry not in text:
            raise DataError(f"{path} has no entry {entry}; is it the demo's base model?")
        text = text.replace(entry, json.dumps(token))
    tokenizer = json.loads(text)
    tokenizer["pre_tokenizer"]["pattern"]["Regex"] = r"\\boxed\{|```|print\(|[\s\S]"
    path.write_text(json.dumps(tokenizer))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.code.programs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base", type=Path, default=Path(".cache/demo/seed-0"), help="the demo's base model")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    options = parser.parse_args(arguments)
    evaluation = task.distinct_problems(random.Random("evaluation"), EVAL)
    held_out = frozenset(problem.prompt for problem in evaluation)
    rng = random.Random(f"{options.seed}/programs")
    shutil.rmtree(options.out / "model", ignore_errors=True)
    shutil.copytree(options.base, options.out / "model", ignore=shutil.ignore_patterns("*.jsonl", MARKER, TEACHER))
    name_tokens(options.out / "model")
    for name, problems in (("train", task.distinct_problems(rng, TRAIN, held_out)), ("eval", evaluation)):
        tests = [json.dumps({"inputs": [""], "outputs": [str(problem.answer)]}) for problem in problems]
        rows = [{"prompt": problem.prompt, "answer": test} for problem, test in zip(problems, tests, strict=True)]
        write_rows(options.out / f"{name}.jsonl", rows)
    write_rows(options.out / "demonstrations.jsonl", list(demonstrations(rng, held_out)))
    print(f"a model, demonstrations and problems are in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
