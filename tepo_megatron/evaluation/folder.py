"""The folder of an evaluation, and the comparison of two.

It has `evaluation.json` (protocols and results), `NAME.jsonl` (every sample) and `evaluation.md`.
"""

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tepo_megatron.base.errors import DataError
from tepo_megatron.base.storage import replace_file
from tepo_megatron.data.stream import fingerprint
from tepo_megatron.evaluation.benchmarks import BENCHMARKS, Problems, title_of
from tepo_megatron.evaluation.results import Result, ResultTable, compare, comparison, result
from tepo_megatron.evaluation.samples import BenchmarkSample, load_samples, read_samples, to_lines

RECORD_FILE = "evaluation.json"
TABLE_FILE = "evaluation.md"
_LOGGER = logging.getLogger(__name__)


class EvaluationFolder:
    """One evaluation on disk, to which benchmarks are added one by one."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path, self._about = path, dict(about)
        # each by benchmark
        self._entries: dict[str, Any] = {}
        self.changes: dict[str, Sequence[str]] = {}  # what differs from the paper's protocol
        self.results: dict[str, Result] = {}

    def take_over(self, suite: Sequence[Problems]) -> list[Problems]:
        """Take over the benchmarks that an earlier process added with the same model, seed and protocol.

        Call it before any `add`. Returns the benchmarks still to be evaluated. Damaged ones are among them, and a warning says
        so.
        """
        former = self._former()
        todo = []
        for problems in suite:
            entry = former.get(problems.name)
            if not isinstance(entry, dict) or {key: entry.get(key) for key in ("protocol", "data")} != _entry(problems):
                todo.append(problems)
                continue
            path = samples_file(self.path, problems.name)
            try:
                samples, faults = load_samples(path)
            except DataError as e:
                samples, faults = [], [str(e)]
            expected = len(problems.prompts) * problems.entry.samples
            if not faults and len(samples) != expected:
                faults = [f"{path}: {len(samples)} of {expected} samples"]
            if faults:
                _LOGGER.warning("%s is evaluated again: %s", problems.name, faults[0])
                todo.append(problems)
            else:
                self._note(problems, samples)
        return todo

    def refuse_changes(self, suite: Sequence[Problems]) -> None:
        """Raise DataError for the first thing on which samples depend, and that the folder's evaluation has otherwise."""
        record = self._record()
        pairs = [(name, record.get(name, now), now) for name, now in self._about.items()]
        for problems in suite:
            entry, now = record.get("benchmarks", {}).get(problems.name, {}), _entry(problems)
            if not isinstance(entry, dict):
                continue  # damaged, so it is evaluated again
            before = entry.get("protocol", {})
            pairs += [(f"{problems.name}: {key}", before.get(key, value), value) for key, value in now["protocol"].items()]
            pairs.append((f"{problems.name}: its prompts and answers", entry.get("data", now["data"]), now["data"]))
        for name, former, present in pairs:
            if former != present:
                raise DataError(
                    f"{self.path}: {name} was {former} and is {present}; resume with what it was, give another --out, or set "
                    "--overwrite true instead of --resume"
                )

    def _former(self) -> dict[str, Any]:
        """Return what an earlier process recorded of the same model and seed."""
        record = self._record()
        same = {key: record.get(key) for key in self._about} == self._about
        return dict(record["benchmarks"]) if same else {}

    def _record(self) -> dict[str, Any]:
        """Return what an earlier process recorded; nothing if the record is damaged."""
        if not (self.path / RECORD_FILE).exists():
            return {}
        try:
            return read_record(self.path)
        except DataError as e:
            _LOGGER.warning("%s: all of it is evaluated again", e)
            return {}

    def add(self, problems: Problems, samples: Sequence[BenchmarkSample]) -> Result:
        """Write the samples of a benchmark, then the record with its result; return the result.

        Each file is replaced atomically. Raises DataError if problems have different numbers of samples.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        replace_file(samples_file(self.path, problems.name), to_lines(samples))
        self._note(problems, samples)
        record = self._about | {
            "benchmarks": {
                name: self._entries[name] | {"changes": self.changes[name], "result": dataclasses.asdict(r)}
                for name, r in self.results.items()
            }
        }
        replace_file(self.path / RECORD_FILE, json.dumps(record, indent=2, ensure_ascii=False).encode() + b"\n")
        return self.results[problems.name]

    def _note(self, problems: Problems, samples: Sequence[BenchmarkSample]) -> None:
        self.results[problems.name] = result(samples)
        self.changes[problems.name] = problems.changes
        self._entries[problems.name] = _entry(problems)


def _entry(problems: Problems) -> dict[str, Any]:
    """Return what the samples of a benchmark depend on, as plain JSON: its protocol, and a digest of prompts and answers."""
    protocol = dataclasses.asdict(problems.entry)
    protocol |= {"max_tokens": problems.max_tokens, "source": problems.source, "problems": len(problems.prompts)}
    if problems.entry.is_file:
        protocol |= {"top_k": problems.top_k, "top_p": problems.top_p}
    return {"protocol": protocol, "data": fingerprint(problems.prompts)}


def samples_file(folder: Path, name: str) -> Path:
    """Return the path of a benchmark's samples."""
    return folder / f"{name}.jsonl"


