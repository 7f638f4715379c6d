"""The demo task: chains of two to four (or more) one-digit additions and subtractions.

    prompt    9+5-7?
    solution  9+5=14-7=7.\\boxed{7}
    guess     \\boxed{4}

A model that writes the solution out is nearly always right, one that guesses hardly ever: the reward of the final
answer alone can teach it to work again.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, END, UNKNOWN = "<|endoftext|>", "<|im_end|>", "<unk>"
BOX = "\\boxed{"
SYMBOLS = [*"0123456789+-=?.}\n", BOX]
VOCABULARY_SIZE = 64  # the symbols and spare entries: tensor parallelism divides a power of two on any layout

OPERATIONS = (2, 3, 4)
LARGEST_OPERAND = 9
LARGEST_RESULT = 20  # of every partial sum; the smallest is 0
LARGEST_GUESS_ERROR = 5


@dataclass(frozen=True)
class ArithmeticProblem:
    """One problem of the task.

    Attributes:
        prompt: The chain, "?" and a newline.
        solution: The worked steps, with the answer in a box at the end.
        answer: The result.
    """

    prompt: str
    solution: str
    answer: int


def make_problem(rng: random.Random, operations: int | Sequence[int] = OPERATIONS) -> ArithmeticProblem:
    """Return a random chain of additions and subtractions with all partial results in 0..20.

    Args:
        rng: Source of random numbers.
        operations: Number of steps, or the numbers of which one is drawn.
    """
    result = rng.randint(0, LARGEST_OPERAND)
    chain = worked = str(result)
    for _ in range(operations if isinstance(operations, int) else rng.choice(operations)):
        operand = rng.randint(1, LARGEST_OPERAND)
        sign = rng.choice((1, -1))
        if not 0 <= result + sign * operand <= LARGEST_RESULT:
            sign = -sign
        result += sign * operand
        step = f"{'+' if sign > 0 else '-'}{operand}"
        chain += step
        worked += f"{step}={result}"
    return ArithmeticProblem(prompt=f"{chain}?\n", solution=f"{worked}.{BOX}{result}}}", answer=result)


def distinct_problems(
    rng: random.Random, count: int, taken: Collection[str] = (), operations: Sequence[int] = OPERATIONS
) -> list[ArithmeticProblem]:
    """Return problems with different prompts.

    Args:
        rng: Source of random numbers.
        count: Number of problems.
        taken: Prompts that are not returned.
        operations: Numbers of steps, equally likely.
    """
    problems: dict[str, ArithmeticProblem] = {}
    while len(problems) < count:
        problem = make_problem(rng, operations)
        if problem.prompt not in taken:
            problems.setdefault(problem.prompt, problem)
    return list(problems.values())


def hasty_demonstration(rng: random.Random, problem: ArithmeticProblem, share: float) -> str:
    """Return the target of an impatient teacher: an unworked guess near the answer, or the solution.

    Args:
        rng: Source of random numbers.
        problem: The problem.
        share: Probability of a guess.
    """
    if rng.random() >= share:
        return problem.solution
    guess = max(0, problem.answer + rng.randint(-LARGEST_GUESS_ERROR, LARGEST_GUESS_ERROR))
    return f"{BOX}{guess}}}"


def boxed_answer(text: str) -> str | None:
    """Return the content of the last closed \\boxed{}; None without one."""
    _, box, tail = text.rpartition(BOX)
    content, brace, _ = tail.partition("}")
    return content if box and brace else None


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character and one for `\\boxed{`; it has 64 entries, of which some are unused."""
    entries = [PAD, END, UNKNOWN, *SYMBOLS]
    entries += [f"<spare_{i}>" for i in range(len(entries), VOCABULARY_SIZE)]
    tokenizer = Tokenizer(models.WordLevel({entry: i for i, entry in enumerate(entries)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed\{|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
