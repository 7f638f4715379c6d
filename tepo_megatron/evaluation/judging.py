"""`tepo judge`: have the judge of a config score labelled responses, and report how far it agrees with the labels."""

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tepo_megatron.config import JudgeTermConfig, RewardConfig
from tepo_megatron.errors import ConfigError, DataError
from tepo_megatron.evaluation.agreement import Agreement, LabelledScores, agreement
from tepo_megatron.evaluation.tables import NOTHING, ResultTable
from tepo_megatron.rewards import check_reward
from tepo_megatron.rewards.judge import Judgement, JudgeTerm
from tepo_megatron.rewards.pool import limits_of
from tepo_megatron.rollout.judges import JudgePlace, check_judges, open_judges
from tepo_megatron.utils.atomic import replace_file

REPORT_FILE, VERDICTS_FILE = "report.json", "verdicts.jsonl"


@dataclass(frozen=True)
class JudgingRequest:
    """Arguments of `tepo judge`.

    Attributes:
        term: Index of the term in `reward.terms`; None: the first judge.
        repeats: Seeds with which each response is judged.
    """

    records: Path
    term: int | None
    repeats: int
    out: Path
    overwrite: bool


@dataclass(frozen=True)
class LabelledResponse:
    """A response whose score is known.

    Attributes:
        label: Score that the judge should give, 0 to 1.
    """

    fields: Mapping[str, str]
    label: float


def run(reward: RewardConfig, place: JudgePlace, request: JudgingRequest, tell: Callable[[str], None]) -> Path:
    """Judge the records, print the report and write the folder; return the folder.

    Raises:
        TepoError: The config, the records or the judge are at fault.
    """
    index, entry = _judge_of(reward.judges, request.term)
    records = read_records(request.records)
    if (request.out / REPORT_FILE).exists() and not request.overwrite:
        raise ConfigError(f"{request.out} holds a report already; give another --out, or replace it with --overwrite true")
    check_reward(reward)
    check_judges({index: entry}, place.platform)
    request.out.mkdir(parents=True, exist_ok=True)
    tell(f"{len(records)} responses, {request.repeats} seeds each, judged by {entry.model}")
    with open_judges({index: entry}, place) as judges:
        found = asyncio.run(
            _judged(JudgeTerm(entry, judges.by_term[index], limits_of(reward)), entry.seed, records, request.repeats)
        )
        for event in judges.take_events():
            tell(event)
    report = _report(records, found)
    replace_file(request.out / REPORT_FILE, json.dumps(report, indent=2).encode() + b"\n")
    rows = [
        {**record.fields, "label": record.label, "judgements": [asdict(one) for one in of_record]}
        for record, of_record in zip(records, found, strict=True)
    ]
    replace_file(request.out / VERDICTS_FILE, "".join(json.dumps(row) + "\n" for row in rows).encode())
    _table(report).print()
    return request.out


def read_records(path: Path) -> list[LabelledResponse]:
    """Return the labelled responses of a file. Raises DataError that names the line at fault."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"{path}: cannot read the labelled responses ({e}); give a file of JSON lines") from None
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            records.append(_record(json.loads(line)))
        except (ValueError, RecursionError) as e:
            raise DataError(f"{path}, line {number}: {e}; correct the line") from None
    if not records:
        raise DataError(f"{path} has no labelled response; write one JSON object a line, with prompt, response and label")
    return records


def _record(row: Any) -> LabelledResponse:
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    fields: dict[str, str] = {}
    for name, text in (("prompt", row.get("prompt")), ("response", row.get("response")), ("answer", row.get("answer", ""))):
        if not isinstance(text, str):
            raise ValueError(f"{name} is no text")
        fields[name] = text
    label = row.get("label")
    if not isinstance(label, bool | int | float) or not math.isfinite(label) or not 0 <= label <= 1:
        raise ValueError("label is no number from 0 to 1, and neither true nor false")
    return LabelledResponse(fields, float(label))


def _judge_of(judges: Mapping[int, JudgeTermConfig], term: int | None) -> tuple[int, JudgeTermConfig]:
    if not judges:
        raise ConfigError("reward.terms has no term of type judge; add the one that you want to try")
    index = next(iter(judges)) if term is None else term
    if index not in judges:
        raise ConfigError(f"--term {index}: no judge in reward.terms; the judges are {', '.join(map(str, judges))}")
    return index, judges[index]


async def _judged(term: JudgeTerm, seed: int, records: Sequence[LabelledResponse], repeats: int) -> list[list[Judgement]]:
    """Return the judgements of each record, one per seed, and close the term."""
    try:
        async with asyncio.TaskGroup() as tasks:
            asked = [
                [tasks.create_task(term.judge(record.fields, seed + repeat)) for repeat in range(repeats)] for record in records
            ]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    finally:
        await term.close()
    return [[task.result() for task in of_record] for of_record in asked]


def _report(records: Sequence[LabelledResponse], found: Sequence[Sequence[Judgement]]) -> dict[str, Any]:
    scores = [[math.nan if one.value is None else one.value for one in of_record] for of_record in found]
    labelled = LabelledScores(
        labels_N=np.array([record.label for record in records]),
        lengths_N=np.array([float(len(record.fields["response"])) for record in records]),
        scores_RN=np.array(scores).T,
    )
    every = [one for of_record in found for one in of_record]
    measured: Agreement = agreement(labelled)
    return {
        **measured.figures(),
        "too_long": sum(one.status == "too_long" for one in every) / len(every),
        "unreadable_answers": sum(one.unreadable for one in every) / max(1, sum(one.asked for one in every)),
        "prompt_tokens": sum(one.prompt_tokens for one in every) / len(every),
        "sampled_tokens": sum(one.sampled_tokens for one in every) / len(every),
    }


def _table(report: Mapping[str, Any]) -> ResultTable:
    rows = [[name.replace("_", " "), _shown(value)] for name, value in report.items()]
    notes = [
        "accuracy, kappa and auc are of binary labels. length bias: rank correlation of length and score minus label.",
        "unjudged, too long: shares of the questions. Tokens: mean per question, retries included.",
    ]
    return ResultTable("the judge", ["", ""], rows, notes)


def _shown(value: float | None) -> str:
    if value is None:
        return NOTHING
    return str(value) if isinstance(value, int) else f"{value:.3f}"
