"""Counts of a dataset's used and dropped rows, for the log of the run."""

from dataclasses import dataclass, field

from tepo_megatron.base.errors import DataError

_MOST_NAMED = 10  # most rows that one message names


@dataclass
class RowFaults:
    """Rows that cannot be used. Without `skip` the first one is an error; with it they are counted."""

    skip: bool
    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, fault: str, rows: int = 1) -> None:
        """Count rows that cannot be used.

        Raises:
            DataError: `skip` is False.
        """
        if not self.skip:
            raise DataError(f"{fault} (data.skip_bad_rows=true leaves such rows out, and counts them)")
        self.count += rows
        if len(self.first) < _MOST_NAMED:
            self.first.append(fault)


@dataclass
class DatasetReport:
    """Counts of one dataset's rows.

    Attributes:
        also_fit: Schemas that the first row fits, too.
        example: First prompt and its answer, with file and row.
        duplicates: Rows dropped because an earlier row has the same prompt and answer.
        elsewhere: Prompts dropped because an earlier set has them.
        unreadable: Answers that the grader cannot read, each with file and row, whether dropped or not.
        dropped_unreadable: The prompts of `unreadable` were dropped.
        unsettled: Answers for which the grader timed out or died.
        untried: Number of answers that were not tried for lack of time.
        unboxed: Number of prompts that ask for a last line "Answer: ..." and not for a box.
        too_long: Prompts dropped because they exceed `data.max_prompt_tokens`.
    """

    source: str
    schema: str
    faults: RowFaults
    also_fit: list[str] = field(default_factory=list)
    example: str = ""
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
        """Return the counts in one line."""
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

    def reading(self) -> str:
        """Return one line: a prompt with its answer, and the other schemas that fit."""
        others = f"; these schemas fit, too, with the same answers: {shorten(self.also_fit)}" if self.also_fit else ""
        return f"{self.source}: {self.example}{others}"

    def details(self) -> list[str]:
        """Return further lines: dropped rows and what to fix."""
        lines = [f"left out: {fault}" for fault in self.faults.first]
        if self.unreadable:
            lines.append(f"{len(self.unreadable)} answers that the grader cannot read: {shorten(self.unreadable)}")
        if self.unsettled:
            lines.append(f"{len(self.unsettled)} answers that the grader did not settle: {shorten(self.unsettled)}")
        if self.untried:
            lines.append(f"{self.untried} answers were not tried on the grader: there was no time for more")
        if self.unboxed:
            lines.append(
                f'warning: {self.unboxed} prompts ask for a last line "Answer: ..." and say nothing of \\boxed{{}}, which is '
                "all that the grader reads: docs/data.md says what to do"
            )
        return [f"{self.source}: {line}" for line in lines]


def shorten(things: list[str]) -> str:
    """Return the first ten things in one string, and how many more there are."""
    more = f", and {len(things) - _MOST_NAMED} more" if len(things) > _MOST_NAMED else ""
    return ", ".join(things[:_MOST_NAMED]) + more
