"""`tepo compare A B`: two evaluations on the same problems, paired."""

from __future__ import annotations

from pathlib import Path

from tepo_megatron.errors import DataError
from tepo_megatron.evaluation.benchmarks import BENCHMARKS
from tepo_megatron.evaluation.folder import read_record, samples_file
from tepo_megatron.evaluation.results import compare
from tepo_megatron.evaluation.samples import read_samples
from tepo_megatron.evaluation.tables import Grid, comparison


def compare_folders(ours: Path, theirs: Path) -> Grid:
    """The first minus the second, of every benchmark that both have. Raises DataError naming what cannot be compared."""
    records = [read_record(folder)["benchmarks"] for folder in (ours, theirs)]
    names = [name for name in BENCHMARKS if all(name in record for record in records)]
    if not names:
        each = "; ".join(f"{folder}: {', '.join(r) or 'none'}" for folder, r in zip((ours, theirs), records, strict=True))
        raise DataError(f"the two evaluations have no benchmark in common ({each}); evaluate both on one")
    found = {}
    for name in names:
        ours_samples, theirs_samples = (read_samples(samples_file(folder, name)) for folder in (ours, theirs))
        found[name] = compare(ours_samples, theirs_samples, name)
    grid = comparison(str(ours), str(theirs), found)
    return Grid(grid.title, grid.headings, grid.rows, [*grid.notes, *_differing(names, records)])


def _differing(names: list[str], records: list[dict]) -> list[str]:
    """What else than the model differs, a sentence per benchmark."""
    said = []
    for name in names:
        a, b = (record[name]["protocol"] for record in records)
        keys = [key for key in {**a, **b} if key != "source" and a.get(key) != b.get(key)]
        if keys:
            said.append(f"{BENCHMARKS[name].title}: the two runs also differ in {', '.join(keys)}.")
    return said
