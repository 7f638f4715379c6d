"""The paper's seven benchmarks, one entry each (Section 4.1). `docs/evaluation.md` says what the paper leaves open."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# Qwen2.5-Math's wording, which the training data of examples/paper uses too. The paper does not print its prompt.
BOXED = "<problem>\n\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Benchmark:
    """Protocol of one benchmark.

    Attributes:
        title: Name as the paper prints it.
        problems: Number of rows of the split.
        subset: Configuration of the dataset, None for the default one.
        prompt: User message; `<problem>` stands for the problem text.
        grader: Grader, a type of `reward.terms`.
        samples: Samples per problem.
        temperature: Sampling temperature; 0 is greedy.
    """

    title: str
    hub: str
    split: str
    problems: int
    problem: str = "problem"
    answer: str = "answer"
    subset: str | None = None
    prompt: str = BOXED
    grader: Literal["math"] = "math"
    samples: int = 1
    temperature: float = 0.0


BENCHMARKS: Mapping[str, Benchmark] = {
    "aime24": Benchmark("AIME24", "HuggingFaceH4/aime_2024", "train", 30, samples=32, temperature=0.6),
    "aime25": Benchmark("AIME25", "math-ai/aime25", "test", 30, samples=32, temperature=0.6),
    "amc": Benchmark("AMC", "AI-MO/aimo-validation-amc", "train", 83, samples=32, temperature=0.6),
    "math500": Benchmark("MATH-500", "HuggingFaceH4/MATH-500", "test", 500),
    "omni_math": Benchmark("OMNI-MATH", "KbsdJames/Omni-MATH", "test", 4428),
    "olympiad_bench": Benchmark(
        "OlympiadBench", "Hothan/OlympiadBench", "train", 674, "question", "final_answer", subset="OE_TO_maths_en_COMP"
    ),
    "minerva": Benchmark("Minerva", "math-ai/minervamath", "test", 272, "question"),
}
