"""The paper's seven benchmarks, one entry each (Section 4.1), a user's own files, and their problems as prompts.

The paper's Tables 1 and 2, in percent, are here, too. `docs/evaluation.md` says what the paper leaves open,
examples/paper/README.md what its averages are.
"""

import dataclasses
import importlib.util
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tepo_megatron.base.errors import ConfigError, DataError
from tepo_megatron.base.types import Prompt, SamplingParams
from tepo_megatron.config import PAPER_TOKENS, Config, DataConfig, DataSet, EvaluationConfig
from tepo_megatron.config.data import check_source
from tepo_megatron.config.io import plain
from tepo_megatron.data import load_prompts
from tepo_megatron.data.readers import JsonLines, Row, RowReader
from tepo_megatron.data.rendering import Encoder
from tepo_megatron.data.schemas import digits_of
from tepo_megatron.data.sources import hugging_face

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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


def _read_rows() -> tuple[PublishedRow, ...]:
    rows, table = [], ""
    for line in _ROWS.strip().splitlines():
        if line.startswith("# "):
            table = line[2:]
            continue
        model, method, *figures, average = line.split()
        accuracy = {name: float(f) for name, f in zip(COLUMNS, figures, strict=True) if f != _NONE}
        rows.append(PublishedRow(table, model, method, accuracy, float(average)))
    return tuple(rows)


PUBLISHED = _read_rows()
MODELS = tuple(dict.fromkeys(row.model for row in PUBLISHED))


def rows_of(which: str, path: str = "") -> list[PublishedRow]:
    """Return the rows to print."""
    if which == "auto":
        which = next((model for model in MODELS if model.lower() in path.lower()), "none")
    return [row for row in PUBLISHED if which in ("all", row.model)]


PLACE = "<problem>"
_PLAIN = DataConfig(train="benchmarks")  # without the instruction and system prompt of the training data
_NOT_INSTALLED = "the package datasets, which would fetch it, is not installed; install it"
_Numbered = tuple[int, str, Row]  # number from 0, place for messages, row


