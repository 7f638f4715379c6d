"""Load one dataset as prompts: read rows, deduplicate, slice, try the answers on the grader, tokenize."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from tepo_megatron.base.errors import DataError
from tepo_megatron.base.types import Prompt
from tepo_megatron.config import DataConfig, DataSet
from tepo_megatron.data.readers import Row, RowReader
from tepo_megatron.data.rendering import Encoder
from tepo_megatron.data.rows import DatasetReport, DatasetRow, Deduplicator, RowFaults, key_of, raw_digest, shorten
from tepo_megatron.data.schemas import (
    Messages,
    MissingKeyError,
    Schema,
    answers_of,
    detect,
    fitting,
    has,
    prompt_and_answer,
    same_gold,
)  # fmt: skip
from tepo_megatron.data.sources import DatasetSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# gold answers -> ({gold answer that the grader cannot read: `MathTerm`'s status}, number of answers not tried)
TryGolds = Callable[[Sequence[str]], tuple[dict[str, str], int]]
FIRST_ID = 2**32  # prompt ids of set n start at n times this
_ROWS_COMPARED = 100  # whose other columns are looked at for other answers
_CHUNK = 1024  # prompts per tokenizer call


@dataclass(frozen=True)
class LoadedPrompts:
    """The prompts of one set.

    Attributes:
        prompts: Prompts in the order of the dataset.
        report: Counts of the rows that were read and dropped.
        seen: (gold answer, file and row) of each prompt, by its digest (`key_of`).
    """

    prompts: list[Prompt]
    report: DatasetReport
    seen: dict[bytes, tuple[str, str]]


def load_prompts(
    source: DataSet,
    cfg: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    try_golds: TryGolds | None = None,
    *,
    number: int = 0,
    earlier: Mapping[bytes, tuple[str, str]] | None = None,
) -> LoadedPrompts:
    """Load the prompts of one set.

    `Prompt.id` is `number * FIRST_ID` plus the row's place counted from 0 over all files (blank lines count), so ids do not
    change when limits do. `Prompt.meta` holds the other columns of the row.

    Args:
        try_golds: Tries answers on the grader, used unless `cfg.check_answers` is "off". None: answers are not tried.
    Raises:
        DataError: A row cannot be read or used (the message has file, row counted from 1, and the fix), or no prompt is left.
    """
    place = DatasetSource.of(source.path)
    reader = place.reader()
    faults = RowFaults(cfg.skip_bad_rows)
    schema, others = _schema(reader, source, faults)
    if source.answer_key is None:
        _refuse_rivals(reader, schema)
    report = DatasetReport(source.path, str(schema), faults, also_fit=[str(other) for other in others])
    items = _unique(reader, schema, cfg, report)
    if items:
        report.example = (
            f"{reader.where(items[0].place)} {_short(_text(items[0].prompt))} has the answer {_short(items[0].answer)}"
        )
    report.rows = reader.read
    kept = place.slice(items)
    report.outside = len(items) - len(kept)
    if earlier:
        kept = _without_earlier(kept, reader, earlier, report)
    if cfg.check_answers != "off" and try_golds is not None:
        kept = _tried(kept, reader, cfg, try_golds, report)
    report.unboxed = sum(_asks_for_a_line(item.prompt, cfg.instruction or "") for item in kept)
    prompts = list(_tokenized(kept, reader, schema, cfg, tokenizer, number * FIRST_ID, report))
    report.prompts = len(prompts)
    if not prompts:
        raise DataError(f"no prompt left: {report}; give another slice or file, or change what drops them")
    first = kept[0]
    report.example = f"{reader.where(first.place)} {_short(_text(first.prompt))} has the answer {_short(first.answer)}"
    return LoadedPrompts(prompts, report, {item.key: (item.answer, reader.where(item.place)) for item in kept})


def check_rows(source: DataSet, cfg: DataConfig) -> None:
    """Raise DataError for what the first rows of a set show. It needs no tokenizer; a dataset of the hub is not fetched."""
    place = DatasetSource.of(source.path)
    if not place.is_on_hub:
        reader = place.reader()
        faults = RowFaults(cfg.skip_bad_rows)
        schema, _ = _schema(reader, source, faults)
        _, first = next(reader.rows((), passing_repeats=False))
        if isinstance(first, DataError) and not faults.skip:
            deque(_items(reader, schema, faults, Deduplicator()), maxlen=0)
            faults.refuse()
        if source.answer_key is None:
            _refuse_rivals(reader, schema)


def _schema(reader: RowReader, source: DataSet, faults: RowFaults) -> tuple[Schema, list[Schema]]:
    """Return the schema of the first row that fits one, and the others that this row fits.

    Malformed rows before it are passed over, with `skip_bad_rows` also those that fit none.
    """
    row: Row | DataError | None = None
    malformed: DataError | None = None
    at = 0
    for at, row in reader.rows((), passing_repeats=False):
        if isinstance(row, DataError):
            malformed = malformed or row
            continue
        whole = reader.whole(at)
        schemas = fitting(whole, source.prompt_key, source.answer_key)
        if schemas:
            return schemas[0], schemas[1:]
        if not faults.skip:
            keys = ", ".join(map(repr, whole)) or "none"
            named = {"data.prompt_key": source.prompt_key, "data.answer_key": source.answer_key}
            for name, key in named.items():
                if key is not None and not has(whole, key):
                    raise DataError(f"{reader.where(at)}: {name}={key}: the row has no such key; its keys are {keys}")
            raise DataError(
                f"{reader.where(at)}: no known schema has these keys: {keys}; name those of prompt and answer with "
                "data.prompt_key and data.answer_key"
            )
    if row is None:
        raise DataError(f"{source.path}: the dataset is empty; give a file with one JSON object per line, or a parquet file")
    if malformed is not None and not faults.skip:
        raise malformed
    raise DataError(f"{source.path}: no row fits a known schema; the last: {row if isinstance(row, DataError) else list(row)}")


def _refuse_rivals(reader: RowReader, schema: Schema) -> None:
    """Raise DataError if one of the first rows has another answer in another column: only the user knows which is right."""
    for place, row in islice(reader.rows((), passing_repeats=False), _ROWS_COMPARED):
        if isinstance(row, DataError):
            continue
        answers = answers_of(reader.whole(place))
        gold = answers.pop(schema.answer_key, None)
        for key, other in answers.items():
            if gold is not None and not same_gold(gold, other):
                both = " (and data.prompt_key, too)" if "messages" in (key, schema.answer_key) else ""
                raise DataError(
                    f"{reader.where(place)}: {schema.answer_key!r} gives the answer {_short(gold)}, and {key!r} "
                    f"{_short(other)}; set data.answer_key to the one that is right{both}"
                )


def _items(reader: RowReader, schema: Schema, faults: RowFaults, unique: Deduplicator) -> Iterator[DatasetRow]:
    """Yield the rows of the dataset whose prompt was not seen before, as items."""
    first = ""
    used = {schema.prompt_key, schema.answer_key}
    columns = sorted(used | {key.partition(".")[0] for key in used})
    for place, row in reader.rows(used, passing_repeats=True):
        if isinstance(row, DataError):
            faults.add(str(row))
            continue
        glance = raw_digest([row.get(column) for column in columns])
        if unique.is_copy(glance):
            continue
        try:
            prompt, answer = prompt_and_answer(row, schema)
        except DataError as e:
            fault = _missing(reader.whole(place), e, schema, first) if isinstance(e, MissingKeyError) else str(e)
            faults.add(f"{reader.where(place)}: {fault}")
            continue
        first = first or reader.where(place)
        key = key_of(prompt)
        if unique.is_new(key, place, answer, glance):
            yield DatasetRow(place, key, prompt, answer, {k: v for k, v in reader.whole(place).items() if k not in used})


def _missing(row: Row, error: MissingKeyError, schema: Schema, first: str) -> str:
    """Return the message for a row that lacks a key, and say so if the row has another schema."""
    keys = ", ".join(map(repr, row)) or "none"
    text = f"key {error.key!r} is missing (found: {keys}); add it or set {error.option}"
    other = detect(row, None, None)
    if first and other is not None:
        text += f"; {first} is of the schema {schema}, this row of {other}: put them into files of their own"
    return text


def _unique(reader: RowReader, schema: Schema, cfg: DataConfig, report: DatasetReport) -> list[DatasetRow]:
    """Return each prompt once. A prompt with several answers is an error, or with `skip_bad_rows` dropped with all its rows."""
    unique = Deduplicator()
    for item in _items(reader, schema, report.faults, unique):
        unique.items[item.key] = item
    report.faults.refuse()
    contradicted = unique.take_contradicted()
    descriptions = [" and ".join(f"{reader.where(place)} ({answer!r})" for place, answer in rows[:3]) for rows in contradicted]
    if contradicted and not cfg.skip_bad_rows:
        raise DataError(
            f"{report.source}: {len(contradicted)} prompts have different answers: {shorten(descriptions)}; correct them, "
            "or set data.skip_bad_rows=true, which leaves such prompts out"
        )
    for rows, text in zip(contradicted, descriptions, strict=True):
        report.faults.add(f"different answers: {text}", rows=len(rows))
    report.duplicates = reader.repeats + unique.duplicates
    return list(unique.items.values())


def _without_earlier(
    items: list[DatasetRow], reader: RowReader, earlier: Mapping[bytes, tuple[str, str]], report: DatasetReport
) -> list[DatasetRow]:
    """Return the items whose prompts no earlier set has. A prompt with another answer than there is a fault."""
    kept = []
    for item in items:
        answer, where = earlier.get(item.key, (item.answer, ""))
        if answer != item.answer:
            report.faults.add(
                f"{reader.where(item.place)}: the answer is {item.answer!r}, and for the same prompt at {where} {answer!r}"
            )
        elif where:
            report.elsewhere += 1
        else:
            kept.append(item)
    report.faults.refuse()
    return kept


def _tried(
    items: list[DatasetRow], reader: RowReader, cfg: DataConfig, try_golds: TryGolds, report: DatasetReport
) -> list[DatasetRow]:
    """Report the items whose answers the grader cannot read; drop them or raise DataError if `cfg.check_answers` says so.

    An answer that timed out or killed its worker may be the machine's fault: it is reported, but never dropped or refused.
    """
    bad, report.untried = try_golds([item.answer for item in items])
    unsettled = {gold for gold, status in bad.items() if status in ("timeout", "died")}
    unreadable = bad.keys() - unsettled

    def named(golds: Collection[str]) -> list[str]:
        at = [item for item in items if item.answer.strip() in golds] if golds else []
        return [f"{reader.where(i.place)} {_short(i.answer)} ({bad[i.answer.strip()]})" for i in at]

    report.unsettled, report.unreadable = named(unsettled), named(unreadable)
    if unreadable and cfg.check_answers == "error":
        raise DataError(
            f"{report.source}: {len(report.unreadable)} answers that the grader cannot read: {shorten(report.unreadable)}; "
            "correct them, or set data.check_answers to drop or tell"
        )
    report.dropped_unreadable = cfg.check_answers == "drop"
    return [item for item in items if item.answer.strip() not in unreadable] if report.dropped_unreadable else items


def _tokenized(
    items: list[DatasetRow],
    reader: RowReader,
    schema: Schema,
    cfg: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    first_id: int,
    report: DatasetReport,
) -> Iterator[Prompt]:
    """Yield the prompts of at most `data.max_prompt_tokens` tokens. Raise DataError if all of them are longer."""
    encoder = Encoder(tokenizer, cfg)
    shortest: int | None = None
    fits = False
    for start in range(0, len(items), _CHUNK):
        chunk = items[start : start + _CHUNK]
        for item, tokens in zip(chunk, encoder.encode([item.prompt for item in chunk]), strict=True):
            if isinstance(tokens, DataError):
                report.faults.add(f"{reader.where(item.place)}: {schema.prompt_key!r} {tokens}")
            elif len(tokens) > cfg.max_prompt_tokens:
                report.too_long += 1
                shortest = min(shortest or len(tokens), len(tokens))
            else:
                fits = True
                chat = encoder.laid_out(item.prompt)
                yield Prompt(first_id + item.place, tokens, item.answer, item.meta, () if isinstance(chat, str) else chat)
    report.faults.refuse()
    if not fits and shortest is not None:
        raise DataError(
            f"{report.source}: no prompt left: all {report.too_long} prompts exceed data.max_prompt_tokens="
            f"{cfg.max_prompt_tokens} (the shortest has {shortest}); raise it"
        )


def _asks_for_a_line(prompt: str | Messages, instruction: str) -> bool:
    """Return whether the prompt asks for a last line "Answer: $..." and no box, like DAPO-Math-17k:
    "The last line of your response should be of the form Answer: $Answer".
    """
    text = _text(prompt) + instruction
    return "Answer: $" in text and "boxed" not in text


def _text(prompt: str | Messages) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
