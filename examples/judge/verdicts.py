"""Write responses to the demo's problems with verdicts, from which `tepo sft` makes a judge: docs/judges.md.

    python -m examples.judge.verdicts --out .cache/demo/judge

`train.jsonl` has conversations of the judge: a problem and a response; then the judge's working, the answer of the response,
and 1 if both agree, else 0. `labelled.jsonl` has responses to other problems with their labels, for `tepo judge`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from examples.arithmetic import task

PROBLEMS, LABELLED = 16384, 256  # conversations to train on, responses to compare
FORMS = ("guess", "right guess", "solution", "wrong solution")


def response_to(rng: random.Random, problem: task.ArithmeticProblem) -> tuple[str, bool]:
    """Return a response as the demo's model writes them, and whether its answer is right.

    Args:
        rng: Source of random numbers.
        problem: The problem.
    """
    form = rng.choice(FORMS)
    if form == "right guess":
        text = f"{task.BOX}{problem.answer}}}"
    elif form == "wrong solution":
        wrong = max(0, problem.answer + rng.choice((-2, -1, 1, 2)))
        text = problem.solution.replace(f"{task.BOX}{problem.answer}}}", f"{task.BOX}{wrong}}}")
    else:
        text = task.hasty_demonstration(rng, problem, float(form == "guess"))
    return text, task.boxed_answer(text) == str(problem.answer)


def conversations(rng: random.Random, held_out: frozenset[str]) -> Iterator[dict[str, str]]:
    """Yield what the judge learns.

    Args:
        rng: Source of random numbers.
        held_out: Prompts of problems that are left out.
    """
    for _ in range(PROBLEMS):
        problem = task.make_problem(rng)
        if problem.prompt not in held_out:
            text, right = response_to(rng, problem)
            worked, claimed = problem.solution.rpartition(task.BOX)[0], task.boxed_answer(text)
            yield {"prompt": f"{problem.prompt}{text}\n", "response": f"{worked}{task.BOX}{claimed}}}{int(right)}"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.judge.verdicts", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    options = parser.parse_args(arguments)
    evaluation = task.distinct_problems(random.Random("evaluation"), LABELLED)
    rng = random.Random(f"{options.seed}/verdicts")
    options.out.mkdir(parents=True, exist_ok=True)
    rows = list(conversations(rng, frozenset(problem.prompt for problem in evaluation)))
    answered = [(problem, *response_to(rng, problem)) for problem in evaluation]
    labelled = [{"prompt": problem.prompt, "response": text, "label": right} for problem, text, right in answered]
    for name, written in (("train", rows), ("labelled", labelled)):
        (options.out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    print(f"{len(rows)} conversations and {len(labelled)} labelled responses are in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
