"""A dataset as prompts: read, each prompt once, sliced, its answers tried on the grader, tokenized."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tepo_megatron.config import DataConfig, DataSet
from tepo_megatron.data.chat import Encoder
from tepo_megatron.data.readers import Reader, Row
from tepo_megatron.data.report import Faults, Report, some
from tepo_megatron.data.schemas import Messages, MissingKeyError, Schema, detect, take
from tepo_megatron.data.sources import Source
from tepo_megatron.data.unique import Item, Unique, glance_at, key_of
from tepo_megatron.errors import DataError
from tepo_megatron.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# golds -> ({gold that the grader cannot read: `MathReward`'s status}, how many were not tried)
TryGolds = Callable[[Sequence[str]], tuple[dict[str, str], int]]
FIRST_ID = 2**32  # ids of a set start at its number times this
_CHUNK = 1024  # prompts that are tokenized at once


@dataclass(frozen=True)
class Loaded:
    """A set's prompts in its order, what became of its rows, and the answer and place of each prompt by its digest."""

    prompts: list[Prompt]
    report: Report
    seen: dict[bytes, tuple[str, str]]


def load_prompts(
    source: DataSet,
    cfg: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    try_golds: TryGolds | None = None,
    *,
    number: int = 0,
    earlier: Mapping[bytes, tuple[str, str]] | None = None,
) -> Loaded:
    """The prompts of one set. cfg: what the sets share (its `train`, `eval` and keys are not looked at).

    try_golds: what `cfg.check_answers` asks; number: of the set, counted from 0; earlier: `Loaded.seen` of the sets before.
    `Prompt.id` is `number * FIRST_ID` and the row's place counted from 0, a line of JSON lines (so it is stable when limits
    change); `Prompt.meta` holds the rest of the row.

    Raises DataError with file, row (counted from 1) and mend for what cannot be read or used, and where no prompt is left.
    """
    place = Source.of(source.path)
    reader = place.reader()
    faults = Faults(cfg.skip_bad_rows)
    schema = _schema(reader, source, faults)
    report = Report(source.path, str(schema), faults)
    items = _unique(reader, schema, cfg, report) if cfg.deduplicate else list(_items(reader, schema, faults, None))
    report.rows = reader.read
    kept = place.slice(items)
    report.outside = len(items) - len(kept)
    if cfg.deduplicate and earlier:
        kept = _without_earlier(kept, reader, earlier, report)
    if cfg.check_answers != "off" and try_golds is not None:
        kept = _tried(kept, reader, cfg, try_golds, report)
    report.unboxed = sum(_asks_for_a_line(item.prompt, cfg.instruction or "") for item in kept)
    prompts = list(_tokenized(kept, reader, schema, cfg, tokenizer, number * FIRST_ID, report))
    report.prompts = len(prompts)
    if not prompts:
        raise DataError(f"no prompt left: {report}; give another slice or file, or change what drops them")
    return Loaded(prompts, report, {item.key: (item.answer, reader.where(item.place)) for item in kept})


def _schema(reader: Reader, source: DataSet, faults: Faults) -> Schema:
    """That of the first row that has one; with `skip_bad_rows` rows without are passed over."""
    row: Row | DataError | None = None
    at = 0
    for at, row in reader.rows((), passing_repeats=False):
        if isinstance(row, DataError):
            if not faults.skip:
                raise row
            continue
        whole = reader.whole(at)
        schema = detect(whole, source.prompt_key, source.answer_key)
        if schema is not None:
            return schema
        if not faults.skip:
            found = ", ".join(map(repr, whole)) or "none"
            raise DataError(
                f"{reader.where(at)}: no known schema has these keys: {found}; name those of prompt and answer with "
                "data.prompt_key and data.answer_key"
            )
    if row is None:
        raise DataError(f"{source.path}: the dataset is empty; give a file with one JSON object per line, or a parquet file")
    raise DataError(f"{source.path}: no row fits a known schema; the last: {row if isinstance(row, DataError) else list(row)}")


