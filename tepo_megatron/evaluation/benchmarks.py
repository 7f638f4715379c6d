"""The paper's seven benchmarks, one entry each (Section 4.1), a user's own files, and the paper's Tables 1 and 2, in percent.

`docs/evaluation.md` says what the paper leaves open, examples/paper/README.md what its averages are.
"""

from collections.abc import Mapping
from dataclasses import dataclass

# Qwen2.5-Math's wording, which the training data of examples/paper uses too. The paper does not print its prompt.
BOXED = "<problem>\n\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Benchmark:
    """Protocol of one benchmark, or of a user's own file."""

    title: str  # name as the paper prints it, or the file as the user wrote it
    hub: str  # empty for a file
    split: str
    problems: int  # number of rows of the split
    problem: str = "problem"
    answer: str = "answer"
    subset: str | None = None  # configuration of the dataset, None for the default one
    prompt: str = BOXED  # user message; `<problem>` stands for the problem text
    grader: str = "math"  # type of the term that grades; of a file all `reward.terms`, as JSON
    samples: int = 1  # samples per problem
    temperature: float = 0.0  # sampling temperature; 0 is greedy

    @property
    def is_file(self) -> bool:
        """Return whether this is a user's own file."""
        return not self.hub


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


COLUMNS = tuple(BENCHMARKS)


def title_of(name: str) -> str:
    """Return the title of a benchmark, or the name of a file."""
    return BENCHMARKS[name].title if name in BENCHMARKS else name


METHODS = {
    "base": "base model", "grpo": "GRPO/DAPO", "clip_cov": "Clip-Cov", "kl_cov": "KL-Cov",
    "entropy_advantage": "entropy-based term", "gpg": "GPG", "gspo": "GSPO", "tepo": "TEPO",
}  # fmt: skip
_NONE = "-"

# model, method, the seven columns, the average as printed
_ROWS = """
# Table 1
Qwen2.5-7B base 0.94 0.94 14.34 43.20 13.73 16.74 21.69 13.30
Qwen2.5-7B grpo 11.25 5.00 42.80 76.60 25.00 37.92 33.08 30.85
Qwen2.5-7B clip_cov 10.83 7.40 42.84 75.60 26.11 39.40 37.86 31.64
Qwen2.5-7B kl_cov 12.29 8.23 42.77 75.60 25.64 39.11 34.92 31.60
Qwen2.5-7B entropy_advantage 11.35 6.15 43.18 74.80 26.14 40.14 36.02 31.62
Qwen2.5-7B gpg 13.54 6.04 43.29 75.00 26.28 40.44 34.55 31.91
Qwen2.5-7B gspo 11.77 6.04 42.77 75.80 25.72 38.37 35.66 31.33
Qwen2.5-7B tepo 12.60 8.75 43.48 77.40 27.17 40.44 34.92 32.59
Qwen3-14B base 19.16 16.77 51.01 82.80 30.27 43.40 45.95 38.34
Qwen3-14B grpo 22.08 19.06 55.94 85.60 33.01 44.00 47.79 41.51
Qwen3-14B clip_cov 22.70 20.10 54.96 86.00 32.94 43.55 45.58 41.29
Qwen3-14B kl_cov 23.85 19.06 56.47 86.40 32.87 43.85 47.79 41.85
Qwen3-14B entropy_advantage 24.27 18.54 55.87 85.20 33.04 42.37 48.52 41.56
Qwen3-14B gpg 23.85 19.89 57.34 84.40 32.22 43.55 47.05 42.16
Qwen3-14B gspo 23.85 20.41 56.58 86.00 33.54 44.44 48.52 42.28
Qwen3-14B tepo 24.37 23.75 58.96 86.40 35.11 46.37 49.26 44.02
# Table 2
DeepSeek-R1-Distill-Llama-8B base 12.70 13.33 46.49 70.40 25.50 36.88 23.52 32.46
DeepSeek-R1-Distill-Llama-8B grpo 27.50 18.43 61.89 78.40 32.97 41.62 26.10 42.23
DeepSeek-R1-Distill-Llama-8B tepo 25.72 18.85 60.84 79.60 33.11 43.55 29.77 42.76
Mistral-7B-Instruct-v0.2 base - - 2.18 9.80 3.98 1.19 5.88 2.77
Mistral-7B-Instruct-v0.2 grpo - - 3.13 10.80 4.27 2.37 8.09 3.37
Mistral-7B-Instruct-v0.2 tepo - - 3.58 12.80 4.59 1.93 8.09 3.65
DeepSeek-R1-Distill-Qwen-7B base 29.89 20.93 59.48 83.40 33.86 42.66 34.19 43.23
DeepSeek-R1-Distill-Qwen-7B grpo 32.08 23.33 66.10 87.80 38.42 47.70 40.44 45.99
DeepSeek-R1-Distill-Qwen-7B tepo 32.70 24.58 66.41 87.80 39.55 49.92 40.80 48.60
"""


@dataclass(frozen=True)
class PublishedRow:
    """One row of the paper's tables."""

    table: str  # "Table 1" or "Table 2"
    model: str
    method: str
    accuracy: Mapping[str, float]  # accuracy in percent by benchmark, without the columns that the row leaves out
    average: float  # average in percent, as printed

    @property
    def title(self) -> str:
        """Heading of the row."""
        return f"{self.table}: {self.model}, {METHODS[self.method]}"


def _read() -> tuple[PublishedRow, ...]:
    rows, table = [], ""
    for line in _ROWS.strip().splitlines():
        if line.startswith("# "):
            table = line[2:]
            continue
        model, method, *figures, average = line.split()
        accuracy = {name: float(f) for name, f in zip(COLUMNS, figures, strict=True) if f != _NONE}
        rows.append(PublishedRow(table, model, method, accuracy, float(average)))
    return tuple(rows)


PUBLISHED = _read()
MODELS = tuple(dict.fromkeys(row.model for row in PUBLISHED))


def rows_of(which: str, path: str = "") -> list[PublishedRow]:
    """Return the rows to print."""
    if which == "auto":
        which = next((model for model in MODELS if model.lower() in path.lower()), "none")
    return [row for row in PUBLISHED if which in ("all", row.model)]