@dataclass(frozen=True)
class Problems:
    """A benchmark that is ready to be sampled."""

    name: str
    entry: Benchmark  # protocol, with the changes that the config makes to it
    max_tokens: int
    source: str  # file or dataset that the rows come from
    prompts: tuple[Prompt, ...]  # tokenized problems; their ids are row numbers from 0
    changes: tuple[str, ...]  # what differs from the paper's protocol, in words
    # top_k, top_p: see `SamplingParams`
    top_k: int = -1
    top_p: float = 1.0

    def sampling(self, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        """Return the sampling parameters of this benchmark."""
        samples, temperature = self.entry.samples, self.entry.temperature
        return SamplingParams(samples, temperature, self.max_tokens, stop_token_ids, top_k=self.top_k, top_p=self.top_p)


def load_benchmarks(cfg: EvaluationConfig, tokenizer: "PreTrainedTokenizerBase", max_prompt_tokens: int) -> list[Problems]:
    """Load the benchmarks that the config names, in its order.

    No problem is dropped, since the result would then be that of another benchmark. A file may hold each problem several times:
    errors are over distinct problems, so its copies become samples of one problem, or are left out if it is solved greedily.
    Raises DataError if there are no rows, a row has no problem or no answer, or a prompt is too long. The message has file,
    line and fix.
    """
    loaded = []
    for name in cfg.benchmarks:
        entry, changes = BENCHMARKS[name], []
        if cfg.benchmark_samples is not None and cfg.benchmark_samples != entry.samples and entry.temperature > 0:
            changes.append(f"{cfg.benchmark_samples} samples instead of {entry.samples}")
            entry = dataclasses.replace(entry, samples=cfg.benchmark_samples)
        if cfg.benchmark_prompt is not None and cfg.benchmark_prompt != entry.prompt:
            changes.append("another prompt")
            entry = dataclasses.replace(entry, prompt=cfg.benchmark_prompt)
        if cfg.benchmark_tokens != PAPER_TOKENS:
            changes.append(f"{cfg.benchmark_tokens} tokens instead of {PAPER_TOKENS}")
        source, rows = _rows(name, entry, cfg.benchmark_folder)
        rows, copies, repeats = _distinct(rows, entry)
        if repeats:
            changes.append(
                f"{repeats} repeats of problems taken as samples of these" if copies > 1 else f"{repeats} repeats left out"
            )
            entry = dataclasses.replace(entry, samples=entry.samples * copies)
        prompts = [_prompt(i, row, entry, tokenizer, max_prompt_tokens, where) for i, where, row in rows[: cfg.max_problems]]
        if not prompts:
            raise DataError(f"{source}: no problem of {name} is in it; give a file with one JSON object per line")
        if len(prompts) != entry.problems:
            changes.append(f"{len(prompts)} problems instead of {entry.problems}")
        loaded.append(Problems(name, entry, cfg.benchmark_tokens, source, tuple(prompts), tuple(changes)))
    return loaded


def load_files(
    sources: Sequence[str], cfg: Config, tokenizer: "PreTrainedTokenizerBase", tell: Callable[[str], None]
) -> list[Problems]:
    """Load files or datasets as `data.eval` is loaded: prompts stay as they are, and too long ones are dropped and reported.

    Raises:
        ConfigError: A source is malformed, or its name is taken.
        DataError: A source cannot be read or used.
    """
    problem_sets: list[Problems] = []
    for source in sources:
        try:
            check_source("--data", source)
        except ValueError as e:
            raise ConfigError(str(e)) from None
        last = re.sub(r"\.(jsonl?|ndjson|parquet)\b", "", source.rpartition("/")[2])
        name = re.sub(r"\W+", "_", last).strip("_")
        if not name or name in BENCHMARKS or name in (problems.name for problems in problem_sets):
            raise ConfigError(f"--data {source}: the name {name!r} is a benchmark's or another file's; rename the file")
        data, sampling = cfg.data, cfg.evaluation
        loaded = load_prompts(DataSet(path=source, prompt_key=data.prompt_key, answer_key=data.answer_key), data, tokenizer)
        tell(str(loaded.report))
        prompts = tuple(loaded.prompts[: sampling.max_problems])
        entry = Benchmark(
            title=name,
            hub="",
            split="",
            problems=len(prompts),
            prompt=PLACE,
            grader=json.dumps(plain(cfg)["reward"]["terms"]),
            samples=sampling.samples,
            temperature=sampling.temperature,
        )
        rollout = cfg.rollout
        problem_sets.append(
            Problems(name, entry, rollout.max_response_tokens, source, prompts, (), rollout.top_k, rollout.top_p)
        )
    return problem_sets


def _distinct(rows: list[_Numbered], entry: Benchmark) -> tuple[list[_Numbered], int, int]:
    """Return the first row of each problem, how many times its samples are to be taken, and the number of rows left out."""
    copies: dict[str, list[_Numbered]] = {}
    for numbered in rows:
        problem, answer = (numbered[2].get(key) for key in (entry.problem, entry.answer))
        key = repr((" ".join(problem.split()) if isinstance(problem, str) else problem, answer))
        copies.setdefault(key, []).append(numbered)
    times = min(map(len, copies.values()), default=1) if entry.temperature > 0 else 1
    return [each[0] for each in copies.values()], times, len(rows) - len(copies)


def check_sources(cfg: EvaluationConfig) -> None:
    """Raise DataError for a benchmark that has no local file and cannot be downloaded. Call it before anything is started."""
    for name in cfg.benchmarks:
        if not _file(name, cfg.benchmark_folder) and importlib.util.find_spec("datasets") is None:
            raise DataError(f"evaluation.benchmarks: {name}: {_NOT_INSTALLED}, or {_fix(name)}")


def _rows(name: str, entry: Benchmark, folder: str | None) -> tuple[str, list[_Numbered]]:
    """Return where the rows come from, and the rows."""
    if file := _file(name, folder):
        return str(file), list(_read(JsonLines([file])))
    source = ":".join(part for part in (entry.hub, entry.subset, entry.split) if part)
    try:
        return source, list(_read(hugging_face(source)))
    except DataError as e:
        raise DataError(f"{e}; or {_fix(name)}") from None


def _read(reader: RowReader) -> Iterator[_Numbered]:
    """Yield the rows. Raises DataError for a row that cannot be read."""
    for place, row in reader.rows((), passing_repeats=False):
        if isinstance(row, DataError):
            raise row
        yield place, reader.where(place), reader.whole(place)


def _file(name: str, folder: str | None) -> Path | None:
    file = None if folder is None else Path(folder) / f"{name}.jsonl"
    return file if file is not None and file.exists() else None


def _fix(name: str) -> str:
    return f"save its dataset as {name}.jsonl, one row per line, in the folder that evaluation.benchmark_folder names"


def _prompt(
    number: int, row: Row, entry: Benchmark, tokenizer: "PreTrainedTokenizerBase", max_prompt_tokens: int, where: str
) -> Prompt:
    """Return one row as a prompt, rendered by the chat template if there is one. Raises DataError for an unusable row."""
    for key in (entry.problem, entry.answer):
        if key not in row:
            fields = ", ".join(map(repr, row)) or "none"
            raise DataError(f"{where}: field {key!r} is missing (found: {fields}); rename it to that of {entry.hub}")
    problem = row[entry.problem]
    if not isinstance(problem, str) or not problem.strip():
        raise DataError(f"{where}: field {entry.problem!r} holds no text of a problem; fill it in or remove the row")
    text = entry.prompt.replace(PLACE, problem.strip())
    chat = [{"role": "user", "content": text}] if tokenizer.chat_template is not None else []
    (token_ids,) = Encoder(tokenizer, _PLAIN).encode([chat or text])
    if isinstance(token_ids, DataError):
        raise DataError(f"{where}: {entry.problem!r} {token_ids}")
    if len(token_ids) > max_prompt_tokens:
        raise DataError(
            f"{where}: the prompt has {len(token_ids)} tokens, above data.max_prompt_tokens={max_prompt_tokens}; raise that"
        )
    return Prompt(number, token_ids, _gold(row[entry.answer], entry.answer, where), messages=chat)


def _gold(value: Any, key: str, where: str) -> str:
    """Return a gold answer as LaTeX without dollar signs: 12.0 becomes 12, and several answers are joined by commas.

    A blank answer is left to the grader, which counts it (`bad_gold`): one among thousands must not make a benchmark unusable.
    """
    if isinstance(value, list) and value:
        return ", ".join(_gold(each, key, where) for each in value)
    finite = not isinstance(value, (float, Decimal)) or math.isfinite(value)
    if not finite or isinstance(value, bool) or not isinstance(value, (str, int, float, Decimal)):
        raise DataError(f"{where}: field {key!r} is {value!r:.60}, no answer; make it a string, a number or a list of them")
    if not isinstance(value, str):
        value = digits_of(int(value) if value == int(value) else value)
    text = value.strip()
    if len(text) > 2 and text[0] == text[-1] == "$" and "$" not in text[1:-1]:
        text = text[1:-1].strip()
    return text
