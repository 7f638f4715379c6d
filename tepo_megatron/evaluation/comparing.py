"""`tepo compare A B`: compare two evaluations on the same problems, paired by problem."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tepo_megatron.errors import DataError
from tepo_megatron.evaluation.benchmarks import BENCHMARKS
from tepo_megatron.evaluation.folder import read_record, samples_file
from tepo_megatron.evaluation.results import compare
from tepo_megatron.evaluation.samples import BenchmarkSample, read_samples
from tepo_megatron.evaluation.tables import ResultTable, comparison


def compare_folders(ours: Path, theirs: Path) -> ResultTable:
    """Return a table of the first evaluation minus the second, for every benchmark that both have.

    Raises:
        DataError: The evaluations have no benchmark or problem in common, differ in their problems, or cannot be read.
    """
    records = [read_record(folder)["benchmarks"] for folder in (ours, theirs)]
    names = [name for name in BENCHMARKS if all(name in record for record in records)]
    if not names:
        each = "; ".join(f"{folder}: {', '.join(r) or 'none'}" for folder, r in zip((ours, theirs), records, strict=True))
        raise DataError(f"the two evaluations have no benchmark in common ({each}); evaluate both on one")
    found, incomplete = {}, []
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
            incomplete.append(f"{BENCHMARKS[name].title}: compared on the {count} problems that both have; {rest}.")
        found[name] = compare(pair[0], pair[1], name)
    grid = comparison(str(ours), str(theirs), found)
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
    said = []
    for name in names:
        a, b = (record[name]["protocol"] for record in records)
        keys = [key for key in {**a, **b} if key != "source" and a.get(key) != b.get(key)]
        if keys:
            said.append(f"{BENCHMARKS[name].title}: the two runs also differ in {', '.join(keys)}.")
    return said
