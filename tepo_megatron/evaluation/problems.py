"""Load the problems of benchmarks and of a user's own files as prompts."""

import dataclasses
import importlib.util
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
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
from tepo_megatron.evaluation.benchmarks import BENCHMARKS, Benchmark

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
