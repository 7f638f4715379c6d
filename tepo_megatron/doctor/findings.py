"""The result of a check, and its form on the terminal."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from tepo_megatron.base.errors import TepoError, escaped

Verdict = Literal["pass", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    verdict: Verdict
    said: str  # description of the state, on one line
    fix: str = ""  # empty if none is needed

    def __str__(self) -> str:
        """Return the finding as text for a terminal.

        It is escaped, because it quotes models, datasets and servers. Lines after the first are indented, so that no quoted
        text looks like another finding.
        """
        fix = f"\n→ {self.fix}" if self.fix else ""
        indented = escaped(self.said + fix).replace("\n", f"\n{'':22}")
        return f"{self.verdict:5} {self.check:16}{indented}"


def found_by(check: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield the findings of a check. A TepoError becomes a failure, whose message already names the fix."""
    try:
        yield from look()
    except TepoError as e:
        yield Finding(check, "fail", str(e))
