"""What became of a dataset's rows, for the log of the run."""

from __future__ import annotations

from dataclasses import dataclass, field

from tepo_megatron.errors import DataError

_TOLD = 10  # rows of a kind that are named


@dataclass
class Faults:
    """Rows that cannot be used: the first is an error, or all are counted."""

    skip: bool
    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, fault: str, rows: int = 1) -> None:
        """Raises DataError unless `skip`."""
        if not self.skip:
            raise DataError(f"{fault} (data.skip_bad_rows=true leaves such rows out, and counts them)")
        self.count += rows
        if len(self.first) < _TOLD:
            self.first.append(fault)


@dataclass
class Report:
    """rows: all that were read; duplicates: of the same prompt and answer; elsewhere: of an earlier set; outside: of the slice;
    unreadable: what the grader cannot read, dropped or not; unsettled: what it did not settle in time; untried: answers for
    which there was no time; unboxed: prompts that ask for a last line "Answer: ..." and not for a box; too_long: dropped.
    """

    source: str
    schema: str
    faults: Faults
    rows: int = 0
    duplicates: int = 0
    elsewhere: int = 0
    outside: int = 0
    unreadable: list[str] = field(default_factory=list)
    dropped_unreadable: bool = False
    unsettled: list[str] = field(default_factory=list)
    untried: int = 0
    unboxed: int = 0
    too_long: int = 0
    prompts: int = 0

    def __str__(self) -> str:
        """One line."""
        counts = (
            (self.duplicates, "duplicates"),
            (self.faults.count, "bad rows"),
            (self.outside, "outside the slice"),
            (self.elsewhere, "in an earlier set"),
            (len(self.unreadable) if self.dropped_unreadable else 0, "with answers that the grader cannot read"),
            (self.too_long, "over data.max_prompt_tokens"),
        )
        dropped = ", ".join(f"{count} {what}" for count, what in counts if count) or "none"
        return f"{self.source}: {self.schema}, {self.rows} rows, {self.prompts} prompts; dropped: {dropped}"

    def details(self) -> list[str]:
        """Further lines, on what there is to mend."""
        lines = [f"{self.source}: left out: {fault}" for fault in self.faults.first]
        if self.unreadable:
            lines.append(f"{self.source}: {len(self.unreadable)} answers that the grader cannot read: {some(self.unreadable)}")
        if self.unsettled:
            lines.append(f"{self.source}: {len(self.unsettled)} answers that the grader did not settle: {some(self.unsettled)}")
        if self.untried:
            lines.append(f"{self.source}: {self.untried} answers were not tried on the grader: there was no time for more")
        if self.unboxed:
            lines.append(
                f'{self.source}: warning: {self.unboxed} prompts ask for a last line "Answer: ..." and say nothing of '
                "\\boxed{}, which is all that the grader reads: docs/data.md says what to do"
            )
        return lines


def some(things: list[str]) -> str:
    """The first of them, and how many more there are."""
    more = f", and {len(things) - _TOLD} more" if len(things) > _TOLD else ""
    return ", ".join(things[:_TOLD]) + more