def _items(reader: Reader, schema: Schema, faults: Faults, unique: Unique | None) -> Iterator[Item]:
    """The rows of the dataset; with `unique`, those whose prompt is new to it."""
    first = ""
    used = {schema.prompt_key, schema.answer_key}
    columns = sorted(used | {key.partition(".")[0] for key in used})
    for place, row in reader.rows(used, passing_repeats=unique is not None):
        if isinstance(row, DataError):
            faults.add(str(row))
            continue
        glance = glance_at([row.get(column) for column in columns]) if unique is not None else None
        if unique is not None and unique.is_copy(glance):
            continue
        try:
            prompt, answer = take(row, schema)
        except DataError as e:
            fault = _missing(reader.whole(place), e, schema, first) if isinstance(e, MissingKeyError) else str(e)
            faults.add(f"{reader.where(place)}: {fault}")
            continue
        first = first or reader.where(place)
        key = key_of(prompt)
        if unique is None or unique.is_new(key, place, answer, glance):
            meta = {k: v for k, v in reader.whole(place).items() if k not in used}
            yield Item(place, key, prompt, answer, meta)


def _missing(row: Row, error: MissingKeyError, schema: Schema, first: str) -> str:
    """What to say of a row without a key: it may be one of another schema."""
    found = ", ".join(map(repr, row)) or "none"
    text = f"key {error.key!r} is missing (found: {found}); add it or set {error.option}"
    other = detect(row, None, None)
    if first and other is not None:
        text += f"; {first} is of the schema {schema}, this row of {other}: put them into files of their own"
    return text


def _unique(reader: Reader, schema: Schema, cfg: DataConfig, report: Report) -> list[Item]:
    """Each prompt once; those that have several answers are an error, or left out with all their rows."""
    unique = Unique()
    for item in _items(reader, schema, report.faults, unique):
        unique.items[item.key] = item
    contradicted = unique.take_contradicted()
    told = [" and ".join(f"{reader.where(place)} ({answer!r})" for place, answer in rows[:3]) for rows in contradicted]
    if contradicted and not cfg.skip_bad_rows:
        raise DataError(
            f"{report.source}: {len(contradicted)} prompts have different answers: {some(told)}; correct them, or set "
            "data.skip_bad_rows=true, which leaves such prompts out (data.deduplicate=false compares nothing)"
        )
    for rows, text in zip(contradicted, told, strict=True):
        report.faults.add(f"different answers: {text}", rows=len(rows))
    report.duplicates = reader.repeats + unique.duplicates
    return list(unique.items.values())


def _without_earlier(items: list[Item], reader: Reader, earlier: Mapping[bytes, tuple[str, str]], report: Report) -> list[Item]:
    """Those that no earlier set has."""
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
    return kept


def _tried(items: list[Item], reader: Reader, cfg: DataConfig, try_golds: TryGolds, report: Report) -> list[Item]:
    """The items, in the report those whose answer the grader cannot read; without them where they are to be dropped.

    What was not settled in time says something of the machine too: it is told, and dropped or refused never.
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
            f"{report.source}: {len(report.unreadable)} answers that the grader cannot read: {some(report.unreadable)}; "
            "correct them, or set data.check_answers to drop or tell"
        )
    report.dropped_unreadable = cfg.check_answers == "drop"
    return [item for item in items if item.answer.strip() not in unreadable] if report.dropped_unreadable else items


def _tokenized(
    items: list[Item],
    reader: Reader,
    schema: Schema,
    cfg: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    first_id: int,
    report: Report,
) -> Iterator[Prompt]:
    """The prompts that are not too long. Raises DataError where all of them are."""
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
                yield Prompt(first_id + item.place, tokens, item.answer, item.meta)
    if not fits and shortest is not None:
        raise DataError(
            f"{report.source}: no prompt left: all {report.too_long} prompts exceed data.max_prompt_tokens="
            f"{cfg.max_prompt_tokens} (the shortest has {shortest}); raise it"
        )


def _asks_for_a_line(prompt: str | Messages, instruction: str) -> bool:
    """As DAPO-Math-17k does: "The last line of your response should be of the form Answer: $Answer"."""
    text = (prompt if isinstance(prompt, str) else prompt[-1]["content"]) + instruction
    return "Answer: $" in text and "boxed" not in text


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