def read_record(folder: Path) -> dict[str, Any]:
    """Return the record of an evaluation. Raises DataError that names the file."""
    path = folder / RECORD_FILE
    try:
        record = json.loads(path.read_text())
    except OSError as e:
        raise DataError(f"{path}: cannot read the evaluation ({e.strerror}); give a folder that tepo evaluate wrote") from None
    except ValueError as e:
        raise DataError(f"{path}: not valid JSON ({e}); make the evaluation again") from None
    if not isinstance(record, dict) or not isinstance(record.get("benchmarks"), dict):
        raise DataError(f"{path}: not the record of an evaluation; give a folder that tepo evaluate wrote")
    return record


def compare_folders(ours: Path, theirs: Path) -> ResultTable:
    """Return a table of the first evaluation minus the second, for every benchmark that both have. Raises DataError: the
    evaluations have no benchmark or problem in common, differ in their problems, or cannot be read.
    """
    records = [read_record(folder)["benchmarks"] for folder in (ours, theirs)]
    names = [name for name in dict.fromkeys([*BENCHMARKS, *records[0]]) if all(name in record for record in records)]
    if not names:
        each = "; ".join(f"{folder}: {', '.join(r) or 'none'}" for folder, r in zip((ours, theirs), records, strict=True))
        raise DataError(f"the two evaluations have no benchmark in common ({each}); evaluate both on one")
    compared, incomplete = {}, []
    for name in names:
        pair = [read_samples(samples_file(folder, name)) for folder in (ours, theirs)]
        damaged = [
            folder
            for folder, record, samples in zip((ours, theirs), records, pair, strict=True)
            if len(samples) < _samples_of(record[name])
        ]
        if damaged:
            pair = _common(pair, name)
            rest = f"of the others samples are missing in {' and '.join(map(str, damaged))}"
            count = len({sample.problem for sample in pair[0]})
            incomplete.append(f"{title_of(name)}: compared on the {count} problems that both have; {rest}.")
        compared[name] = compare(pair[0], pair[1], name)
    grid = comparison(str(ours), str(theirs), compared)
    return ResultTable(grid.title, grid.headings, grid.rows, [*grid.notes, *incomplete, *_differing(names, records)])


def _samples_of(entry: dict[str, Any]) -> int:
    """Return how many samples a benchmark had when it was recorded."""
    protocol = entry.get("protocol", {})
    return int(protocol.get("problems", 0)) * int(protocol.get("samples", 0))


def _common(pair: Sequence[Sequence[BenchmarkSample]], name: str) -> list[list[BenchmarkSample]]:
    """Return the samples of the problems that both evaluations have. Raises DataError if there are none."""
    first, second = ({sample.problem for sample in samples} for samples in pair)
    if not first & second:
        raise DataError(f"{name}: the two evaluations have no problem in common; make the damaged one again")
    return [[sample for sample in samples if sample.problem in first & second] for samples in pair]


def _differing(names: list[str], records: list[dict]) -> list[str]:
    """Return one sentence per benchmark whose two protocols differ, naming the differing keys."""
    sentences = []
    for name in names:
        a, b = (record[name]["protocol"] for record in records)
        keys = [key for key in {**a, **b} if key != "source" and a.get(key) != b.get(key)]
        if keys:
            sentences.append(f"{title_of(name)}: the two runs also differ in {', '.join(keys)}.")
    return sentences
