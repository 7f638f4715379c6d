r"""DAPO-Math-17k as the JSON lines that the recipes read: python -m examples.paper.dapo_math --out data/dapo-math-17k.jsonl

Needs the package `datasets` and the network, once. The dataset (BytedTsinghua-SIA/DAPO-Math-17k on Hugging Face, arXiv
2503.14476) repeats its 17 thousand problems to over a million rows, and asks for a last line "Answer: ..."; our grader reads
the last \boxed{}.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

DATASET = "BytedTsinghua-SIA/DAPO-Math-17k"
# Our choice, since the paper does not print its prompt: the wording of Qwen2.5-Math's model card.
INSTRUCTION = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
_BEFORE = "Solve the following math problem step by step."
_AFTER = 'Remember to put your answer on its own line after "Answer:".'


def convert(records: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield each problem once, in the order of the dataset, as {"prompt": [one chat message], "answer": ...}.

    Raises ValueError for a record whose prompt is not worded as this dataset's are.
    """
    seen: set[str] = set()
    for number, record in enumerate(records):
        problem = _problem(record["prompt"][0]["content"], number)
        if problem not in seen:
            seen.add(problem)
            message = {"role": "user", "content": problem + INSTRUCTION}
            yield {"prompt": [message], "answer": str(record["reward_model"]["ground_truth"])}


def _problem(prompt: str, number: int) -> str:
    """Return the prompt without the dataset's own instructions, which are separate paragraphs around it."""
    before, _, rest = prompt.strip().partition("\n\n")
    problem, _, after = rest.rpartition("\n\n")
    if not before.startswith(_BEFORE) or after != _AFTER or not problem.strip():
        raise ValueError(f"record {number}: not worded as {DATASET} is: {prompt[:80]!r}")
    return problem.strip()


def main() -> None:
    """Download, convert and write the dataset."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    from datasets import load_dataset

    try:
        rows = load_dataset(DATASET, split="train")
    except OSError as error:
        raise SystemExit(f"{DATASET} cannot be fetched ({error}); do it where a network is, and copy {args.out}") from None
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w") as file:
        for row in convert(rows):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
